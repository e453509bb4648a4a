"""Packing: forests and rows hold every target once, and give the same log-probabilities and gradients."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands.train_rows import VOCABULARY, World, tiny_llama
from hypothesis import given
from hypothesis import settings as tests
from hypothesis import strategies as st
from trees import trees

from legorl import attention, tree
from legorl.commands.train.batch import make_batch
from legorl.commands.train.loss import LOSSES
from legorl.commands.train.pack import PADDING, Micro, Sample, forests, rows, samples_of
from legorl.commands.train.settings import Settings, resolve
from legorl.commands.train.train import facts_of
from legorl.model import load_model, target_logprobs

LAYERS, TOPK = 2, 2


def all_samples(turns: list[dict], attempt: int = 0, first: int = 0) -> list[Sample]:
    nodes = tree.nodes_of(turns)
    return samples_of(nodes, attempt, first, np.ones(sum(len(n.completion_ids) for n in nodes), bool))


def contexts(micro: Micro) -> dict[int, list[int]]:
    """For each target, the tokens before it, as attention in this micro-batch lets them be seen."""
    if micro.forest is None:
        return {
            int(entry): micro.ids[row, : place + 1].tolist()
            for entry, row, place in zip(micro.index, micro.rows, micro.positions, strict=True)
        }
    before = {}
    for segment in micro.forest.segments:
        path = [place for start, stop in segment.ancestors for place in range(start, stop)]
        for place in range(segment.start, segment.stop):
            before[place] = [*path, *range(segment.start, place + 1)]
            assert micro.forest.depths[place] == len(before[place]) - 1
    return {
        int(entry): micro.ids[0, before[int(place)]].tolist()
        for entry, place in zip(micro.index, micro.positions, strict=True)
    }


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 60))
@tests(max_examples=100, deadline=None)
def test_every_target_stands_once_behind_its_own_path_whatever_the_packing(attempts, budget):
    samples: list[Sample] = []
    wanted: dict[int, list[int]] = {}
    for number, turns in enumerate(attempts):
        for sample in all_samples(turns, number, 1000 * number):
            samples.append(sample)
            wanted |= {
                int(entry): sample.ids[: place + 1].tolist()
                for entry, place in zip(sample.index, sample.positions, strict=True)
            }
    for packing in (forests, rows):
        micros = packing(samples, budget)
        found: dict[int, list[int]] = {}
        for micro in micros:
            assert micro.ids.size <= budget or len({*micro.rows.tolist()}) == 1
            assert micro.tokens >= (1 - PADDING) * micro.ids.size
            found |= contexts(micro)
        assert found == wanted
        assert sum(len(micro.index) for micro in micros) == len(wanted)
    (whole,) = forests(samples, 1 << 40)
    prefixes = {tuple(ids[: k + 1]) for ids in (s.ids.tolist() for s in samples) for k in range(len(ids))}
    assert whole.tokens == whole.ids.size == len(prefixes)  # every distinct prefix is one token
    assert sum(micro.tokens for micro in forests(samples, budget)) <= sum(len(sample.ids) for sample in samples)


@given(trees(), trees(), st.integers(1, 60), st.data())
@tests(max_examples=60, deadline=None)
def test_recorded_experts_come_with_the_tokens_of_their_own_path(one, other, budget, data):
    samples = []
    for number, turns in enumerate((one, other)):
        for sample in all_samples(turns, number, 1000 * number):
            shape = (len(sample.ids), LAYERS, TOPK)
            seed = data.draw(st.integers(0, 1))  # two records, so that some paths agree and some do not
            experts = np.random.default_rng(seed).integers(0, 4, shape).astype(np.uint8)
            valid = np.random.default_rng(seed).integers(0, 2, len(sample.ids)).astype(bool)
            samples.append(Sample(number, sample.ids, sample.positions, sample.index, experts, valid))
    wanted = {
        int(entry): (sample.experts[: place + 1].tolist(), sample.valid[: place + 1].tolist())
        for sample in samples
        for entry, place in zip(sample.index, sample.positions, strict=True)
    }
    for packing in (forests, rows):
        for micro in packing(samples, budget):
            numbered = np.arange(micro.ids.size).reshape(micro.ids.shape)  # places read as if they were tokens
            for entry, seen in contexts(replace(micro, ids=numbered)).items():
                assert (micro.experts[seen].tolist(), micro.valid[seen].tolist()) == wanted[entry]


def family(kind: str, folder: Path) -> Path:
    """A tiny random model of one of the classes that read trees, unchanged."""
    import torch
    import transformers

    if kind == "Llama":
        return tiny_llama(folder)
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
    }  # fmt: skip
    if kind == "Qwen3Moe":
        common |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**common)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def some_samples(seed: int = 0) -> list[Sample]:
    """Two attempts that share their beginning; one has a branch in the middle, and one at the root."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, 400).astype(np.int32)
    paths = [
        (0, ids[:40]),
        (0, np.concatenate([ids[:23], ids[50:70]])),
        (0, ids[100:117]),
        (1, np.concatenate([ids[:31], ids[70:80]])),
        (1, np.concatenate([ids[:31], ids[70:80], ids[200:203]])),
    ]
    samples, entry = [], 0
    for attempt, path in paths:
        positions = np.sort(rng.choice(len(path), 7, replace=False)).astype(np.int32)
        positions[-1] = len(path) - 1
        samples.append(Sample(attempt, path, positions, np.arange(entry, entry + 7)))
        entry += 7
    return samples


