"""Finished turns of a session in a file, so that memory holds only what matching needs.

The file has no name from the moment it is made: it goes with the process, however that ends, and nobody else can open
it. What is read back is what this process wrote.

    spill = Spill(); at = spill.add(turn); turn = spill.read(at); spill.close()
"""

import pickle
import tempfile
from typing import IO, Any

from legorl import paths


class Spill:
    """Objects in the order they were added. `size` is what they take on disk, bytes."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self.size = 0

    def add(self, what: Any) -> int:
        """Write `what`; return where. Raises OSError where the disk is full; nothing is kept of it then."""
        if self._file is None:
            # The cache is on a disk; run-time and temporary folders are often memory.
            self._file = tempfile.TemporaryFile(dir=paths.cache_dir(), buffering=0)  # noqa: SIM115
        data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        at = self.size
        self._file.seek(at)
        if self._file.write(data) != len(data):
            raise OSError(f"only a part of {len(data)} bytes could be written")
        self.size += len(data)
        return at

    def read(self, at: int) -> Any:
        assert self._file is not None
        self._file.seek(at)
        return pickle.load(self._file)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
