"""Which cores the engine keeps for itself and which are left for sandboxes.

A busy neighbour stalls the engine at its OpenMP barriers (measured: 3 to 15 times slower on two cores), so where cores
are few they are split: the engine gets all but one, sandboxes the rest. With one core, or many, nothing is pinned.
"""

import os

FEW = 8


def parse_cores(text: str) -> list[int]:
    """Read `0`, `0-3` or `0,2-3`; raise ValueError if a core is not available to this process."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first + last).isdigit():
            raise ValueError(f"{text!r} is not a list of cores such as 0 or 0,2-3")
        cores.update(range(int(first), int(last or first) + 1))
    missing = cores - os.sched_getaffinity(0)
    if missing or not cores:
        raise ValueError(f"cores {text!r}: this process may use {sorted(os.sched_getaffinity(0))}")
    return sorted(cores)


def split_cores(wanted: str | None, engine: str) -> tuple[list[int], list[int]]:
    """Return (the engine's cores, cores for sandboxes); [] means not pinned."""
    here = sorted(os.sched_getaffinity(0))
    if wanted == "all" or engine == "script":
        return [], []
    if wanted:
        mine = parse_cores(wanted)
        return mine, [c for c in here if c not in mine]
    if engine != "vllm" or not 2 <= len(here) <= FEW:
        return [], []
    return here[:-1], here[-1:]
