"""LoRA: the adapter's gradient, the merged checkpoint and the next step from it, on dense and on sparse models."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import builders
import numpy as np
import pytest
from commands.test_train_pack import keep_float64
from commands.test_train_ranks import launched, shard, sparse
from commands.train_rows import World, tiny_llama
from safetensors.numpy import load_file

from legorl.checkpoint import ModelError, open_checkpoint
from legorl.commands.train.batch import make_batch
from legorl.commands.train.lora import load_policy
from legorl.commands.train.settings import resolve
from legorl.commands.train.train import facts_of
from legorl.model import load_model

EXPERTS = "all-linear,experts.gate_up_proj,experts.down_proj,gate.weight"
BRANCHED = [(-1, None, 16, 4), (0, None, 3, 5), (0, 18, 4, 3), (1, 23, 0, 6)]
MODEL, ADAPTER, STATE = "model/model.safetensors", "adapter/adapter_model.safetensors", "optimizer/state.safetensors"


@pytest.fixture
def step(tmp_path, cli):
    """Train on rows from a model into the folder `name`: (exit code, stderr, record or None)."""

    def run(rows, model, name, *options):
        path = builders.shard(tmp_path / f"{name}.parquet", rows)
        code, _, err = cli(path, "--model", model, "--out", tmp_path / name, *options)
        record = tmp_path / name / "legorl.json"
        return code, err, json.loads(record.read_text()) if record.exists() else None

    return run


def some_rows(world):
    """A group with branches, whose sampler is somewhat off."""
    rows = [world.row("task-a", n, reward, BRANCHED) for n, reward in enumerate((1.0, 0.0, 0.5))]
    rng = np.random.default_rng(0)
    for turn in (turn for row in rows for turn in row["turns"]):
        turn["logprobs"] = [min(0.0, value + rng.normal(0, 0.3)) for value in turn["logprobs"]]
    return rows


def with_adapter(world, dtype, **given):
    """The model with an adapter whose B is not 0, its adapter, and a plain model of the merged weights."""
    import torch

    model, adapter = load_policy(world.checkpoint, resolve(lora=3, lora_alpha=5.0, **given))
    rng = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=rng)
    plain = load_model(world.checkpoint.folder, dtype)
    model = model.to(plain.dtype)
    plain.load_state_dict(adapter.merged())
    return model, adapter, plain


def gradients(model, settings, rows, facts):
    """Gradients of the step that a Trainer takes, by parameter, and the log-probabilities at its start."""
    from legorl.commands.train.step import Trainer

    trainer, batch, found = Trainer(settings, model), make_batch(rows, facts, 0), {}
    trainer.optimizer.step = lambda: found.update(
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    )
    trainer.run(batch, lambda: None)
    return found, batch.tokens.old


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "trees"},
        {"packing": "trees", "tokens_per_batch": 30, "gradient_checkpointing": True},
        {"packing": "rows", "tokens_per_batch": 1},  # longer than the budget: checkpointed as well
        {"packing": "rows"},
    ],
)
def test_the_gradient_of_the_adapter_is_that_of_the_weights_by_the_chain_rule(world, options):
    rows, facts = some_rows(world), facts_of(world.checkpoint)
    settings = resolve(loss="dapo", off_policy="bypass", grad_clip=1e9, **options)
    model, adapter, plain = with_adapter(world, "fp64")
    keep_float64(model)
    keep_float64(plain)
    wanted, logprobs = gradients(plain, settings, rows, facts)
    got, others = gradients(model, replace(settings, lora=3), rows, facts)
    np.testing.assert_allclose(others, logprobs, rtol=0, atol=1e-6)  # the table is float32
    assert adapter.modules == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert len(got) == 2 * 2 * len(adapter.modules)  # nothing else has a gradient
    weights = dict(model.named_parameters())
    for name in (name for name in got if ".lora_A." in name):
        other = name.replace(".lora_A.", ".lora_B.")
        full = wanted[name.replace("lora_A.default.", "")]
        for gradient, formula in (
            (got[name], 5 / 3 * weights[other].T @ full),
            (got[other], 5 / 3 * full @ weights[name].T),
        ):
            assert formula.abs().max() > 1e-6
            np.testing.assert_allclose(gradient, formula.detach(), rtol=0, atol=1e-9 * max(1, full.abs().max()))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_and_routers_are_adapted_if_asked_for_and_replay_holds(kind, tmp_path):
    world = sparse(tmp_path / "m", kind)
    path = shard(world, tmp_path)
    import pyarrow.parquet as pq

    rows, facts = pq.read_table(path).to_pylist(), facts_of(world.checkpoint)
    _, adapter, _ = with_adapter(world, "fp32")
    assert adapter.modules == ["k_proj", "o_proj", "q_proj", "v_proj"] and not adapter.parameters
    model, adapter, plain = with_adapter(world, "fp32", lora_targets=EXPERTS)
    assert adapter.parameters == ["experts.down_proj", "experts.gate_up_proj", "gate.weight"]
    settings = resolve(grad_clip=1e9, packing="trees", gradient_checkpointing=True)
    wanted, logprobs = gradients(plain, settings, rows, facts)
    got, others = gradients(model, settings, rows, facts)
    np.testing.assert_allclose(others, logprobs, rtol=0, atol=1e-4)
    weights, seen = dict(model.named_parameters()), set()
    for name, (prefix, layer) in adapter._adapted().items():
        a, b = (f"{prefix}.lora_{letter}.default.weight" for letter in "AB")
        full = wanted[name] * 5 / 3
        A, B = weights[a].detach(), weights[b].detach()
        if full.ndim == 3:  # expert by expert
            A, B = A.reshape(len(full), 3, -1), B.reshape(B.shape[0], 3, len(full)).permute(2, 0, 1)
        da, db = B.mT @ full, full @ A.mT
        if full.ndim == 3:
            da, db = da.flatten(0, 1), db.permute(1, 2, 0).flatten(1)
        for gradient, formula in ((got[a], da), (got[b], db)):
            assert formula.abs().max() > 0
            np.testing.assert_allclose(gradient, formula, rtol=0, atol=1e-3 * float(formula.abs().max()))
        seen.add(name.rpartition("layers.")[2].partition(".")[2])
        assert layer.scaling["default"] == pytest.approx(5 / 3)
    assert {"mlp.experts.gate_up_proj", "mlp.gate.weight", "self_attn.q_proj.weight"} <= seen


def test_a_chain_of_steps_trains_one_adapter_over_one_base(world, step, tmp_path):
    import torch
    from peft import PeftModel

    options = ("--lora", "4", "--lr", "1e-2", "--gate", "max=1e-4", "--weight-decay", "0.1")
    at, policy = world.checkpoint.path, world
    for number in (1, 2, 3):  # the rows of each step are sampled by the merged weights, as a sampler has them
        code, err, record = step(policy.group([1.0, 0.0, 0.5]), at, f"s{number}", *options)
        assert code == 0 and "an adapter of rank 4 is trained in down_proj, " in err, err
        assert "4,096 numbers beside 28,192 weights\n" in err and "afresh" not in err
        assert record["moved"] and record["version"] == number and record["figures"]["trained_parameters"] == 4096
        assert record["figures"]["align/logprob_abs_diff_max"] < 1e-4
        adapter = record["adapter"]
        assert adapter["base"] == {"version": 0, "digest": world.checkpoint.digest, "path": str(world.checkpoint.path)}
        at = tmp_path / f"s{number}"
        assert record["digest"] == open_checkpoint(at).digest != open_checkpoint(at.parent / "s1").digest or number == 1
        policy = World(at)
    assert float(load_file(at / STATE)["model.layers.0.mlp.up_proj.lora_A.default.weight/step"]) == 3
    files = (world.checkpoint.folder / "model.safetensors", at / MODEL, at / ADAPTER)
    base, merged, matrices = map(load_file, files)
    assert base.keys() == merged.keys()
    for name, weight in base.items():  # from the base in one sum: no rounding of earlier steps is in it
        key = f"base_model.model.{name.removesuffix('.weight')}"
        assert (f"{key}.lora_A.weight" in matrices) == ("proj" in name)
        if "proj" in name:
            a, b = (torch.from_numpy(matrices[f"{key}.lora_{letter}.weight"]) for letter in "AB")
            weight = (torch.from_numpy(weight) + 2.0 * (b @ a)).numpy()
        assert np.array_equal(merged[name], weight), name
    model = PeftModel.from_pretrained(load_model(world.checkpoint.folder, "fp32"), at / "adapter")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, load_model(at / "model", "fp32")(ids).logits, atol=1e-4)
    assert (at / "model/config.json").read_text() == (world.checkpoint.folder / "config.json").read_text()


def test_the_same_step_gives_the_same_bytes_and_nothing_to_train_changes_none(world, step, tmp_path):
    options = ("--lora", "2", "--lora-targets", "v_proj,q_proj", "--lr", "1e-2", "--loss", "dapo", "--minibatches", "2")
    rows = world.group([1.0, 0.0])
    files = (MODEL, ADAPTER, STATE, "adapter/adapter_config.json")
    contents = []
    for name in ("a", "b"):
        assert step(rows, world.checkpoint.path, name, *options)[0] == 0
        contents.append([(tmp_path / name / file).read_bytes() for file in files])
    assert contents[0] == contents[1]
    config = json.loads((tmp_path / "a/adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    later = World(tmp_path / "a")
    code, err, record = step(later.group([1.0, 1.0]), tmp_path / "a", "c", *options)
    assert code == 0 and not record["moved"] and record["digest"] == open_checkpoint(tmp_path / "a").digest, err
    assert [(tmp_path / "c" / file).read_bytes() for file in files] == contents[0]
    code, err, record = step(world.group([0.0, 0.0]), world.checkpoint.path, "d", *options)
    assert record["digest"] == world.checkpoint.digest and "lora_A" in " ".join(load_file(tmp_path / "d" / ADAPTER))
    code, err, record = step(rows, tmp_path / "d", "e", *options)  # the adapter that was begun in `d`
    assert code == 0 and [(tmp_path / "e" / file).read_bytes() for file in files] == contents[0]
    code, err, _ = step(rows, tmp_path / "d", "e", *options[:1], "3", *options[2:])
    assert code == 1 and "lora: was 2, now 3" in err  # a finished step, asked for again with another rank
    code, err, record = step(later.group([1.0, 0.0]), tmp_path / "a", "f", *options, "--keep", "1")
    assert code == 0 and not (tmp_path / "a/optimizer").exists() and (tmp_path / "a/adapter").exists()
    code, err, record = step(later.group([1.0, 0.0]), tmp_path / "a", "g", *options)
    assert code == 0 and "no optimizer state there; AdamW starts afresh" in err


def test_what_does_not_fit_the_adapter_is_refused_or_said(world, step, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(world.checkpoint.path, base)
    rows = world.group([1.0, 0.0])
    lora = ("--lora", "4", "--lr", "1e-2")
    assert step(rows, base, "s1", *lora)[0] == 0
    rows = World(tmp_path / "s1").group([1.0, 0.0])
    ours = f"give --lora 4 --lora-alpha 8 --lora-targets all-linear to go on with it, or --model {tmp_path}/s1/model"

    def refused(words, *options):
        code, err, record = step(rows, tmp_path / "s1", "s2", *options)
        assert code == 1 and record is None and words in err and err.count("\n") == 1, err

    refused("its adapter is one of rank 4, alpha 8 over all-linear, not of rank 8, alpha 16", "--lora", "8")
    refused(ours, "--lora", "4", "--lora-alpha", "4")
    refused(ours, "--lora", "4", "--lora-targets", "q_proj")
    code, err, record = step(rows, tmp_path / "s1/model", "other", "--lora", "8")
    assert code == 0 and record["version"] == 1 and record["adapter"]["base"]["path"] == f"{tmp_path}/s1/model", err
    code, err, record = step(rows, tmp_path / "s1", "full", "--gate", "max=1e-4")
    assert code == 0 and "its adapter ends here; all of the merged weights are trained, with a new AdamW" in err
    assert record["moved"] and "adapter" not in record and not (tmp_path / "full/adapter").exists()
    assert record["figures"]["trained_parameters"] == 28192
    code, err, record = step(World(tmp_path / "full").group([1.0, 0.0]), tmp_path / "full", "again", *lora)
    assert code == 0 and "an adapter begins over them, with a new AdamW" in err
    assert record["adapter"]["base"]["version"] == 2

    base.rename(tmp_path / "moved")
    words = f"its adapter goes with the weights {world.checkpoint.digest} of {base}, which is not there; put them, or"
    refused(words, *lora)
    tiny_llama(base, seed=1)
    refused(words.replace("which is not there", f"which has weights {open_checkpoint(base).digest} now"), *lora)
    shutil.rmtree(base)
    base.symlink_to(tmp_path / "moved")
    file = tmp_path / "s1" / ADAPTER
    held = file.read_bytes()
    file.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    refused("does not hold the adapter that was merged into the weights beside it", *lora)
    file.unlink()
    refused("does not hold the adapter", *lora)
    file.write_bytes(held)
    code, err, record = step(rows, tmp_path / "s1", "s2", *lora, "--gate", "max=1e-4")
    assert code == 0, err


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "q_prj", "q_proj,norm"])
def test_layers_that_cannot_be_adapted_are_named(world, name):
    with pytest.raises(ModelError, match=r"has no such layer that can be adapted; there are all-linear, down_proj, "):
        load_policy(world.checkpoint, resolve(lora=2, lora_targets=name))


def test_a_rank_that_no_weight_has_is_refused(world):
    with pytest.raises(ModelError, match="none of the weights that k_proj,v_proj means has a rank above 16"):
        load_policy(world.checkpoint, resolve(lora=17, lora_targets="k_proj,v_proj"))


def test_bf16_leaves_the_adapter_in_float32_and_halves_what_loses_nothing(world, tmp_path):
    import torch
    from accelerate.state import AcceleratorState

    from legorl.commands.train.step import Trainer

    AcceleratorState._reset_state()  # one precision a process is accelerate's rule; a command is one process
    published = load_model(world.checkpoint.folder, "fp32")
    published.model.layers[0].to(torch.bfloat16).float()  # weights that bfloat16 holds, and some that it does not
    published.save_pretrained(tmp_path / "m")
    policy, rows, found = open_checkpoint(tmp_path / "m"), World(tmp_path / "m").group([1.0, 0.0]), []
    for halved in (False, True):
        settings = resolve(lora=4, dtype="bf16", lr=1e-2)
        model, adapter = load_policy(policy, settings)
        trainer, batch = Trainer(settings, model), make_batch(rows, facts_of(policy), 4)
        size = sum(p.nbytes for p in model.parameters())
        if halved:
            adapter.halve()
            layers = [[p for p in layer.parameters() if p.dtype == torch.bfloat16] for layer in model.model.layers]
            assert [len(held) for held in layers] == [7, 0]
            assert sum(p.nbytes for p in model.parameters()) == size - 2 * sum(p.numel() for p in layers[0])
        trainer.run(batch, lambda: None)
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32} and all(p.abs().max() > 0 for p in trained)
        assert 1e-4 < np.abs(batch.tokens.old - batch.tokens.sampler).mean() < 0.2  # it did compute in bfloat16
        found.append([torch.as_tensor(batch.tokens.old), *trained, *adapter.merged().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert {tensor.dtype for tensor in found[1]} == {torch.float32}
    AcceleratorState._reset_state()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_two_processes_train_the_adapter_of_one(sharded, tmp_path, cli):
    world = sparse(tmp_path / "m")
    path = shard(world, tmp_path)
    options = ["--loss", "dapo", "--minibatches", "2", "--tokens-per-batch", "12", "--lr", "1e-3", "--gate", "none"]
    options += ["--grad-clip", "0.5", "--lora", "4", "--lora-targets", EXPERTS]
    for number, start in enumerate((world.checkpoint.path, tmp_path / "one0")):  # the second goes on from the first
        args = [path, "--model", start, "--out", tmp_path / f"one{number}", *options]
        assert cli(*args)[0] == 0
    done = launched(2, sharded, *args[:4], tmp_path / "two", *options)
    assert done.returncode == 0 and done.stderr.count("an adapter of rank 4") == 1, done.stderr
    for file in (MODEL, ADAPTER, STATE):
        ours, theirs = (load_file(Path(tmp_path, name, file)) for name in ("one1", "two"))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=2e-4 * float(np.abs(value).max()), err_msg=name)
    configs = [(tmp_path / name / "adapter/adapter_config.json").read_bytes() for name in ("one1", "two")]
    assert configs[0] == configs[1]


def test_followed_rounds_train_the_adapter_of_single_commands(world, tmp_path, cli):
    """The first round has no variance: its adapter is new, and the second goes on with it."""
    options = ("--lora", "4", "--lr", "1e-2", "--keep", "9")
    model, shards = world.checkpoint.path, []
    for number, rewards in enumerate([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)], 1):
        rows = World(model).group(list(rewards), step=number)
        shards.append(builders.shard(tmp_path / f"{number}.parquet", rows))
        assert cli(shards[-1], "--model", model, "--out", tmp_path / f"s{number}", *options)[0] == 0
        model = tmp_path / f"s{number}"
    code, _, err = cli("--follow", *shards, "--model", world.checkpoint.path, "--out", tmp_path / "run", *options)
    assert code == 0 and err.count("an adapter of rank 4 is trained in") == 1, err
    for number in (1, 2, 3):
        one, other = tmp_path / f"s{number}", tmp_path / f"run/step-{number:04d}/checkpoint"
        for file in (MODEL, ADAPTER, "adapter/adapter_config.json", *([STATE] if number > 1 else [])):
            assert (one / file).read_bytes() == (other / file).read_bytes(), (number, file)
        records = [json.loads((folder / "legorl.json").read_text())["adapter"] for folder in (one, other)]
        assert records[0] == records[1] and records[0]["base"]["version"] == 0
