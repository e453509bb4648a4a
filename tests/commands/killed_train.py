"""lego-train, killed from within at a chosen moment, under the real launcher: python -m commands.killed_train ARGS.

KILL=MOMENT:WHO:RANK. The process of RANK sends SIGKILL at MOMENT, to itself (WHO=one) or to the launcher and all that
it launched (WHO=all): no code of ours runs after that. A signal from outside could not be timed without waiting.

    moved      the weights have moved, nothing is written
    weights    the new weights are on the disk, the rest is not
    whole      everything is written, the rename is still to come
    renamed    the checkpoint is there, the command has not said so
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def strike(who: str) -> None:
    if who == "all":
        parent = os.getppid()
        os.kill(parent, signal.SIGSTOP)  # else it could tell its children first
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in [*(int(child) for child in children if int(child) != os.getpid()), parent]:
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def after(place: Any, name: str, who: str, condition: Callable[[], bool] = lambda: True) -> None:
    """Strike as soon as `place.name` has returned."""
    real = getattr(place, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if condition():
            strike(who)
        return result

    setattr(place, name, wrapped)


def arm(moment: str, who: str) -> None:
    from legorl.commands.train import save, step

    match moment:
        case "moved":
            after(step.Trainer, "_move", who)
        case "weights":
            import safetensors.torch

            after(safetensors.torch, "save_file", who)  # of the optimiser's state: the weights stand already
        case "whole":
            after(save, "sync_tree", who)
        case "renamed":
            after(save, "sync_folder", who)
        case _:
            raise ValueError(moment)


if __name__ == "__main__":
    from legorl.commands.train.cli import main

    moment, who, rank = os.environ["KILL"].split(":")
    if os.environ["RANK"] == rank:
        arm(moment, who)
    main()
