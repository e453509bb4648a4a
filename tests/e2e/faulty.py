"""Run real harnesses against a script that goes wrong, and keep what the engine was fed beside what was recorded.

    with Bench(model, folder) as bench:
        rows = bench.play("pi", {"cut": [call("bash")("ls"), {"text": "Done.", "fault": "cut"}]})

The server runs in this process, on a thread, so that its engine can note every prompt; harnesses and sandboxes are
driven by the real lego-rollout.
"""

import asyncio
import json
import os
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from legorl.checkpoint import open_checkpoint
from legorl.commands.serve.engine import Ask
from legorl.commands.serve.launch import make_llm_dir, serving
from legorl.commands.serve.script_engine import Line, ScriptEngine, read_script
from legorl.commands.serve.server import Server
from legorl.harness import load_harness
from legorl.shards import open_shard

BIN = Path(__file__).parents[2] / "bin"
CONTEXT = 32768
Script = list[str | dict[str, str]]


def call(tool: str, argument: str = "command", **others: str) -> Callable[[str], str]:
    """Text with a tool call whose arguments are not in the schema's order, so that an echo in that order shows."""
    return lambda command: (
        "I will use a tool. \n<tool_call>\n"
        + json.dumps({"name": tool, "arguments": {**others, argument: command}}, ensure_ascii=False)
        + "\n</tool_call>"
    )


class NotingEngine(ScriptEngine):
    """A script a harness and task, its lines in their order; `fed` holds the prompts of every attempt."""

    def __init__(self, folder: Path, script: list[Line]):
        super().__init__(folder, 0, script, CONTEXT)
        self.scripts: dict[str, list[Line]] = {}
        self.fed: dict[str, list[list[int]]] = defaultdict(list)
        self._attempts: dict[str, str] = {}

    def admit(self, ask: Ask) -> None:
        self._script = self.scripts[ask.attempt_id]
        super().admit(ask)
        self._attempts[ask.request_id] = ask.attempt_id

    async def generate(self, request_id: str, prompt_ids: list[int], *rest: Any) -> Any:
        self.fed[self._attempts.pop(request_id)].append(prompt_ids)
        async for delta in super().generate(request_id, prompt_ids, *rest):
            yield delta


class Bench:
    """One running server, shared by all rollouts."""

    def __init__(self, model: Path, folder: Path):
        self._model, self.folder = model, folder
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> "Bench":
        self._thread.start()
        self._up.wait()
        if self._failure:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._failure = error
        self._up.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        held = open_checkpoint(self._model)
        self.engine = NotingEngine(held.folder, [])
        async with serving(Server(self.engine, held, make_llm_dir(), []), None) as (control, _port):
            self._control = str(control)
            self._up.set()
            await self._stop.wait()

    def play(self, harness: str, scripts: dict[str, Script]) -> dict[str, dict[str, Any]]:
        """Run `harness` once a script, named by its key; return the rows by those keys."""
        name = load_harness(harness).label.replace(":", "-")
        tasks = [self._task(f"{name}-{key}") for key in scripts]
        for key, lines in scripts.items():
            path = self.folder / f"{name}-{key}.jsonl"
            path.write_text("\n".join(json.dumps({"text": x} if isinstance(x, str) else x) for x in lines))
            self.engine.scripts[f"faults.0.{name}.{name}-{key}.0"] = read_script(path)
        argv = self._rollout(harness, tasks, self.folder / "out" / "-".join([name, *scripts]))
        environment = {**os.environ, "LEGORL_SERVE": self._control}
        done = subprocess.run(list(map(str, argv)), env=environment, capture_output=True, text=True, timeout=550)
        return self._read(done, name)

    def replay(self, harness: str, keys: Iterable[str]) -> tuple[dict[str, dict[str, Any]], str]:
        """Replay what `play` recorded by the real lego-serve; return (rows, what lego-serve said at the end)."""
        name = load_harness(harness).label.replace(":", "-")
        tasks = [self.folder / "tasks" / f"{name}-{key}" for key in keys]
        argv = [
            BIN / "lego-serve",
            self._model,
            "--engine",
            "script",
            "--replay",
            self.folder / "out" / "-".join([name, *keys]),
        ]
        argv += ["--context", CONTEXT, "--", *self._rollout(harness, tasks, self.folder / "again" / name)]
        done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=550)
        return self._read(done, name), done.stderr.strip().splitlines()[-1]

    def _rollout(self, harness: str, tasks: list[Path], out: Path) -> list[Any]:
        fixed = ["--run", "faults", "-n", 1, "-c", 3, "--retries", 0, "--max-lost", 1, "--time-limit", 500]
        return [BIN / "lego-rollout", *tasks, "--out", out, "--harness", harness, *fixed]

    @staticmethod
    def _read(done: "subprocess.CompletedProcess[str]", name: str) -> dict[str, dict[str, Any]]:
        assert done.returncode == 0, done.stderr
        rows = [row for path in done.stdout.split() for row in open_shard(path).rows()]
        return {row["task_id"].removeprefix(f"{name}-"): row for row in rows}

    def _task(self, ident: str) -> Path:
        root = self.folder / "tasks" / ident
        (root / "repo").mkdir(parents=True)
        (root / "tests").mkdir()
        (root / "repo" / "a.txt").write_text("hello\n")
        (root / "instruction.md").write_text("Create the file hello.txt with the text hi.\n")
        (root / "tests" / "test_task.py").write_text("def test_it():\n    assert open('hello.txt').read() == 'hi\\n'\n")
        (root / "task.toml").write_text(
            f'format = "task/1"\nid = "{ident}"\nfamily = "shell"\nkind = "create"\nsplit = "train"\n'
            '[grade]\nrunner = "pytest"\nfail_to_pass = ["tests/test_task.py::test_it"]\n'
            "[sandbox]\nmemory_mb = 1024\ndisk_mb = 64\nprocesses = 128\n"
        )
        return root
