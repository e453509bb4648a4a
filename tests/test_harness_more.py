"""A newer Python beside the sandbox's own; a harness's title request."""

import asyncio
import contextlib
import json
import marshal
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_harness_runs import BIN, Case, call, make_task, rollout

from legorl.harness import BUILT_IN, HarnessError, load_harness, python_runtime
from legorl.sandbox import Spec, open_sandbox
from legorl.task import Limits


@pytest.mark.parametrize("version", ["3.13", "3.9.2", "", "three"])
def test_a_python_that_no_release_has_is_refused_by_name(tmp_path: Path, version: str) -> None:
    with pytest.raises(HarnessError, match=rf"install.python '{version}': known are the releases of Python 3.13"):
        python_runtime.make_python(version, tmp_path / "python", tmp_path / "patchelf")
    assert not list(tmp_path.iterdir())


def test_a_machine_without_debian_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": "fedora", "VERSION_CODENAME": ""})
    with pytest.raises(HarnessError, match="no apt sources of Debian"):
        python_runtime.make_python("3.13.5", tmp_path / "python", tmp_path / "patchelf")


def test_packages_are_compiled_for_where_they_are_mounted(tmp_path: Path) -> None:
    (tmp_path / "site" / "toy").mkdir(parents=True)
    (tmp_path / "site" / "toy" / "__init__.py").write_text("ANSWER = 42\n")
    (tmp_path / "site" / "template.py").write_text("{% not Python %}\n")
    python_runtime.compile_packages([sys.executable], tmp_path / "site", "/opt/h/site")
    (compiled,) = tmp_path.rglob("*.pyc")
    assert marshal.loads(compiled.read_bytes()[16:]).co_filename == "/opt/h/site/toy/__init__.py"


PROBE = """
import json, ssl, sqlite3, subprocess, sys
import openhands.sdk
tell = "import sys; print(sys.version_info[:2], [p for p in sys.path if '/opt/h' in p])"
run = lambda *argv: subprocess.run(argv, capture_output=True, text=True, check=True).stdout
print("own", sys.version.split()[0], sys.executable, openhands.sdk.__cached__)
print("again", run(sys.executable, "-c", "print(1)").strip())
print("system", run("python3", "-c", tell).strip())
"""


@pytest.mark.podman
@pytest.mark.harness
@pytest.mark.slow
def test_a_newer_python_runs_in_the_sandbox_and_leaves_the_systems_alone() -> None:
    harness = load_harness("openhands")
    harness.make_ready()

    async def probe() -> str:
        limits = Limits(memory_mb=512, disk_mb=32, processes=32)
        async with open_sandbox(Spec(name="python", run="tests", limits=limits, mounts=harness.mounts)) as box:
            argv = ["/opt/h/python/bin/python3.13", "-c", PROBE]
            env = {"HOME": "/home/agent", "PATH": "/usr/bin:/bin", **harness.env}
            return (await box.run(argv, env=env, cwd="/ws", timeout_s=300)).log.decode()

    said = asyncio.run(probe())
    compiled = "/opt/h/site/openhands/sdk/__pycache__/__init__.cpython-313.pyc"
    assert f"own 3.13.5 /opt/h/python/bin/python3.13 {compiled}" in said
    assert "again 1" in said
    assert "system (3, 11) []" in said


@contextlib.contextmanager
def serving(model: Path, lines: list[dict[str, str]], script: Path, context: int) -> Iterator[str]:
    """The control socket of a lego-serve that answers with `lines`."""
    script.write_text("\n".join(map(json.dumps, lines)))
    argv = [BIN / "lego-serve", model, "--engine", "script", "--script", script, "--context", str(context)]
    serve = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert serve.stdout is not None
        yield serve.stdout.readline().strip()
    finally:
        serve.terminate()
        serve.wait(30)


SMALL = [
    Case("opencode:small", "openai-chat", call("bash", description="x")),
    Case("qwen-code:small", "openai-chat", call("run_shell_command", description="x")),
    Case("openhands:small", "openai-chat", call("terminal"), end=call("finish", "message")("Done.")),
]


@pytest.mark.podman
@pytest.mark.harness
@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.ident)
def test_a_small_preset_does_its_task_within_8192_tokens(case: Case, tiny_model: Path, tmp_path: Path) -> None:
    """Harnesses are told the context: some compact for ever or refuse to start if it is little."""
    with serving(tiny_model, case.script(), tmp_path / "script.jsonl", 8192) as socket:
        row = rollout(make_task(tmp_path, case.ident), tmp_path / "out", case.spec, socket)
    assert (row["outcome"], row["patch_files"]) == ("finished", ["hello.txt"]), row["log_tail"]
    assert [t["cause"] for t in row["turns"]] == ["root", "extend", "extend", "extend"]


@pytest.mark.podman
@pytest.mark.harness
@pytest.mark.slow
def test_a_title_request_is_a_side_turn(tiny_model: Path, tmp_path: Path) -> None:
    """OpenCode with its titles turned on again."""
    text = (BUILT_IN / "opencode.toml").read_text()
    titled = tmp_path / "titled.toml"
    titled.write_text(text.replace('"title": {"disable": true}, ', ""))
    assert titled.read_text() != text
    case = Case("opencode", "openai-chat", call("bash", description="x"))
    # Both requests end with the task, and either may come first.
    lines = [case.script()[0], *case.script()]
    with serving(tiny_model, lines, tmp_path / "script.jsonl", 8192) as socket:
        row = rollout(make_task(tmp_path, case.ident), tmp_path / "out", f"{titled}:small", socket)
    sides = [t for t in row["turns"] if t["cause"] == "side"]
    assert len(sides) == 1 and sides[0]["foreign"] is False
    assert "You are a title generator" in sides[0]["messages"]
    assert [(d["start"], d["length"]) for d in sides[0]["drops"]] == [(0, len(sides[0]["completion_ids"]))]
    assert row["outcome"] == "finished", row["log_tail"]
