"""Keep what libraries print (vLLM's warnings, progress bars) out of our stdout and stderr, but not out of reach.

Inside `apart(log)` file descriptors 1 and 2 lead to the log; the real ones are given to whoever has something to say.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def apart(log: Path | None) -> Iterator[tuple[int, int]]:
    """Send fds 1 and 2 to `log` (None: leave stderr, send stdout there); yield the real stdout and stderr as fds."""
    sys.stdout.flush()
    sys.stderr.flush()
    real = os.dup(1), os.dup(2)
    target = os.dup(2) if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield real
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, saved in zip((1, 2), real, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
