"""Every loss on token tables made by hand: value and gradient against the formulas written out, against TRL, and under
the splits that must not matter."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from commands.train_formulas import plain_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl.commands.train.batch import Tokens
from legorl.commands.train.loss import LOSSES, importance_weights, kl_losses, token_losses, token_scales
from legorl.commands.train.objective import Objective, needs_old
from legorl.commands.train.settings import resolve

LENGTHS = (7, 1, 4, 12)
BASELINED = [name for name in LOSSES if name != "sft"]


def table(lengths=LENGTHS, seed=0, spread=0.4):
    """Ragged attempts whose tokens lie in the table in mixed order, with numbers far enough apart to clip and mask."""
    rng = np.random.default_rng(seed)
    attempt = rng.permutation(np.repeat(np.arange(len(lengths)), lengths))
    count = len(attempt)
    given = {name: np.zeros(count, np.int32) for name in ("turn", "position", "token", "version", "lag")}
    tokens = Tokens(
        attempt=attempt.astype(np.int32),
        sampler=rng.normal(-2, spread, count).astype(np.float32),
        temperature=np.ones(count, np.float32),
        reason=np.full(count, "trained", object),
        **given,
    )
    tokens.old = (tokens.sampler + rng.normal(0, spread, count)).astype(np.float32)
    tokens.ref = (tokens.sampler + rng.normal(0, spread, count)).astype(np.float32)
    tokens.advantage = rng.normal(0, 1, len(lengths)).astype(np.float32)[attempt]
    return tokens, tokens.old + rng.normal(0, spread, count)


def run(given_settings, tokens, theta, micros=None, current=None):
    """Value and gradient of the loss as the trainer takes it, micro-batch by micro-batch."""
    import torch

    leaf = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    objective = Objective(given_settings, tokens, np.arange(len(tokens)), theta if current is None else current)
    micros = np.array_split(np.arange(len(tokens)), 3) if micros is None else micros
    value = 0.0
    for index in micros:
        loss = objective(leaf[torch.as_tensor(index)], np.asarray(index))
        loss.backward()
        value += float(loss.detach())
    return value, leaf.grad.numpy()


def plain(s, tokens, theta):
    """Value and gradient by the formulas."""
    import torch

    leaf = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    values = {
        name: torch.tensor(getattr(tokens, name), dtype=torch.float64)
        for name in ("old", "sampler", "advantage", "ref")
    }
    total = plain_loss(s, tokens.attempt, leaf, values)
    total.backward()
    return float(total.detach()), leaf.grad.numpy()


WAYS = [
    {},
    {"is_mode": "mask", "is_cap": 1.3},
    {"is_level": "sequence", "is_cap": 1.5},
    {"is_level": "sequence", "is_mode": "mask", "kl": "k3", "kl_coef": 0.3},
    {"off_policy": "bypass", "kl": "k2", "kl_coef": 0.2},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("loss", BASELINED)
def test_value_and_gradient_are_those_of_the_formula(loss, way):
    s = resolve(loss=loss, dr_constant=9.0 if loss == "dr_grpo" else None, **way)
    if loss in ("gspo", "cispo"):  # of their own bounds, one would clip every attempt here, the other no token
        s = replace(s, clip_low=0.1, clip_high=0.1)
    tokens, theta = table()
    value, gradient = plain(s, tokens, theta)
    got, found = run(s, tokens, theta)
    assert got == pytest.approx(value, rel=1e-9) and np.allclose(found, gradient, rtol=1e-9, atol=1e-12)
    assert (tokens.reason == "masked").any() == (s.is_mode == "mask")
    assert np.allclose(tokens.train, theta, rtol=1e-6) and np.isfinite(tokens.ratio).all()
    if LOSSES[loss].clip_high is None:
        assert set(tokens.clipped) == {-1}
    else:
        assert set(tokens.clipped) == {0, 1}
        if loss != "cispo" and s.kl == "none":  # a clipped token has no gradient, and only such (or a masked) one
            assert np.array_equal(found == 0, (tokens.clipped == 1) | (tokens.weight == 0))


def test_sft_is_the_mean_negative_log_likelihood():
    tokens, theta = table()
    tokens.old[:] = tokens.sampler[:] = np.nan  # whoever wrote the tokens
    value, gradient = run(resolve(loss="sft"), tokens, theta)
    assert value == pytest.approx(-theta.mean()) and np.allclose(gradient, -1 / len(theta))
    assert np.isnan(tokens.ratio).all() and np.isnan(tokens.weight).all() and np.isnan(tokens.old).all()
    assert np.allclose(tokens.train, theta)


@pytest.mark.parametrize("off_policy", ["decoupled", "bypass"])
def test_gspo_over_micro_batches_has_the_gradient_of_the_sequence_ratio(off_policy):
    """Every token in a micro-batch of its own, against exp(mean) differentiated as it is written in the paper."""
    import torch

    s = replace(resolve(loss="gspo", off_policy=off_policy), clip_low=0.1, clip_high=0.1)
    tokens, theta = table()
    tokens.sampler = tokens.old + 0 if off_policy == "decoupled" else tokens.sampler
    value, gradient = run(s, tokens, theta, [[k] for k in range(len(tokens))])
    leaf = torch.tensor(theta, requires_grad=True)
    base = torch.tensor(tokens.old if off_policy == "decoupled" else tokens.sampler).double()
    total = 0.0
    for attempt in range(len(LENGTHS)):
        mine = tokens.attempt == attempt
        r, a = torch.exp((leaf[mine] - base[mine]).mean()), float(tokens.advantage[mine][0])
        total = total - torch.minimum(r * a, r.clamp(0.9, 1.1) * a) / len(LENGTHS)
        assert np.allclose(tokens.ratio[mine], float(r.detach()))
    total.backward()
    assert value == pytest.approx(float(total.detach())) and np.allclose(gradient, leaf.grad)
    assert (gradient == 0).any() and (gradient != 0).any()


def test_where_the_policy_has_not_moved_the_ratio_is_one_and_the_pass_itself_gives_old():
    for loss in BASELINED:
        s = resolve(loss=loss, dr_constant=9.0 if loss == "dr_grpo" else None)
        assert not needs_old(s, 1)
        tokens, theta = table()
        tokens.old[:] = np.nan
        run(s, tokens, theta, current=tokens.old)
        assert set(tokens.ratio) == {1.0} and np.allclose(tokens.old, theta)
        assert np.allclose(tokens.weight, np.minimum(np.exp(theta - tokens.sampler), 2.0), rtol=1e-5)
        if tokens.clipped.max() >= 0:
            assert not tokens.clipped.any()


def test_what_needs_the_log_probabilities_of_whole_attempts_beforehand():
    assert needs_old(resolve(is_level="sequence"), 1) and needs_old(resolve(loss="gspo", off_policy="bypass"), 1)
    assert needs_old(resolve(), 2) and not needs_old(resolve(loss="sft"), 2)
    assert not needs_old(resolve(off_policy="bypass"), 1)


def test_weights_and_clip_of_a_token():
    import torch

    rng = np.random.default_rng(0)
    theta, old, sampler, advantage = (rng.normal(0, 0.5, 400) for _ in range(4))
    free = np.exp(old - sampler)
    weight, masked = importance_weights(torch.tensor(old - sampler), 1.5, "truncate")
    assert np.allclose(weight, np.minimum(free, 1.5)) and not masked.any()
    masking, masked = importance_weights(torch.tensor(old - sampler), 1.5, "mask")
    assert np.array_equal(masked, (free > 1.5) | (free < 1 / 1.5)) and np.allclose(masking, np.where(masked, 0, free))
    broken, _ = importance_weights(torch.tensor([800.0, -800.0]), 2.0, "truncate")
    assert broken[0] == 2 and 0 < broken[1] < 1e-8
    log_ratio = torch.tensor(theta - old, requires_grad=True)
    loss, ratio, clipped = token_losses("grpo", None, log_ratio, weight, torch.tensor(advantage), 0.1, 0.3)
    r = np.exp(theta - old)
    assert np.allclose(loss.detach(), -weight.numpy() * np.minimum(r * advantage, np.clip(r, 0.9, 1.3) * advantage))
    beyond = ((advantage > 0) & (r > 1.3)) | ((advantage < 0) & (r < 0.9))
    assert np.array_equal(clipped, beyond) and beyond.any() and np.allclose(ratio, r)
    loss.sum().backward()
    assert np.allclose(log_ratio.grad, np.where(beyond, 0, -weight.numpy() * r * advantage))


def test_there_is_no_k1_loss():
    with pytest.raises(ValueError, match="k1-reward is no loss term"):
        kl_losses("k1-reward", 0.0, 0.0)


def test_scales_of_the_averages():
    attempts = np.array([4, 4, 4, 9])
    assert np.allclose(token_scales("grpo", attempts), [1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert np.allclose(token_scales("dapo", attempts), 1 / 4)
    assert np.allclose(token_scales("dr_grpo", attempts, 10), 1 / 20)
    assert np.allclose(token_scales("rloo", attempts), 1 / 2)
    with pytest.raises(ValueError, match="constant"):
        token_scales("dr_grpo", attempts)


# TRL's own loss functions, given the same log-probabilities; its trainers themselves need a data set and a model.


def padded(tokens, values):
    """[attempts, longest] float64 with zeros behind."""
    rows = np.zeros((len(LENGTHS), max(LENGTHS)))
    for attempt, length in enumerate(LENGTHS):
        rows[attempt, :length] = np.asarray(values)[tokens.attempt == attempt]
    return rows


def trl_gradient(trainer, tokens, theta, **inputs):
    """Value and gradient of TRL's loss as a column of the table; `trainer` stands in for a trainer object."""
    import torch
    from trl import import_utils

    with pytest.MonkeyPatch.context() as patch:  # vLLM takes long to import and has no part in this
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        from trl.trainer import grpo_trainer, rloo_trainer

    leaf = torch.tensor(padded(tokens, theta), requires_grad=True)
    mask = torch.tensor(padded(tokens, np.ones(len(tokens))))
    ids = torch.zeros_like(mask, dtype=torch.long)
    same = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer |= {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (leaf, torch.zeros_like(leaf).detach(), None),
        "accelerator": same, "_metrics": {"train": defaultdict(list)}, "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False, "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False, "max_completion_length": 9,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    }  # fmt: skip
    inputs = {name: torch.tensor(value) for name, value in inputs.items()} | {
        "prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask,
        "advantages": torch.tensor([float(tokens.advantage[tokens.attempt == k][0]) for k in range(len(LENGTHS))]),
        "num_items_in_batch": torch.tensor(float(len(tokens))),
    }  # fmt: skip
    kind = rloo_trainer.RLOOTrainer if "loss_type" not in trainer else grpo_trainer.GRPOTrainer
    if "old_logps" not in inputs and kind is rloo_trainer.RLOOTrainer:
        inputs["old_logps"] = (leaf * mask).sum(1).detach()
    loss = kind._compute_loss(SimpleNamespace(**trainer), None, inputs)
    loss.backward()
    gradient = np.zeros(len(tokens))
    for attempt, length in enumerate(LENGTHS):
        gradient[tokens.attempt == attempt] = leaf.grad[attempt, :length]
    return float(loss.detach()), gradient


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_trl_computes_the_same_loss_and_gradient(loss, kl_coef):
    sequence = loss == "gspo"  # TRL has no GSPO-token: weights must be the attempt's
    s = resolve(
        loss=loss, dr_constant=9.0 if loss == "dr_grpo" else None, is_level="sequence" if sequence else "token",
        kl="k3", kl_coef=kl_coef, clip_low=0.1, clip_high=0.15,
    )  # fmt: skip
    tokens, theta = table()
    value, gradient = run(s, tokens, theta)
    trainer = {
        "loss_type": "grpo" if sequence else loss, "importance_sampling_level": "sequence" if sequence else "token",
        "beta": kl_coef, "epsilon_low": 0.1, "epsilon_high": 1.15 if loss == "cispo" else 0.15,
        "use_vllm": True, "vllm_importance_sampling_correction": True,
    }  # fmt: skip
    theirs, found = trl_gradient(
        trainer, tokens, theta, old_per_token_logps=padded(tokens, tokens.old),
        importance_sampling_ratio=padded(tokens, tokens.weight), ref_per_token_logps=padded(tokens, tokens.ref),
    )  # fmt: skip
    assert value == pytest.approx(theirs, rel=1e-6) and np.allclose(gradient, found, rtol=1e-6, atol=1e-9)


