"""The update of a float64 model against the formulas written out: several optimiser steps, both off-policy modes,
sequence weights, KL to a reference, sft. Each turn is a sequence of its own there, with full logits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from commands.test_train_routing import recorded
from commands.test_verify_routing import sparse_world
from commands.train_formulas import plain_loss
from commands.train_rows import World, plain_logprobs, tiny_llama
from moe import KINDS

from legorl import tree
from legorl.commands.train.batch import make_batch
from legorl.commands.train.loss import LOSSES
from legorl.commands.train.rows import BatchError, CheckError
from legorl.commands.train.settings import resolve
from legorl.commands.train.train import check_reference, facts_of, score_reference, with_constant

BRANCHED = [(-1, None, 6, 4), (0, None, 3, 5), (0, 8, 4, 3), (1, 13, 0, 6), (-1, None, 5, 3)]
SHAPES = [BRANCHED, [(-1, None, 4, 3)], None, None]
REWARDS = [1.0, 0.0, 0.5, 0.0]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tiny_llama(tmp_path_factory.mktemp("model") / "m", num_hidden_layers=1))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return World(
        tiny_llama(tmp_path_factory.mktemp("model") / "r", seed=3, num_hidden_layers=1, initializer_range=0.25)
    )


@pytest.fixture
def rows(world):
    """A group with branches and unequal lengths, two temperatures, and a sampler that is somewhat off."""
    made = [world.row("task-a", n, r, shape) for n, (r, shape) in enumerate(zip(REWARDS, SHAPES, strict=True))]
    for turn in made[3]["turns"]:
        turn["temperature"] = 0.7
    world.score(made[3])
    rng = np.random.default_rng(1)
    for row in made:
        for turn in row["turns"]:
            noise = rng.normal(0, 0.4, len(turn["logprobs"]))
            turn["logprobs"] = [min(0.0, v + float(d)) for v, d in zip(turn["logprobs"], noise, strict=True)]
    return made


def theta_of(model, row):
    """Log-probabilities of all sampled tokens of an attempt, turn by turn, with their graph."""
    import torch

    nodes = tree.nodes_of(row["turns"])
    return torch.cat(
        [
            plain_logprobs(model, tree.path_ids(nodes, node.index), node.prompt_len, turn["temperature"])
            for node, turn in zip(nodes, row["turns"], strict=True)
        ]
    )


def step(world, rows, settings, reference=None):
    """Take the step; return its figures, its batch, and (weights, gradients, attempts) of each optimiser step."""
    from legorl.commands.train.step import Trainer
    from legorl.model import load_model

    settings = with_constant(replace(settings, lr=1e-2, grad_clip=1e9, tokens_per_batch=40), rows)
    batch = make_batch(rows, facts_of(world.checkpoint), 4, settings.loss)
    if reference:
        referee = Trainer(settings, load_model(reference.checkpoint.folder, "fp64"))
        referee.score(batch, batch.samples, batch.tokens.ref)
    one = Trainer(settings, load_model(world.checkpoint.folder, "fp64"))
    taken = []
    one.optimizer.register_step_pre_hook(
        lambda *_: taken.append(
            [
                {n: getattr(p, what).detach().clone() for n, p in one.model.named_parameters()}
                for what in ("data", "grad")
            ]
        )
    )
    figures = one.run(batch, lambda: None)
    batch.check_sums()
    learned = [s for s in batch.samples if batch.tokens.reason[s.index[0]] in ("trained", "masked")]
    parts = [sorted({sample.attempt for sample in part}) for part in one._minibatches(learned)]
    return settings, figures, batch, [(*state, part) for state, part in zip(taken, parts, strict=True)]


def wanted(world, rows, settings, advantages, weights, attempts, reference=None):
    """Loss and gradients of one optimiser step of `attempts`, taken with `weights`."""
    import torch

    old, ref = {}, {}
    for k in attempts:
        with torch.no_grad():
            old[k] = theta_of(world.model, rows[k])
            ref[k] = theta_of(reference.model, rows[k]) if reference else torch.zeros_like(old[k])
    start = {n: p.detach().clone() for n, p in world.model.named_parameters()}
    try:
        world.model.load_state_dict(weights, strict=False)
        world.model.zero_grad()
        theta = {k: theta_of(world.model, rows[k]) for k in attempts}
        sampled = {k: [v for turn in rows[k]["turns"] for v in turn["logprobs"]] for k in attempts}
        loss = plain_loss(
            settings,
            np.concatenate([[k] * len(theta[k]) for k in attempts]),
            torch.cat([theta[k] for k in attempts]),
            {
                "old": torch.cat([old[k] for k in attempts]),
                "ref": torch.cat([ref[k] for k in attempts]),
                "sampler": torch.tensor([v for k in attempts for v in sampled[k]], dtype=torch.float64),
                "advantage": torch.cat([torch.full((len(theta[k]),), advantages[k]).double() for k in attempts]),
            },
        )
        loss.backward()
        return float(loss.detach()), {n: p.grad.clone() for n, p in world.model.named_parameters()}
    finally:
        world.model.load_state_dict(start, strict=False)


def compare(world, rows, given, reference=None, advantages=None):
    settings, figures, batch, taken = step(world, rows, resolve(**given), reference)
    if advantages is None:
        advantages = [float(batch.tokens.advantage[batch.tokens.attempt == k][0]) for k in range(len(rows))]
    losses = []
    for weights, gradients, attempts in taken:
        value, expected = wanted(world, rows, settings, advantages, weights, attempts, reference)
        losses.append(value)
        for name, gradient in expected.items():
            assert np.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6), (attempts, name)
    assert figures["loss"] == pytest.approx(np.mean(losses), rel=1e-5, abs=2e-6)
    return batch, taken


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "sft"])
@pytest.mark.parametrize("way", [{}, {"off_policy": "bypass"}], ids=["decoupled", "bypass"])
def test_every_optimiser_step_has_the_gradient_of_the_formula(world, rows, loss, way):
    """The second step meets other weights than the first; `old` stays that of the start."""
    batch, taken = compare(world, rows, {"loss": loss, "minibatches": 2, **way})
    assert len(taken) == 2 and any((taken[0][0][n] != taken[1][0][n]).any() for n in taken[0][0])
    weight = batch.tokens.weight.astype(float)
    free = np.exp(batch.tokens.old.astype(float) - batch.tokens.sampler)
    assert np.allclose(weight, 1 if way else np.minimum(free, 2.0), rtol=1e-5)
    if loss not in ("gspo",):
        base = batch.tokens.sampler if way else batch.tokens.old
        assert np.allclose(batch.tokens.ratio, np.exp(batch.tokens.train.astype(float) - base), rtol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"is_level": "sequence", "is_cap": 4.0},
        {"loss": "dapo", "is_level": "sequence", "is_mode": "mask", "is_cap": 1.5},
        {"loss": "gspo", "off_policy": "bypass"},
        {"loss": "rloo", "is_mode": "mask", "is_cap": 1.3},
    ],
    ids=str,
)
def test_one_optimiser_step_with_what_is_taken_over_whole_attempts(world, rows, given):
    batch, _ = compare(world, rows, given)
    counts = batch.counts()
    assert (counts.get("masked", 0) > 0) == (given.get("is_mode") == "mask") and set(counts) <= {"trained", "masked"}


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_kl_term_is_averaged_as_the_loss_is(world, reference, rows, kind):
    compare(world, rows, {"kl": kind, "kl_coef": 0.5}, reference)


def test_k1_is_taken_off_the_reward_and_has_no_gradient(world, reference, rows):
    import torch

    with torch.no_grad():
        costs = [float((theta_of(world.model, r) - theta_of(reference.model, r)).sum()) for r in rows]
    rewards = np.array(REWARDS) - 0.02 * np.array(costs)
    advantages = rewards - rewards.mean()
    given = {"loss": "dr_grpo", "kl": "k1-reward", "kl_coef": 0.02}
    batch, _ = compare(world, rows, given, reference, advantages.tolist())
    assert np.allclose(batch.tokens.advantage, advantages[batch.tokens.attempt], atol=1e-4)
    for row in rows:
        row["reward"] = 1.0  # equal, but for what they cost
    _, figures, batch, _ = step(world, rows, resolve(**given), reference)
    assert "loss" in figures and set(batch.counts()) == {"trained"}


def test_sft_is_maximum_likelihood_of_solved_attempts(world, rows):
    rows[0]["turns"][0] |= {"support": "greedy", "temperature": 0.0, "logprobs": [0.0] * 4}
    rows[2]["reward"] = 1.0
    settings, figures, batch, taken = step(world, rows, resolve(loss="sft"))
    rows[0]["turns"][0]["temperature"] = 1.0
    value, gradients = wanted(world, rows, settings, [0.0] * 4, taken[0][0], [0, 2])
    assert figures["loss"] == pytest.approx(value)
    assert all(np.allclose(taken[0][1][name], gradients[name], atol=1e-8) for name in gradients)
    assert np.isnan(batch.tokens.weight).all() and np.isnan(batch.tokens.old).all()
    assert batch.counts() == {"trained": 30, "unrewarded": 12}


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_logits_are_divided_by_the_turns_temperature(world, rows, temperature):
    for row in rows:
        for turn in row["turns"]:
            turn["temperature"] = temperature
    batch, _ = compare(world, [world.score(row) for row in rows], {})
    assert np.allclose(batch.tokens.old, batch.tokens.sampler, atol=1e-6)


def test_how_many_tokens_a_step_reads_is_known_before(world, rows):
    for given in ({}, {"loss": "gspo", "minibatches": 2}, {"is_level": "sequence"}, {"loss": "sft"}):
        from legorl.commands.train.step import Trainer
        from legorl.model import load_model

        settings = resolve(**given)
        one = Trainer(settings, load_model(world.checkpoint.folder, "fp32"))
        batch, read = make_batch(rows, facts_of(world.checkpoint), 4, settings.loss), []
        one.progress = read.append
        planned = one.planned(batch)
        one.run(batch, lambda: None)
        assert sum(read) == planned, given


def test_the_constant_of_dr_grpo_is_the_largest_token_limit(rows):
    rows[1]["budgets"] = {"tokens": {"limit": 250.0, "used": 3.0}}
    rows[2]["budgets"] = None
    assert with_constant(resolve(loss="dr_grpo"), rows).dr_constant == 250
    assert with_constant(resolve(loss="dr_grpo", dr_constant=7.0), rows).dr_constant == 7
    rows[0]["budgets"] = {"tokens": {"limit": math.inf, "used": 3.0}}
    assert with_constant(resolve(loss="dr_grpo"), rows).dr_constant == 250
    for row, limit in zip(rows, [None, math.inf, 0.0, math.nan], strict=False):
        row["budgets"] = {"tokens": {"limit": limit, "used": 3.0}}
    with pytest.raises(BatchError, match="give --dr-constant"):
        with_constant(resolve(loss="dr_grpo"), rows)


def test_a_reference_of_another_family_is_refused(world, reference, tmp_path):
    check_reference(reference.checkpoint, world.checkpoint)
    other = World(tiny_llama(tmp_path / "v", vocab_size=310)).checkpoint
    with pytest.raises(CheckError, match="vocabulary of 310, the model to train one of 300"):
        check_reference(other, world.checkpoint)


def test_a_sparse_reference_chooses_its_own_experts(tmp_path):
    """The recorded ones are the policy's choice; here they are none that the model would make."""
    world = sparse_world(KINDS[0], tmp_path / "m")
    rows = recorded(world)
    batch = make_batch(rows, facts_of(world.checkpoint), 4)
    score_reference(batch, resolve(kl="k3"), world.checkpoint)
    assert any(sample.experts is not None for sample in batch.samples)
    assert np.allclose(batch.tokens.ref, batch.tokens.sampler, atol=1e-4)  # what the rows were given without a record
