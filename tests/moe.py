"""Small random mixture-of-experts models, and what transformers itself says of their routing.

tiny_moe("qwen3_moe", folder); experts = native_experts(load_model(folder, "fp32"), ids)
"""

from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("qwen3_moe", "mixtral")


def tiny_moe(kind: str, folder: Path, vocab_size: int = 300, seed: int = 0, **config: Any) -> Path:
    """Write a model to `folder`: 3 layers, 2 of 8 experts; the middle layer of the Qwen3-MoE is dense.

    `config`: other settings than these.
    """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if kind == "mixtral":
        model: Any = MixtralForCausalLM(MixtralConfig(**{**common, "num_local_experts": 8, **config}))
    else:
        sparse = {"num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**common, **sparse, **config}))
    model.save_pretrained(folder)
    return folder


def native_experts(model: Any, ids: Any) -> np.ndarray:
    """Experts of every position of `ids`, [positions, sparse layers, topk], sorted, by one plain forward pass."""
    import torch

    ids = torch.as_tensor(np.asarray(ids, np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    return np.stack([layer.topk(2, dim=1).indices.sort(dim=1).values.numpy() for layer in logits], axis=1)
