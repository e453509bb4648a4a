"""The update against a plain float64 reference: losses, gradients, denominators, weights, clips."""

from dataclasses import replace

import numpy as np
import pytest
from commands.train_rows import plain_logprobs

from legorl import tree
from legorl.commands.train.batch import make_batch
from legorl.commands.train.settings import Settings
from legorl.commands.train.train import facts_of

# Histories rewritten (turn 2), answered twice (3), and a conversation of its own (5).
BRANCHED = [(-1, None, 6, 4), (0, None, 3, 5), (0, 8, 4, 3), (1, 13, 0, 6), (2, None, 2, 2), (-1, None, 5, 3)]
SHORT = [(-1, None, 4, 3)]


def trainer(world, settings):
    from legorl.commands.train.step import Trainer
    from legorl.model import load_model

    return Trainer(settings, load_model(world.checkpoint.folder, "fp32"))


def sample_rows(world):
    """One group with branches, unequal lengths, a temperature, dropped tokens and a sampler that is somewhat off."""
    rows = [
        world.row("task-a", 0, 1.0, BRANCHED),
        world.row("task-a", 1, 0.0, SHORT),
        world.row("task-a", 2, 0.0),
        world.row("task-a", 3, 0.5),
        world.row("task-b", 0, 1.0),
        world.row("task-b", 1, 1.0),
    ]
    for turn in rows[3]["turns"]:
        turn["temperature"] = 0.7
    world.score(rows[3])
    rows[2]["turns"][1]["drops"] = [{"start": 1, "length": 2, "reason": "cut"}]
    rng = np.random.default_rng(1)
    for row in rows:
        for turn in row["turns"]:
            noise = rng.normal(0, 0.6, len(turn["logprobs"]))
            turn["logprobs"] = [min(0.0, value + float(d)) for value, d in zip(turn["logprobs"], noise, strict=True)]
    return rows


