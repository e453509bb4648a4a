"""Where things lie on this machine: the cache, private sockets, and folders that sandboxes may mount.

Started as root, containers run rootless under a service user (`legorl`), so what they mount must be reachable by it
and what is secret must not be. Started as a plain user, both belong to that user.
"""

import os
import shutil
from pathlib import Path

SERVICE_USER = "legorl"


def is_root() -> bool:
    return os.geteuid() == 0


def cache_dir() -> Path:
    """Models, harness runtimes, images: LEGORL_CACHE, else /var/cache/legorl for root, else ~/.cache/legorl."""
    default = Path("/var/cache/legorl") if is_root() else Path("~/.cache/legorl").expanduser()
    path = Path(os.environ.get("LEGORL_CACHE") or default)
    path.mkdir(parents=True, exist_ok=True)
    return path


def private_dir() -> Path:
    """Short folder (0700) for control sockets: Unix socket paths end at 108 bytes. No sandbox can reach it."""
    path = Path("/run/legorl-private") if is_root() else _user_runtime() / "private"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def mounts_dir() -> Path:
    """Short folder whose sub-folders sandboxes may mount (model sockets, helpers): traversable, not listable."""
    path = Path("/run/legorl-mounts") if is_root() else _user_runtime() / "mounts"
    path.mkdir(mode=0o711, parents=True, exist_ok=True)
    if is_root():
        try:
            shutil.chown(path, group=SERVICE_USER)
            path.chmod(0o710)
        except LookupError:  # the service user is not set up yet: keep the folder to ourselves
            path.chmod(0o700)
    return path


def _user_runtime() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/legorl-{os.getuid()}"
    path = Path(base) / "legorl"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
