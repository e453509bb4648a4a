"""Spare sandboxes: fresh ones, of the kind asked for, none left; the second of a kind is there before it is wanted."""

import asyncio
import os
from pathlib import Path

import pytest

from legorl.commands.grade import spares
from legorl.commands.grade.spares import Spares
from legorl.sandbox import BASE_IMAGE, Sandbox, SandboxError, Spec, ensure_ready, open_sandbox
from legorl.sandbox.podman import podman
from legorl.task import Limits

MARK = f"test{os.getpid()}"
SMALL = Spec(f"grade-{MARK}-a", "spares", Limits())
OTHER = Spec(f"grade-{MARK}-b", "spares", Limits(processes=77))


async def _names() -> set[bytes]:
    """Return the containers of this test: others that run beside it have spares of their own."""
    listed = await podman("ps", "-a", "--filter", f"name=-{MARK}-", "--format", "{{.Names}}")
    return set(listed.out.split())


@pytest.mark.podman
def test_every_sandbox_is_fresh_and_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Spec] = []

    async def note(box: Sandbox) -> bytes:
        done = await box.run(["sh", "-c", "cat /ws/note; echo mine > /ws/note; ulimit -u"], cwd="/ws", timeout_s=20)
        return done.log

    def opener(spec: Spec):
        opened.append(spec)
        return open_sandbox(spec)

    async def work() -> list[bytes]:
        await ensure_ready(SMALL.limits)
        async with Spares(opener) as held:
            said = []
            for spec in (SMALL, OTHER, SMALL):
                async with held.open(spec) as box:
                    said.append(await note(box))
            assert [spec.name.startswith("grade-test") for spec in opened].count(True) == 2  # the third was there
            monkeypatch.setattr(spares, "WAITED_S", -1.0)
            async with held.open(OTHER) as box:  # too old to be used
                said.append(await note(box))
            assert [spec.name.startswith("grade-test") for spec in opened].count(True) == 3
        return said

    before = asyncio.run(_names())
    assert all(b"mine" not in text for text in asyncio.run(work()))
    assert asyncio.run(_names()) == before
    assert {spec.limits for spec in opened} == {SMALL.limits, OTHER.limits}
    assert {spec.image for spec in opened} == {BASE_IMAGE}


def test_a_spare_that_could_not_be_opened_is_replaced_and_a_first_one_is_an_error() -> None:
    import contextlib

    answers = iter(["box 1", SandboxError("no room"), "box 2", "box 3", SandboxError("still none")])
    closed: list[object] = []

    @contextlib.asynccontextmanager
    async def opener(spec: Spec):
        answer = next(answers, "more")
        if isinstance(answer, SandboxError):
            raise answer
        yield answer
        closed.append(answer)

    async def work() -> None:
        async with Spares(opener) as held:  # type: ignore[arg-type]
            async with held.open(SMALL) as box:
                assert box == "box 1"
            async with held.open(SMALL) as box:  # the spare failed
                assert box == "box 2"
            await asyncio.sleep(0)
            with pytest.raises(SandboxError, match="still none"):
                async with held.open(OTHER):
                    pass

    asyncio.run(work())
    assert sorted(map(str, closed)) == ["box 1", "box 2", "box 3"]
