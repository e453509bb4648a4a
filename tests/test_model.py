import json
import shutil

import numpy as np
import pytest
from commands.train_rows import plain_logprobs, tiny_llama
from moe import KINDS, native_experts, tiny_moe

from legorl.checkpoint import ModelError
from legorl.routing import Shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def model(folder):
    from legorl.model import load_model

    return load_model(folder, "fp64")


def _batch(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, length) for length in lengths]


def test_padded_rows_give_the_logprobs_and_gradients_of_single_sequences(model):
    import torch

    from legorl.model import target_logprobs

    sequences = _batch([9, 5, 12])
    temperatures = [1.0, 0.7, 1.3]
    expected = [plain_logprobs(model, ids, 2, t) for ids, t in zip(sequences, temperatures, strict=True)]
    weights = torch.linspace(-1, 1, sum(len(e) for e in expected), dtype=torch.float64)
    (torch.cat(expected) * weights).sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    ids = torch.full((3, 12), 7)  # padding is any token
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.as_tensor(sequence)
    places = [(row, k) for row, sequence in enumerate(sequences) for k in range(1, len(sequence) - 1)]
    rows, positions = (torch.tensor(column) for column in zip(*places, strict=True))
    got = target_logprobs(
        model, ids, rows, positions, ids[rows, positions + 1], torch.tensor(temperatures)[rows].double()
    )
    (got * weights).sum().backward()
    # transformers' RMSNorm works in float32 whatever the model's dtype.
    assert torch.allclose(got, torch.cat(expected), atol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], atol=1e-4, rtol=1e-4), name
    model.zero_grad()


def test_dtypes_by_name(folder):
    import torch

    from legorl.model import load_model

    assert next(load_model(folder, "fp32").parameters()).dtype == torch.float32
    assert next(load_model(folder, "bfloat16").parameters()).dtype == torch.bfloat16
    with pytest.raises(ModelError, match="unknown dtype 'fp12'"):
        load_model(folder, "fp12")


def test_pickled_weights_are_not_read(folder, tmp_path):
    import torch

    from legorl.model import load_model

    shutil.copy(folder / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_model(tmp_path, "fp32")


def test_missing_weights_are_an_error_not_a_random_start(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    from legorl.model import load_model

    shutil.copy(folder / "config.json", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        load_model(tmp_path, "fp32")


def test_weights_cut_short_are_an_error(folder, tmp_path):
    from legorl.model import load_model

    copy = shutil.copytree(folder, tmp_path / "m")
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(copy, "fp32")


def test_code_in_the_folder_is_not_run(folder, tmp_path):
    from legorl.model import load_model

    copy = shutil.copytree(folder, tmp_path / "m")
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(copy, "fp32")
    assert not (tmp_path / "ran").exists()


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path):
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from legorl.model import load_model

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=1.0, initializer_range=0.3,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="changes its logits"):
        load_model(tmp_path, "fp32")


@pytest.mark.parametrize("kind", KINDS)
def test_the_routers_of_a_moe_are_seen_as_transformers_sees_them(kind, tmp_path):
    import torch

    from legorl.model import find_routers, load_model

    model = load_model(tiny_moe(kind, tmp_path), "fp32")
    routers = find_routers(model)
    assert routers.shape == Shape(layers=2 if kind == "qwen3_moe" else 3, topk=2, experts=8)
    seen = []
    ids = list(range(5, 40))
    with torch.no_grad(), routers.watched(lambda layer, logits, experts: seen.append((layer, experts))):
        model(input_ids=torch.tensor([ids]))
    assert [layer for layer, _ in seen] == list(range(routers.shape.layers))
    got = np.stack([experts.sort(dim=1).values.numpy() for _, experts in seen], axis=1)
    assert np.array_equal(got, native_experts(model, ids))
    model(input_ids=torch.tensor([ids]))
    assert len(seen) == routers.shape.layers  # no longer watched


def test_a_dense_model_has_no_routers_and_unknown_ones_are_named(model, tmp_path):
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    from legorl.model import find_routers

    assert find_routers(model) is None
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ModelError, match="routers of Glm4MoeForCausalLM"):  # they choose by groups of experts
        find_routers(Glm4MoeForCausalLM(config).eval())