def test_trl_computes_the_same_gradient_for_rloo():
    """Its value is another (a ratio of 1 in place of the log-probability), and it knows no weights."""
    tokens, theta = table()
    tokens.old = tokens.sampler = theta.astype(np.float32)
    _, gradient = run(resolve(loss="rloo"), tokens, theta)
    _, found = trl_gradient({"epsilon_low": 0.2, "epsilon_high": 0.2}, tokens, theta)
    assert np.allclose(gradient, found, rtol=1e-5)


# What must not matter.


@given(st.data(), st.sampled_from(list(LOSSES)), st.sampled_from(WAYS))
@settings(max_examples=60, deadline=None)
def test_neither_order_nor_micro_batches_change_loss_or_gradient(data, loss, way):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    way = {} if loss == "sft" else way
    s = resolve(loss=loss, dr_constant=5.0 if loss == "dr_grpo" else None, **way)
    seed = data.draw(st.integers(0, 99))
    tokens, theta = table(lengths, seed)
    value, gradient = run(s, tokens, theta, [np.arange(len(tokens))])
    order = np.array(data.draw(st.permutations(range(len(tokens)))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    again, _ = table(lengths, seed)
    got, found = run(s, again, theta, [part for part in np.split(order, cuts) if len(part)])
    assert got == pytest.approx(value, rel=1e-9, abs=1e-12) and np.allclose(found, gradient, rtol=1e-9, atol=1e-12)
    assert np.array_equal(again.reason, tokens.reason)
    # Rows of the table in another order: each token keeps its gradient.
    mixed = Tokens(**{n: getattr(tokens, n)[order] for n in ("attempt", "turn", "position", "token", "sampler",
                                                             "temperature", "version", "lag", "reason")})  # fmt: skip
    for name in ("old", "ref", "advantage"):
        setattr(mixed, name, getattr(table(lengths, seed)[0], name)[order])
    got, found = run(s, mixed, theta[order])
    assert got == pytest.approx(value, rel=1e-9, abs=1e-12) and np.allclose(found, gradient[order], atol=1e-12)


@given(st.sampled_from(BASELINED), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_masked_token_does_not_raise_the_weight_of_others(loss, seed):
    s = resolve(loss=loss, dr_constant=5.0 if loss == "dr_grpo" else None, is_mode="mask", is_cap=3.0)
    tokens, theta = table(seed=seed, spread=0.1)
    _, gradient = run(s, tokens, theta)
    assert not (tokens.reason == "masked").any()
    broken, _ = table(seed=seed, spread=0.1)
    broken.sampler[3] -= 9  # exp(9) is beyond the cap
    _, found = run(s, broken, theta)
    assert (broken.reason == "masked").tolist() == [k == 3 for k in range(len(tokens))]
    assert found[3] == 0 and np.allclose(np.delete(found, 3), np.delete(gradient, 3))
