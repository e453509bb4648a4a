"""Log-probabilities through a model's output embedding, without the logits of a batch.

    logprobs = head_logprobs(model.get_output_embeddings(), hidden, targets, temperatures)

A chunk of tokens at a time: their logits, the log-sum of their exponentials, and away with them; the backward pass
computes them again. Written out as one function of autograd, because on tens of thousands of columns what a chain of
ready-made ones keeps and copies costs as much as the products do. d logprob / d logits = onehot(target) - softmax.

Importing this module imports torch.
"""

from typing import Any

import torch

# Logits that exist at a time: 16 million, 64 MiB in float32, whatever the vocabulary.
CHUNK_LOGITS = 1 << 24


def head_logprobs(head: Any, hidden: Any, targets: Any, temperatures: Any, chunk_logits: int = CHUNK_LOGITS) -> Any:
    """log softmax(head(hidden) / temperature) at `targets`: hidden [N, H] -> [N], differentiable.

    float32, or float64 for float64 `hidden`; under autocast the products are in its dtype. `head`: a linear layer;
    `chunk_logits`: how many logits exist at a time.
    """
    size = max(1, chunk_logits // head.weight.shape[0])
    return _HeadLogprobs.apply(hidden, head.weight, getattr(head, "bias", None), targets, temperatures, size)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, temperatures: Any, size: int) -> Any:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        sums = torch.empty_like(logprobs)
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(dtype)
            for part in _parts(len(hidden), size):
                logits = _logits(hidden[part], matrix, bias, temperatures[part], wide)
                sums[part] = logits.logsumexp(1)
                logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - sums[part]
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, sums)
        ctx.size, ctx.dtype, ctx.wide = size, dtype, wide
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias, targets, temperatures, sums = ctx.saved_tensors
        (gradient,) = gradients
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight) if wants_weight else None
        to_bias = torch.zeros_like(bias) if bias is not None and wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(ctx.dtype)
            for part in _parts(len(hidden), ctx.size):
                logits = _logits(hidden[part], matrix, bias, temperatures[part], ctx.wide)
                slope = (gradient[part] / temperatures[part]).to(ctx.wide)[:, None]
                steps = logits.sub_(sums[part, None]).exp_().mul_(-slope).scatter_add_(1, targets[part, None], slope)
                if to_bias is not None:
                    to_bias += steps.sum(0)
                steps = steps.to(ctx.dtype)
                if to_hidden is not None:
                    to_hidden[part] = (steps @ matrix).to(hidden.dtype)
                if to_weight is not None and to_weight.dtype == ctx.dtype:
                    to_weight.addmm_(steps.T, hidden[part].to(ctx.dtype))
                elif to_weight is not None:
                    to_weight += steps.T @ hidden[part].to(ctx.dtype)
        return to_hidden, to_weight, to_bias, None, None, None


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(hidden: Any, matrix: Any, bias: Any, temperatures: Any, wide: Any) -> Any:
    bias = None if bias is None else bias.to(matrix.dtype)
    logits = torch.nn.functional.linear(hidden.to(matrix.dtype), matrix, bias).to(wide)
    return logits.div_(temperatures[:, None])