def reference(world, rows, loss, cap, mode):
    """Loss and gradients in float64: each turn its own sequence, full logits, the formula written out."""
    import torch

    model = world.model
    model.zero_grad()
    rewards = np.array([row["reward"] for row in rows[:4]])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    per_attempt = []
    for row, advantage in zip(rows[:4], advantages, strict=True):
        nodes = tree.nodes_of(row["turns"])
        terms = []
        for node, turn in zip(nodes, row["turns"], strict=True):
            theta = plain_logprobs(model, tree.path_ids(nodes, node.index), node.prompt_len, turn["temperature"])
            weight = torch.exp(theta.detach() - torch.tensor(turn["logprobs"], dtype=torch.float64))
            if mode == "truncate":
                weight = weight.clamp(max=cap)
            else:
                weight = torch.where((weight > cap) | (weight < 1 / cap), 0.0, weight)
            term = -weight * torch.exp(theta - theta.detach()) * advantage
            terms.append(term[[reason is None for reason in tree.drop_reasons(turn)]])
        per_attempt.append(torch.cat(terms))
    if loss == "grpo":
        value = torch.stack([terms.mean() for terms in per_attempt]).mean()
    else:
        value = torch.cat(per_attempt).mean()
    value.backward()
    return float(value.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("budget", [2048, 16])
def test_loss_and_gradient_are_those_of_the_formula(world, loss, mode, budget):
    rows = sample_rows(world)
    value, gradients = reference(world, rows, loss, 1.5, mode)
    one = trainer(world, Settings(loss=loss, is_cap=1.5, is_mode=mode, tokens_per_batch=budget))
    batch = make_batch(rows, facts_of(world.checkpoint), 4)
    found = {}
    figures = one.run(batch, lambda: found.update({n: p.grad.clone() for n, p in one.model.named_parameters()}))
    assert figures["loss"] == pytest.approx(value, abs=1e-5)
    for name, gradient in gradients.items():
        assert np.allclose(found[name], gradient, atol=1e-5, rtol=1e-3), name
    batch.check_sums()
    assert (batch.counts().get("masked", 0) > 0) == (mode == "mask")
    assert set(batch.tokens.ratio[batch.trained()]) == {1.0}


def test_old_logprobs_are_right_on_every_branch_and_for_comparable_attempts(world):
    rows = [world.row("task-a", 0, 1.0, BRANCHED), world.row("task-a", 1, 0.0, SHORT), *world.group([1, 1], "task-b")]
    batch = make_batch(rows, facts_of(world.checkpoint), 4)
    trainer(world, Settings(tokens_per_batch=20)).run(batch, lambda: None)
    assert np.allclose(batch.tokens.old, batch.tokens.sampler, atol=1e-4)
    assert batch.counts() == {"trained": 26, "no_variance": 18}


def test_comparable_attempts_are_read_up_to_gate_tokens(world):
    rows = world.group([1.0, 1.0, 1.0])
    length = 6 + 4 + 3 + 5 - 1
    batch = make_batch(rows, facts_of(world.checkpoint), 4)
    one = trainer(world, Settings(gate_tokens=2 * length + 1, packing="rows"))
    assert one.planned(batch) == 2 * length
    one.run(batch, lambda: None)
    assert np.isfinite(batch.tokens.old).sum() == 2 * 9 and np.isnan(batch.tokens.train).all()


def test_gradient_checkpointing_changes_nothing_but_memory(world):
    import torch

    gradients, rows = [], sample_rows(world)
    for settings in (Settings(), Settings(gradient_checkpointing=True)):
        one = trainer(world, settings)
        calls = []
        one.model.model.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        batch = make_batch(rows, facts_of(world.checkpoint), 4)
        one.run(batch, lambda one=one: gradients.append([p.grad.clone() for p in one.model.parameters()]))
        assert len(calls) == (3 if settings.gradient_checkpointing else 2)  # one more forward, of the trained batch
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_rewarded_tokens_become_likelier_and_others_less(world):
    rows = world.group([1.0, 0.0])
    one = trainer(world, Settings(lr=1e-2))
    batch = make_batch(rows, facts_of(world.checkpoint), 4)
    one.run(batch, lambda: None)
    after = make_batch(rows, facts_of(world.checkpoint), 4)
    one.score(after, after.samples)
    gain = after.tokens.old - batch.tokens.old
    assert gain[batch.tokens.attempt == 0].mean() > 0.1 and gain[batch.tokens.attempt == 1].mean() < -0.1


def test_the_gradient_is_held_and_weights_decay_beside_it(world):
    import torch

    def norm(tensors):
        return float(torch.stack([tensor.norm() for tensor in tensors]).norm())

    one = trainer(world, Settings(lr=1e-4, grad_clip=1e-3, weight_decay=1000.0))
    held = []
    one.optimizer.register_step_pre_hook(lambda *_: held.append(norm([p.grad for p in one.model.parameters()])))
    before = norm([p.detach() for p in one.model.parameters()])
    figures = one.run(make_batch(world.group([1.0, 0.0]), facts_of(world.checkpoint), 4), lambda: None)
    assert held == [pytest.approx(1e-3, rel=1e-2)] and figures["grad_norm"] > 1e-2  # told as it was
    assert norm([p.detach() for p in one.model.parameters()]) / before == pytest.approx(0.9, rel=1e-2)  # 1 - lr * decay


def test_later_minibatches_are_measured_against_the_steps_start(world):
    rows = [world.row(f"task-{k}", n, float(n)) for k in range(2) for n in range(2)]
    batch = make_batch(rows, facts_of(world.checkpoint), 4)
    one = trainer(world, Settings(lr=1e-2, minibatches=2, packing="rows"))
    assert one.planned(batch) == 2 * 4 * 17
    figures = one.run(batch, lambda: None)
    tokens = batch.tokens
    assert figures["minibatches"] == 2
    assert np.allclose(tokens.old, tokens.sampler, atol=1e-4)  # all taken before the first move
    moved = [not np.allclose(tokens.ratio[tokens.attempt == k], 1, atol=1e-4) for k in range(4)]
    assert sum(moved) == 2  # an attempt is in one minibatch, whole
    ratio = np.exp(tokens.train.astype(float) - tokens.old)
    assert np.allclose(tokens.ratio, ratio, rtol=1e-4)
    up, down = tokens.advantage > 0, tokens.advantage < 0
    wanted = (up & (ratio > 1.2)) | (down & (ratio < 0.8))
    assert wanted.any() and np.array_equal(tokens.clipped == 1, wanted)


def test_the_gate_stands_before_the_first_move(world):
    def refuse():
        raise RuntimeError("refused")

    for minibatches in (1, 2):
        one = trainer(world, Settings(lr=1.0, minibatches=minibatches))
        before = [p.detach().clone() for p in one.model.parameters()]
        with pytest.raises(RuntimeError, match="refused"):
            one.run(make_batch(world.group([1.0, 0.0]), facts_of(world.checkpoint), 4), refuse)
        assert all((a == b).all() for a, b in zip(before, one.model.parameters(), strict=True))


def test_bf16_forward_keeps_float32_weights(world):
    import torch
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # one precision a process is accelerate's rule; a command is one process
    rows = world.group([1.0, 0.0])
    batch = make_batch(rows, facts_of(world.checkpoint), 4)
    one = trainer(world, replace(Settings(), dtype="bf16"))
    one.run(batch, lambda: None)
    gap = np.abs(batch.tokens.old - batch.tokens.sampler)
    assert 1e-4 < gap.mean() < 0.2  # it did compute in bfloat16
    assert {p.dtype for p in one.model.parameters()} == {torch.float32}
    AcceleratorState._reset_state()
