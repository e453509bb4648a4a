"""Are the recorded experts those that the model chooses? Compared inside the reference's own forward pass.

    comparison = Comparison(routers, turns, version, length)
    with comparison.watching(): model(ids)
    comparison.settle()                                   # sets `routes` of each turn

Layer by layer, so that no more than one layer's router logits exist. Experts are compared as sets. Where two experts
are all but tied, rounding decides between them: for every row the gap says by how much the router prefers the least of
its own choice to the least of the recorded one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from legorl import routing
from legorl.commands.inspect.recorded import Turn


@dataclass(frozen=True)
class Routes:
    """What came of the recorded rows of one turn, one entry a row that could be compared.

    `positions`: of its path; `equal`: whether every layer chose the recorded experts; `gaps`: largest preference of the
    router for others, in its logits, infinite for experts that no router can choose; `layers`: where that was.
    """

    positions: np.ndarray
    equal: np.ndarray
    gaps: np.ndarray
    layers: np.ndarray


class Comparison:
    """The recorded rows of `turns`, all on one path of which `length` tokens are fed; those that `version` routed.

    `faults`: (turn, text) of records that do not fit the model. A record that does not fit its turn is passed by:
    invariants.py finds it.
    """

    def __init__(self, routers: Any, turns: Sequence[Turn], version: int, length: int):
        self._routers, self._turns = routers, []
        self.faults: list[tuple[Turn, str]] = []
        rows, places = [], []
        for turn in turns:
            if turn.routing is None:
                continue
            try:
                experts, valid = routing.unpack(turn.routing)
            except routing.RoutingError:
                continue
            wanted = (routers.shape.layers, routers.shape.topk)
            if experts.shape[1:] != wanted:
                held = "{} layers x {} experts".format(*experts.shape[1:])
                self.faults.append((turn, f"{held} are recorded, and the model has {wanted[0]} x {wanted[1]}"))
                continue
            if len(turn.span) != len(valid):
                continue
            at = np.asarray(turn.span)
            # A row serves the token behind it; those of the prompt serve the first one.
            serves = turn.versions[np.maximum(0, at + 1 - turn.prompt_len)]
            kept = valid & (at < length) & (serves == version)
            self._turns.append(turn)
            rows.append(experts[kept].astype(np.int64))
            places.append(at[kept])
        self._rows = np.concatenate(rows) if rows else np.zeros((0, 1, 1), np.int64)
        self._places, self._counts = np.concatenate([np.zeros(0, np.int64), *places]), [len(p) for p in places]
        self._equal = np.ones(len(self._rows), bool)
        self._gaps, self._layers = np.zeros(len(self._rows)), np.zeros(len(self._rows), np.int64)

    def watching(self) -> AbstractContextManager[None]:
        """Compare with what the routers choose in the forward pass within."""
        return self._routers.watched(self._see) if len(self._rows) else nullcontext()

    def _see(self, layer: int, logits: Any, experts: Any) -> None:
        import torch

        at = torch.as_tensor(self._places, device=logits.device)
        recorded = torch.as_tensor(self._rows[:, layer], device=logits.device).sort(dim=1).values
        chosen = experts[at].sort(dim=1).values
        differ = (recorded != chosen).any(dim=1)
        if not bool(differ.any()):
            return
        recorded, chosen, values = recorded[differ], chosen[differ], logits[at[differ]].float()
        twice = (recorded[:, 1:] == recorded[:, :-1]).any(dim=1)
        nowhere = (recorded >= logits.shape[1]).any(dim=1)
        least = values.gather(1, recorded.clamp(max=logits.shape[1] - 1)).min(dim=1).values
        gaps = values.gather(1, chosen).min(dim=1).values - least
        gaps = torch.where(twice | nowhere, torch.inf, gaps).double().cpu().numpy()
        where = np.flatnonzero(differ.cpu().numpy())
        self._equal[where] = False
        worse = gaps > self._gaps[where]
        self._gaps[where[worse]], self._layers[where[worse]] = gaps[worse], layer

    def settle(self) -> None:
        """Add what was found to each turn's `routes`."""
        ends, arrays = np.cumsum(self._counts), (self._places, self._equal, self._gaps, self._layers)
        for turn, *parts in zip(self._turns, *(np.split(array, ends)[:-1] for array in arrays), strict=True):
            before = turn.routes
            if before is not None:
                held = (before.positions, before.equal, before.gaps, before.layers)
                parts = [np.concatenate(pair) for pair in zip(held, parts, strict=True)]
            turn.routes = Routes(*parts)


def fault(turn: Turn, max_gap: float) -> str | None:
    """What is wrong with the recorded experts of `turn`, if any row's gap is above `max_gap`."""
    if turn.routes is None:
        return None
    # Written so that a NaN is beyond every limit.
    beyond = np.flatnonzero(~(turn.routes.gaps <= max_gap))
    if not len(beyond):
        return None
    worst = int(beyond[np.argmax(np.nan_to_num(turn.routes.gaps[beyond], nan=np.inf))])
    return (
        f"the experts of {len(beyond)} of {len(turn.routes.gaps)} input positions are not the model's; "
        f"most at position {turn.routes.positions[worst]}, sparse layer {turn.routes.layers[worst]}, by "
        f"{turn.routes.gaps[worst]:.3g} of its router's logits"
    )
