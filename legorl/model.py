"""A Hugging Face folder as a policy: load it, and get the log-probabilities of given targets in chunks.

    model = load_model(folder, "fp32")
    logprobs = target_logprobs(model, input_ids, rows, positions, targets, temperatures)

`target_logprobs` runs the body once and the head only where a target is, a chunk of targets at a time; each chunk's
logits are computed again in the backward pass. So the logits of a batch never exist, forwards or backwards, and memory
does not grow with the vocabulary times the batch. Weights are read from safetensors only and no code from the folder
is ever run.
"""

from pathlib import Path
from typing import Any

from legorl.checkpoint import ModelError

# Logits that exist at a time: 16 million, 64 MiB in float32, whatever the vocabulary.
CHUNK_LOGITS = 1 << 24
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


def load_model(folder: Path | str, dtype: str) -> Any:
    """Load the causal language model in `folder` with weights as `dtype` (fp32, bf16, fp64, or torch's own names).

    It has no dropout in any mode: a policy has one distribution. Raises ModelError if the folder lacks weights, needs
    code of its own, or has a head that is not its output embedding applied to the last hidden state.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a library does not print
    folder = Path(folder)
    wanted = getattr(torch, DTYPES.get(dtype, dtype), None)
    if not isinstance(wanted, torch.dtype):
        raise ModelError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no .safetensors file; only that weight format is read")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=wanted,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be loaded as a causal language model ({_first_line(error)})") from error
    model, report = loaded
    if lost := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
        raise ModelError(f"{folder}: {len(lost)} weights are missing or of another shape (first: {lost[0]})")
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.eval()
    _check_head(model, folder)
    return model


def target_logprobs(model: Any, input_ids: Any, rows: Any, positions: Any, targets: Any, temperatures: Any) -> Any:
    """Log-probabilities of N targets, float32 (float64 for a float64 model), [N], differentiable.

    `input_ids`: int64 [rows, length], padded on the right with anything: attention is causal, so no real token sees
    the padding and no mask is needed. `rows`, `positions`: int64 [N], the place of the hidden state that predicts each
    target (one before the target itself). `targets`: int64 [N]. `temperatures`: float [N]; the logits are divided by
    them, because the recorded log-probabilities are those of the distribution after temperature.
    """
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state[rows, positions]
    return head_logprobs(model.get_output_embeddings(), hidden, targets, temperatures)


def head_logprobs(head: Any, hidden: Any, targets: Any, temperatures: Any, chunk_logits: int = CHUNK_LOGITS) -> Any:
    """log softmax(head(hidden) / temperature) at `targets`: hidden [N, H] -> [N]; `chunk_logits` logits at a time."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def chunk(hidden: Any, targets: Any, temperatures: Any) -> Any:
        logits = head(hidden)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperatures[:, None]
        return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)

    size = max(1, chunk_logits // head.weight.shape[0])
    parts = [
        checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(hidden.split(size), targets.split(size), temperatures.split(size), strict=True)
    ]
    return torch.cat(parts)


def _check_head(model: Any, folder: Path) -> None:
    """Some families scale or cap their logits after the head; `target_logprobs` would silently leave that out."""
    import torch

    with torch.no_grad():
        ids = torch.linspace(0, model.config.vocab_size - 1, 8, device=model.device).long()[None]
        ours = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
        theirs = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3, equal_nan=True):
        kind = type(model).__name__
        raise ModelError(
            f"{folder}: {kind} changes its logits after the output embedding; such models are not supported"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
