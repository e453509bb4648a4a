"""One part of n of a list of work, for batch schedulers: `--shard 2/8` is the second of eight jobs.

    Share.parse("2/8").of(tasks)

Every job is given the same list and takes every n-th item of it. So the parts of a list are disjoint, together the
whole, and of one size to within an item; the same list gives the same parts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Part `index` (from 1) of `count`."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Read "i/n". Raises ValueError unless 1 <= i <= n."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{text!r} is not i/n with 1 <= i <= n, as in 2/8")
        return cls(int(found[1]), int(found[2]))

    @property
    def setting(self) -> str | None:
        """What a folder made with it remembers: nothing where it is the whole list."""
        return None if self.count == 1 else str(self)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, position: int) -> bool:
        """Is the item at `position` (from 0) of the list in this part?"""
        return position % self.count == self.index - 1

    def of(self, items: Sequence[T]) -> list[T]:
        return list(items[self.index - 1 :: self.count])
