"""Help for tests with real containers: open them, fill them, list what lies in them."""

import asyncio
import io
import json
import tarfile
from contextlib import AsyncExitStack
from typing import Any

from legorl.sandbox import RunResult, Sandbox, Spec, open_sandbox
from legorl.task import Limits

SMALL = Limits(memory_mb=64, disk_mb=32, processes=32, cpus=2.0)
# A tree: path -> content, "-> target" for a link, or (content, mode).
Tree = dict[str, Any]

_LIST = """
import hashlib, json, os, sys
top, seen = sys.argv[1], {}
for folder, names, files in os.walk(top):
    if folder == top:
        names[:] = [name for name in names if name != ".git"]
        files = [name for name in files if name != ".git"]
    for name in names + files:
        path = os.path.join(folder, name)
        key = os.path.relpath(path, top)
        if os.path.islink(path):
            seen[key] = "-> " + os.readlink(path)
        elif os.path.isfile(path):
            mode = "x" if os.stat(path).st_mode & 0o100 else "-"
            seen[key] = mode + hashlib.sha256(open(path, "rb").read()).hexdigest()
print(json.dumps(seen))
"""


class Boxes:
    """Runs coroutines on one event loop that lasts as long as the test session."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.run = runner.run
        self._stack = AsyncExitStack()

    def open(self, **fields: Any) -> Sandbox:
        """Open a sandbox that lasts to the end of the session."""
        spec = Spec(**{"name": "test", "run": "tests", "limits": SMALL, "lifetime_s": 300.0, **fields})
        return self.run(self._stack.enter_async_context(open_sandbox(spec)))

    def close(self) -> None:
        self.run(self._stack.aclose())


def tar(tree: Tree) -> bytes:
    """Pack a tree as task.pack would, from memory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out:
        for path, value in tree.items():
            content, mode = value if isinstance(value, tuple) else (value, 0o644)
            info = tarfile.TarInfo(path)
            info.mode = mode
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content.removeprefix("-> ")
                out.addfile(info)
            else:
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


async def sh(box: Sandbox, script: str, cwd: str = "/ws", **options: Any) -> RunResult:
    """Run a bash script as the agent."""
    return await box.run(["bash", "-c", script], cwd=cwd, timeout_s=options.pop("timeout_s", 60), **options)


async def listing(box: Sandbox, repo: str) -> dict[str, str]:
    """Return every file and link below `repo`, less its .git: path -> link target or x bit and digest."""
    result = await box.run(["python3", "-c", _LIST, repo], timeout_s=60, log_limit=1 << 20)
    assert result.exit_code == 0, result.log
    return json.loads(result.log)


async def place(box: Sandbox, repo: str, tree: Tree) -> None:
    """Put `tree` at `repo` in place of whatever is there."""
    await sh(box, f"chmod -R u+rwX {repo} 2>/dev/null; rm -rf {repo}")
    await box.put(tar(tree), repo)


async def start(box: Sandbox, repo: str, tree: Tree) -> None:
    """Put `tree` at `repo` in place of whatever is there, and commit it."""
    await place(box, repo, tree)
    await box.commit(repo)
