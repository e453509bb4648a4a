"""Attempts leave nothing behind: the benchmark's own count, over a short run; and that count notices what is left."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from legorl.sandbox import BASE_IMAGE
from legorl.sandbox.podman import podman

BENCH = Path(__file__).with_name("bench")


@pytest.mark.slow
@pytest.mark.podman
def test_attempts_leave_nothing_behind(tiny_model: Path) -> None:
    environment = {**os.environ, "COUNT": "8", "MODEL": str(tiny_model)}
    done = subprocess.run(
        [sys.executable, BENCH / "sandbox.py", "leftovers"], capture_output=True, text=True, env=environment
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["leftovers"]
    assert found["outcomes"] == {"finished": 8}
    assert not any(found["left"].values()), done.stderr


@pytest.mark.podman
def test_what_is_left_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    from leftovers import Watch, places

    async def look() -> tuple[str, dict[str, list[str]]]:
        await podman("info")
        watch = Watch(await places())
        # Made but never started, as a Podman that is killed in between leaves it; the owner is nobody.
        labels = ["--label", "legorl=1", "--label", "legorl.owner=gone"]
        made = await podman("create", "--pull=never", "--network", "none", *labels, BASE_IMAGE, "true")
        child = await asyncio.create_subprocess_exec("bash", "-c", "exec -a conmon sleep 60")
        try:
            return made.out.decode().strip(), await watch.left(patience_s=0)
        finally:
            child.kill()
            await child.wait()
            await podman("rm", "-f", made.out.decode().strip())

    made, left = asyncio.run(look())
    assert any(name.endswith(made) for name in left["containers"])
    assert left["layers"]
    assert any("conmon 60" in name for name in left["processes"])
