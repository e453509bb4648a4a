"""Attention over a forest: many token paths in one row, every shared prefix there once.

    forest = Forest(depths, segments)              # see legorl.commands.train.pack: how paths become one
    enable(model)                                   # once; raises ModelError unless every layer is plain attention
    model.get_decoder()(input_ids=ids[None], position_ids=forest.positions(device), forest=forest)

A forest is a list of segments. A segment is a run of tokens in the row that continue one path: it attends to the spans
of the row that hold its ancestors, and to itself causally. transformers hands `forest` down to the attention function
of each layer, so its model classes are used as they are. There is no mask over the whole row: the work of a segment is
its length times the length of its path, in blocks of BLOCK queries, by the ordinary scaled-dot-product kernel.

Without `forest`, the function is transformers' own causal attention.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from legorl.checkpoint import ModelError

NAME = "legorl_forest"
BLOCK = 1024  # queries at a time where a mask is needed, so a mask never has more than BLOCK rows


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `stop` of the row, and the spans (start, stop) of its ancestors in the order of their depth."""

    start: int
    stop: int
    ancestors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Forest:
    """`depths` int64 [tokens]: how many ancestors each token has. `segments` cover the row from left to right."""

    depths: np.ndarray
    segments: tuple[Segment, ...]

    @cached_property
    def paths(self) -> list[list[tuple[int, int, int]]]:
        """For each segment, its path with itself: (number of the segment, from, to) of tokens within that segment."""
        starts = [segment.start for segment in self.segments]
        found = []
        for segment in self.segments:
            spans = []
            for start, stop in [*segment.ancestors, (segment.start, segment.stop)]:
                while start < stop:
                    number = bisect_right(starts, start) - 1
                    one = self.segments[number]
                    end = min(stop, one.stop)
                    spans.append((number, start - one.start, end - one.start))
                    start = end
            found.append(spans)
        return found

    def positions(self, device: Any = None) -> Any:
        """Position ids of the row, int64 [1, tokens]."""
        import torch

        return torch.as_tensor(self.depths, device=device)[None]


def why_not(config: Any) -> str | None:
    """Why a model of this transformers configuration cannot read a forest; None if it can.

    A layer must let a token see all tokens before it and nothing else: no window, no recurrence, no convolution.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if other := sorted(kinds - {"full_attention"}):
        return f"it has layers of type {other[0]}"
    # Without `layer_types`, old configurations name one window for all layers.
    if not getattr(text, "layer_types", None) and getattr(text, "sliding_window", None):
        return f"its attention is limited to {text.sliding_window} tokens"
    if not getattr(text, "num_attention_heads", None) or getattr(text, "is_encoder_decoder", False):
        return "it is no decoder of plain attention layers"
    return None


def enable(model: Any) -> None:
    """Let `model` read forests. Raises ModelError, naming the reason, if it cannot, by configuration or by trial."""
    import torch
    from transformers import AttentionInterface

    kind = type(model).__name__
    if reason := why_not(model.config):
        raise ModelError(f"{kind} cannot read trees: {reason}")
    AttentionInterface.register(NAME, forest_attention)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        _try_out(model, torch)
    except (TypeError, ValueError, ModelError) as error:
        model.set_attn_implementation(before)
        raise ModelError(f"{kind} cannot read trees: {error}") from error


def _try_out(model: Any, torch: Any) -> None:
    """Two short paths in one forest must give what each gives alone: a configuration does not tell everything."""
    last = min(int(model.config.get_text_config().vocab_size), 64) - 1
    ids = torch.arange(6, device=model.device) % last + 1
    forest = Forest(np.array([0, 1, 2, 3, 2, 3]), (Segment(0, 4, ()), Segment(4, 6, ((0, 2),))))
    decoder = model.get_decoder()
    with torch.no_grad():
        both = decoder(
            input_ids=ids[None], position_ids=forest.positions(model.device), use_cache=False, forest=forest
        ).last_hidden_state[0]
        rows = ids[torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]], device=model.device)]
        alone = decoder(input_ids=rows, use_cache=False).last_hidden_state
    if not alone.isfinite().all():
        return  # damaged weights: whoever reads something with them will say where
    for got, want in ((both[:4], alone[0]), (both[[0, 1, 4, 5]], alone[1])):
        scale = want.abs().max().clamp(min=1e-6)
        if not ((got - want).abs().max() / scale < (1e-3 if want.dtype in (torch.float32, torch.float64) else 0.1)):
            raise ModelError("its layers do not compute a path in a tree as they compute it alone")


def forest_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, forest: Forest | None = None, **kwargs: Any,
) -> tuple[Any, None]:  # fmt: skip
    """transformers' attention interface: query [1, heads, tokens, d], key and value [1, kv heads, tokens, d].

    Returns ([1, tokens, heads, d], None). With `forest`, the row is that forest; otherwise rows are plain sequences.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if forest is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    # Parts by one split a tensor: its backward pass is one concatenation, that of a slice is as long as the whole row.
    lengths = [segment.stop - segment.start for segment in forest.segments]
    queries, keys, values = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    pieces = []
    for own, spans in zip(queries, forest.paths, strict=True):
        pieces += _segment(own, _along(keys, spans), _along(values, spans), scaling)
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def _along(parts: Sequence[Any], spans: Sequence[tuple[int, int, int]]) -> Any:
    """The tokens of `spans` (number of the part, from, to), one after the other."""
    import torch

    taken = [parts[number][:, :, start:stop] for number, start, stop in spans]
    return taken[0] if len(taken) == 1 else torch.cat(taken, dim=2)


def _segment(query: Any, key: Any, value: Any, scaling: float | None) -> list[Any]:
    """Attention of the last tokens of a path to the whole path, causal; a list of blocks along the tokens."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    count, path = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if count == path:
        return [scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)]
    blocks = []
    for first in range(0, count, BLOCK):
        rows = min(BLOCK, count - first)
        seen = path - count + first + rows
        mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(seen - rows)
        blocks.append(
            scaled_dot_product_attention(
                query[:, :, first : first + rows], key[:, :, :seen], value[:, :, :seen],
                attn_mask=mask, scale=scaling, enable_gqa=grouped,
            )
        )  # fmt: skip
    return blocks
