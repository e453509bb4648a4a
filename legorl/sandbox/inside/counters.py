"""Inside the container: what the kernel counted for it, where its own cgroup is to be seen. Standard library only.

On another host that is the only way to the counters. The files belong to the host's root and the mount is read-only:
the agent can read them, not change them.
"""

import contextlib

FOLDERS = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids")  # cgroup v2; cgroup v1
FILES = (
    "memory.events",
    "memory.peak",
    "memory.oom_control",
    "memory.max_usage_in_bytes",
    "memory.limit_in_bytes",
    "pids.events",
    "pids.peak",
    "pids.max",
)


def counters():
    """Return the text of each file that is there, by name."""
    texts = {}
    for folder in FOLDERS:
        for name in FILES:
            with contextlib.suppress(OSError), open(f"{folder}/{name}") as file:
                texts[name] = file.read()
    return texts