def keep_float64(model) -> None:
    """transformers' norms compute in float32 whatever the model's dtype; here they must not round."""
    import torch

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            weight, eps = module.weight, module.variance_epsilon
            module.forward = lambda x, w=weight, e=eps: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e)


def run(model, micros: list[Micro], count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Log-probabilities of `count` targets, and the gradients of an uneven sum of them."""
    import torch

    rng = np.random.default_rng(1)
    targets, weights = rng.integers(0, VOCABULARY, count), rng.normal(size=count)
    temperatures = rng.uniform(0.5, 2.0, count)
    model.zero_grad()
    got = np.full(count, np.nan)
    for micro in micros:
        places = (micro.ids, micro.rows, micro.positions, targets[micro.index], temperatures[micro.index])
        logprobs = target_logprobs(model, *map(torch.as_tensor, places), forest=micro.forest)
        (logprobs * torch.as_tensor(weights[micro.index])).sum().backward()
        got[micro.index] = logprobs.detach().numpy()
    return got, [parameter.grad.numpy().copy() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_trees_cut_trees_and_rows_give_the_same_logprobs_and_gradients(kind, tmp_path, monkeypatch):
    model = load_model(family(kind, tmp_path / "m"), "fp64")
    keep_float64(model)
    attention.enable(model)
    tolerance = 1e-4 if kind == "Qwen3Moe" else 1e-10  # routers compute in float32, too
    samples = some_samples()
    count = sum(len(sample.index) for sample in samples)
    (whole,) = forests(samples, 1 << 40)
    cut = forests(samples, 60)
    assert whole.tokens < sum(micro.tokens for micro in cut) < sum(len(sample.ids) for sample in samples)
    wanted, gradients = run(model, rows(samples, 1), count)  # a row a pass: no padding, transformers' own attention
    for micros in ([whole], cut, forests(samples, 1), rows(samples, 100)):
        monkeypatch.setattr(attention, "BLOCK", 5)  # several blocks a segment
        got, other = run(model, micros, count)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)
        assert len(gradients) == len(other) > 10
        for one, two in zip(gradients, other, strict=True):
            np.testing.assert_allclose(two, one, rtol=0, atol=tolerance * max(1.0, float(np.abs(one).max())))


def step(world, settings: Settings, rows: list[dict], facts) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the step that a Trainer takes in float64."""
    from legorl.commands.train.step import Trainer

    model = load_model(world.checkpoint.folder, "fp64")
    keep_float64(model)
    trainer = Trainer(settings, model)
    batch = make_batch(rows, facts, 0, settings.loss)
    gradients: dict[str, np.ndarray] = {}
    trainer.optimizer.step = lambda: gradients.update(
        {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    )
    return trainer.run(batch, lambda: None)["loss"], gradients


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_and_its_gradient_is_the_same_whatever_the_packing(loss, tmp_path_factory):
    world = World(tiny_llama(tmp_path_factory.mktemp("model") / "m"))
    first = world.row("task-a", 0, 1.0, [(-1, None, 16, 4), (0, None, 3, 5), (0, 18, 4, 3), (1, 23, 0, 6)])
    batch = [first, world.row("task-a", 1, 0.0, [(-1, None, 4, 3)]), *world.group([0.5, 1.0], "task-b")]
    other = world.row("task-a", 2, 0.5, [(-1, None, 16, 4), (0, None, 3, 5)])
    other["turns"][0]["context_ids"] = first["turns"][0]["context_ids"]  # siblings share their prompt
    batch.append(world.score(other))
    rng = np.random.default_rng(0)
    for row in batch:
        for turn in row["turns"]:
            turn["logprobs"] = [min(0.0, value + rng.normal(0, 0.3)) for value in turn["logprobs"]]
    batch.sort(key=lambda row: row["attempt_id"])
    facts = facts_of(world.checkpoint)
    given = {"loss": loss, "dr_constant": 32.0} if loss == "dr_grpo" else {"loss": loss}
    if loss == "gspo":
        given |= {"clip_low": 0.1, "clip_high": 0.1}  # its own are so narrow that nothing would be left here
    if loss not in ("sft", "rloo", "reinforce"):
        given["off_policy"] = "bypass"  # ratios other than 1, so that clips act
    value, wanted = step(world, resolve(**given, packing="rows", tokens_per_batch=1), batch, facts)
    assert max(np.abs(gradient).max() for gradient in wanted.values()) > 1e-4
    for budget, packing in ((1000, "trees"), (30, "trees"), (1000, "rows")):
        got, gradients = step(world, resolve(**given, packing=packing, tokens_per_batch=budget), batch, facts)
        assert got == pytest.approx(value, rel=1e-9, abs=1e-9)
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            scale = max(1.0, float(np.abs(gradient).max()))
            np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-9 * scale, err_msg=name)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "layers of type sliding"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear"),
    ],
)
def test_a_model_with_other_layers_is_told_by_its_configuration(config, words):
    from transformers import Qwen3Config

    plain = Qwen3Config(num_hidden_layers=2)
    assert attention.why_not(plain) is None
    for name, value in config.items():
        setattr(plain, name, value)
    assert words in attention.why_not(plain)
