"""Drive the real commands: start them under a mark, wait for what they do, ask what they left behind.

Every process that a test starts carries the run's mark in its environment, which children inherit; Podman's own
processes are known by the label of the run instead. So "nothing is left" is asked of this run only, whatever else the
machine does.
"""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from legorl import paths
from legorl.sandbox import limits, owner
from legorl.sandbox.podman import podman
from legorl.shards import open_shard
from legorl.task import load_task

ROOT = Path(__file__).parents[2]
BIN = ROOT / "bin"
PATIENCE_S = 500.0  # nothing here takes so long; it ends a test that hangs

# A harness of the standard library alone: it runs what the model says until the model says DONE.
LOOP = """
import json, subprocess, sys, urllib.request
base, key, model, task = sys.argv[1:]
messages = [{"role": "user", "content": task}]
while True:
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json", "user-agent": "loop/1"}
    reply = json.load(urllib.request.urlopen(urllib.request.Request(base + "/v1/chat/completions", body, headers)))
    answer = reply["choices"][0]["message"]["content"]
    if answer == "DONE":
        break
    done = subprocess.run(["bash", "-c", answer], capture_output=True, text=True)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "rc %d" % done.returncode}]
"""


def harness(folder: Path, code: str = LOOP) -> Path:
    """Write a harness file that runs the Python program `code`; its arguments are base URL, key, model and task."""
    path = folder / "loop.toml"
    argv = '["python3", "{home}/loop.py", "{base_url}", "{key}", "{model}", "{task}"]'
    head = 'name = "loop"\nversion = "1"\nprotocol = "openai-chat"\nuser_agent = "^loop/"\n'
    path.write_text(f"{head}[run]\nargv = {argv}\n[run.files]\n\"{{home}}/loop.py\" = '''{code}'''\n")
    return path


def script(path: Path, tasks: Iterable[Path], stall: Path | None = None) -> Path:
    """Write a script that solves every task for LOOP; at `stall`, the solution never comes to an end."""
    lines = [{"match": "^rc [0-9]+$", "text": "DONE"}]
    for folder in tasks:
        task = load_task(folder)
        command = task.labels["solution_command"] + ("; sleep 1000" if folder == stall else "")
        lines.append({"match": "^" + re.escape(task.instruction.strip()), "text": command})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


class Run:
    """One run folder and the processes that work on it. The folder's name is the run's: its containers' label."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._mark = f"LEGORL_E2E_RUN={folder}"
        self._cgroups = set(limits.leftover_cgroups())

    def start(self, *argv: Any, **kwargs: Any) -> "subprocess.Popen[str]":
        name, _, value = self._mark.partition("=")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LEGORL_SERVE")}
        environment[name] = value
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [str(a) for a in argv], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, **kwargs
        )

    def do(self, *argv: Any, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        with self.start(*argv, **kwargs) as process:
            try:
                out, err = process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.end()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self, name: str = "") -> list[int]:
        """Process ids of this run; with a `name`, those whose program or script is called so."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if not name or any(w.rpartition(b"/")[2] == name.encode() for w in words[:2]):
                        found.append(int(entry.name))
        return found

    def the(self, name: str) -> int:
        """Process id of the one process called `name`, waiting for it."""
        return until(lambda: self.processes(name), f"a process {name}")[0]

    def wait_gone(self) -> None:
        """Wait until no process of this run is left. Fails where one stays."""
        end = time.monotonic() + 60
        while pids := self.processes():
            assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pids[0])
                select.select([handle], [], [], 60)
                os.close(handle)

    def left(self) -> list[str]:
        """What this run left behind outside of its folder: processes, containers, cgroups, sockets."""
        listed = asyncio.run(
            podman("ps", "-a", "--filter", f"label=legorl.run={self.folder.name}", "--format", "{{.Names}}")
        )
        end = time.monotonic() + 120
        # Tests beside this one kill commands, too, and their next command clears up: what is theirs goes away.
        while (dead := self._of_the_dead()) and time.monotonic() < end:
            select.select([], [], [], 1)
        return [*map(str, self.processes()), *listed.out.decode().split(), *dead]

    def _of_the_dead(self) -> list[str]:
        """Cgroups and sockets on this machine whose owner has ended, but for cgroups that were there before."""
        cgroups = {c for c in limits.leftover_cgroups() if not _owned(c.name)}
        sockets = [*paths.private_dir().glob("serve-*.*.*.*"), *paths.mounts_dir().glob("llm-*.*.*.*")]
        dead = [str(s) for s in sockets if not _owned(s.name.partition("-")[2])]
        return [*map(str, cgroups - self._cgroups), *dead]

    def end(self) -> None:
        """Kill whatever still runs, after a test that failed."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def sql(self, query: str) -> list[dict[str, Any]]:
        """Ask `lego-inspect sql` about the run."""
        done = self.do(BIN / "lego-inspect", "sql", "--json", query, self.folder)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def logs(self) -> str:
        return "\n".join(f"{file}:\n{file.read_text()}" for file in sorted(self.folder.rglob("*.log")))


def _owned(name: str) -> bool:
    """Does the owner in a name OWNER.RANDOM still run?"""
    return owner.is_alive(name.rpartition(".")[0])


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for `condition` and return what it gave."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.02)
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    """Every row of a shard, or of all in a folder, finished groups and single attempts alike, doubled or not."""
    files = sorted(f for f in path.rglob("*.parquet") if not f.name.startswith(".")) if path.is_dir() else [path]
    return [row for file in files for row in open_shard(file).rows()]
