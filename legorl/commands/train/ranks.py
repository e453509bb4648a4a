"""The processes that take one step together: one, or those of `accelerate launch` or `torchrun`.

    ranks = Ranks("fp32")
    scorer = ranks.spread(model)                    # scorer(ids, rows, positions, targets, temperatures, forest=...)
    for micro, ours in ranks.deal(micros): ...      # this process's share
    ranks.collect(columns, index)                   # then every process knows what all have computed

Every process reads the same rows and makes the same batch; only micro-batches are divided. What is averaged over is
counted over the whole batch beforehand, so a process's loss is its part of the sum, and gradients are added, not
averaged. Two ways to hold the weights:

    replicated  each process has all of them; gradients are added once an optimiser step
    sharded     FSDP2 (torch's fully_shard) a decoder layer, where ACCELERATE_USE_FSDP=true, as `accelerate launch
                --use_fsdp` sets it

Under FSDP2 a forward pass needs all processes, so who has fewer micro-batches computes one again, with loss 0.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from legorl.commands.train.pack import Micro
from legorl.model import target_logprobs

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def rank() -> int:
    """This process's number among those launched together, from its environment; 0 if it is alone."""
    return int(os.environ.get("RANK", "0"))


class Channel:
    """From the first process to the others: what it alone knows, however long they have to wait for it."""

    def __init__(self) -> None:
        self._group: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            import torch
            from accelerate import PartialState

            PartialState()
            # Collectives give up after minutes, and a round of rollouts takes hours.
            self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=365))

    def tell(self, value: Any = None) -> Any:
        """Return in all processes what the first was given. All must call it."""
        if self._group is None:
            return value
        import torch

        told = [value]
        torch.distributed.broadcast_object_list(told, src=0, group=self._group)
        return told[0]


class Ranks:
    """`index` of `count` processes, and the device of this one (accelerate's choice)."""

    def __init__(self, dtype: str):
        from accelerate import Accelerator

        if "RANK" in os.environ:
            _end_with_launcher()
        self.accelerator = Accelerator(mixed_precision="bf16" if dtype == "bf16" else "no")
        self.device = self.accelerator.device
        self.index, self.count = self.accelerator.process_index, self.accelerator.num_processes
        self.sharded = self.count > 1 and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"

    def spread(self, model: Any) -> Any:
        """Put `model`, or this process's shard of it, on its device; return the module whose call scores targets.

        The call is that of legorl.model.target_logprobs without its first argument.
        """
        import torch

        class Scorer(torch.nn.Module):
            """All of a forward pass in one call of one module, as FSDP wants it."""

            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return target_logprobs(self.model, *args, **kwargs)

        scorer = Scorer()
        if not self.sharded:
            return scorer.to(self.device)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.count,))
        layers = set(getattr(model, "_no_split_modules", None) or ())
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh)
        return fully_shard(scorer, mesh=mesh)

    def deal(self, micros: Sequence[Micro]) -> list[tuple[Micro, bool]]:
        """This process's micro-batches; all have the same number. False: computed only to keep step with the others."""
        share = [(micro, True) for micro in micros[self.index :: self.count]]
        if self.sharded and micros and len(share) < -(-len(micros) // self.count):
            share.append((micros[0], False))
        return share

    def collect(self, columns: Iterable[np.ndarray], index: np.ndarray) -> None:
        """Let all processes know what each has put at its own entries `index` of `columns` (one table's, in place)."""
        if self.count == 1:
            return
        columns = list(columns)
        size = len(columns[0])
        ours = np.zeros((1 + len(columns), size))
        ours[0, index] = 1
        for row, column in zip(ours[1:], columns, strict=True):
            row[index] = column[index]
        # A value that was not computed is NaN: it must not spread to other entries, so it travels as a gap.
        gaps = np.isnan(ours[1:])
        ours[1:][gaps] = 0
        known, everyone = self._sum(ours), self._sum(gaps.astype(np.float64))
        found = known[0] > 0
        for column, values, missing in zip(columns, known[1:], everyone, strict=True):
            column[found] = values[found]
            if column.dtype.kind == "f":
                column[found & (missing > 0)] = np.nan

    def total(self, *values: float) -> list[float]:
        """The sum of each of `values` over all processes."""
        return list(values) if self.count == 1 else self._sum(np.array(values, np.float64)).tolist()

    def backward(self, loss: Any) -> None:
        """The backward pass of this process's part of a loss."""
        self.accelerator.backward(loss * self.count if self.sharded else loss)  # FSDP takes the mean of gradients

    def clip(self, parameters: Iterable[Any], largest: float) -> float:
        """Add up the gradients of all processes, hold their norm at `largest`; return the norm that it was."""
        import torch

        parameters = list(parameters)
        if self.count > 1 and not self.sharded:
            for parameter in parameters:
                if parameter.grad is None:  # no micro-batch of this process came by
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, largest)
        return float(whole(norm))

    def _sum(self, values: np.ndarray) -> np.ndarray:
        import torch

        # float64 carries float32 values and counts exactly; MPS has none, but it has one process.
        tensor = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(tensor)
        return tensor.cpu().numpy()


def leave() -> None:
    """End the processes' group, after the last step: torch's threads for it may abort a process that exits with it."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _end_with_launcher() -> None:
    """Have Linux kill this process when its launcher dies: one that waits for partners takes note of nothing else."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def whole(tensor: Any) -> Any:
    """A tensor that may be sharded, whole. All processes must ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(tensor: Any, other: Any) -> Any:
    """A whole tensor on the device of `other`, and sharded as it is. All processes must ask for it."""
    tensor = tensor.to(other.device)
    if not hasattr(other, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, other.device_mesh, other.placements)
