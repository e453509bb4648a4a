"""Images of tasks: built, loaded and pulled for real, shared by content, and pruned."""

import asyncio
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sandbox.boxes import SMALL

from legorl import image_reference
from legorl.sandbox import BASE_IMAGE, ImageBroken, ImageMissing, Spec, open_sandbox, prepare, ready_image
from legorl.sandbox.making import begins_from
from legorl.sandbox.podman import podman
from legorl.sandbox.pruning import _mark, prune

YEAR_S = 365 * 86400.0


def recipe(folder: Path, text: str, **files: str) -> str:
    """A folder with a Dockerfile and `files`; the Dockerfile's path."""
    folder.mkdir(parents=True)
    for name, body in {"Dockerfile": text, **files}.items():
        (folder / name).write_text(body)
    return str(folder / "Dockerfile")


def error_of(work: Coroutine[Any, Any, str]) -> Coroutine[Any, Any, Exception]:
    async def run() -> Exception:
        with pytest.raises((ImageMissing, ImageBroken)) as caught:
            await work
        return caught.value

    return run()


async def exists(name: str) -> bool:
    return (await podman("image", "exists", name, check=False)).code == 0


async def remove(*names: str) -> None:
    await podman("rmi", "-f", *names, check=False)


@pytest.mark.podman
def test_a_dockerfile_is_built_once_for_all_that_have_it(do: Callable, tmp_path: Path) -> None:
    text = f"FROM {BASE_IMAGE}\nCOPY note /opt/note\nRUN cat /opt/note; echo $$ > /opt/made\n"
    unique = str(tmp_path)  # nothing that another run has built
    first, same = recipe(tmp_path / "a", text, note=unique), recipe(tmp_path / "b", text, note=unique)
    other = recipe(tmp_path / "c", text, note=unique + "!")
    broken = recipe(tmp_path / "d", f"FROM {BASE_IMAGE}\nRUN echo it is || true; echo broken >&2; exit 3\n")
    rootless = recipe(tmp_path / "e", "FROM localhost/legorl-absent:1\n")
    words: list[str] = []

    async def work() -> None:
        await prepare(["", first, same, broken, rootless, "localhost/legorl-absent:2"], words.append)
        made, told = [line for line in words if "making" in line], [line for line in words if "no image for" in line]
        assert len(made) == 3 and len(told) == 3 and len(words) == 6, words
        name = await ready_image(first)
        assert name == await ready_image(same) and name != await ready_image(other, words.append)
        await prepare([first, same, other], words.append)
        assert len(words) == 7  # the other one, and nothing since
        error = await error_of(ready_image(broken))
        assert isinstance(error, ImageBroken) and "| broken |" in str(error) and "exit status 3" in str(error)
        missing = await error_of(ready_image(rootless))
        assert isinstance(missing, ImageMissing) and "python -m legorl.sandbox pull localhost/legorl-absent:1" in str(
            missing
        )
        async with open_sandbox(Spec("made", "tests", SMALL, image=same)) as box:
            result = await box.run(["sh", "-c", "cat /opt/note; test -s /opt/made"])
            assert (result.exit_code, result.log.decode()) == (0, unique)
            # In use, and so not pruned, however long ago its use began.
            for one in (name, await ready_image(other)):
                os.utime(_mark(one), (1, 1))
            gone, kept = await prune(YEAR_S)
            assert await ready_image(other) in gone and name in kept and await exists(name)
            assert not await exists(await ready_image(other)) and await exists(BASE_IMAGE)
        gone, _ = await prune(YEAR_S)
        assert name in gone and not await exists(name)

    do(work())


@pytest.mark.podman
def test_an_image_without_python_is_the_fault_of_the_task(do: Callable, tmp_path: Path) -> None:
    empty = recipe(tmp_path / "a", "FROM scratch\nCOPY note /note\n", note=str(tmp_path))

    async def work() -> None:
        with pytest.raises(ImageBroken, match="no python3"):
            async with open_sandbox(Spec("empty", "tests", SMALL, image=empty)):
                pass
        await remove(await ready_image(empty))

    do(work())


@pytest.mark.slow
@pytest.mark.podman
def test_a_build_that_takes_too_long_is_ended_with_all_it_runs(
    do: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = recipe(tmp_path / "a", f"FROM {BASE_IMAGE}\nRUN sleep 86399\n")
    monkeypatch.setenv("LEGORL_IMAGE_TIMEOUT", "8")
    error = do(error_of(ready_image(slow)))
    assert isinstance(error, ImageMissing) and "8 s" in str(error) and "LEGORL_IMAGE_TIMEOUT" in str(error)
    assert subprocess.run(["pgrep", "-f", "sleep 86399"], capture_output=True).stdout == b""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A registry on loopback that serves the OCI layout in a folder: its address, and the folder."""
    layout = tmp_path / "layout"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            *_, place, name = self.path.split("/")
            kind, file = "application/json", layout / "oci-layout"
            if place == "manifests" or place == "blobs":
                (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
                file = layout / "blobs" / (name if name.startswith("sha256:") else entry["digest"]).replace(":", "/")
                kind = entry["mediaType"] if place == "manifests" else "application/octet-stream"
            body = file.read_bytes() if file.exists() and "/absent/" not in self.path else None
            self.send_response(404 if body is None else 200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body or b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", layout
    server.shutdown()
    server.server_close()


@pytest.mark.podman
def test_archives_are_loaded_and_images_pulled_when_a_task_says_so(
    do: Callable, tmp_path: Path, registry: tuple[str, Path]
) -> None:
    tiny = recipe(tmp_path / "tiny", "FROM scratch\nCOPY note /note\n", note=str(tmp_path))
    other = recipe(tmp_path / "other", "FROM scratch\nCOPY note /note\n", note=f"other {tmp_path}")
    named = f"localhost/legorl-tests-{os.getpid()}:1"
    address, layout = registry

    async def id_of(name: str) -> bytes:
        return (await podman("image", "inspect", "--format", "{{.Id}}", name)).out

    async def work() -> None:
        built, another = await asyncio.gather(ready_image(tiny), ready_image(other))
        wanted = await id_of(built)
        await podman("tag", built, named)
        archives = []
        for kind in image_reference.ARCHIVES:
            done = await podman("save", "-q", "--format", kind, named)
            archives.append(f"{kind}:{tmp_path / kind}")
            (tmp_path / kind).write_bytes(done.out)
        await podman("tag", another, named)
        loaded = [await ready_image(archive) for archive in archives]
        assert [await id_of(name) for name in loaded] == [wanted] * 2
        assert loaded[0].startswith("localhost/legorl-loaded:") and loaded[0] != loaded[1]
        # An archive brings a name along that stands for something else here: it is not taken over.
        assert await id_of(named) == await id_of(another)
        (tmp_path / "junk").write_text("no archive")
        for path, said in (("junk", "not loaded"), ("absent", "No such file")):
            error = await error_of(ready_image(f"oci-archive:{tmp_path / path}"))
            assert isinstance(error, ImageMissing) and said in str(error) and path in str(error)

        with tarfile.open(tmp_path / "oci-archive") as tar:
            tar.extractall(layout, filter="data")
        pulled = await ready_image(f"docker://{address}/some/image:1")
        assert pulled == f"{address}/some/image:1" and await id_of(pulled) == wanted
        error = await error_of(ready_image(f"docker://{address}/absent/image:1"))
        assert isinstance(error, ImageMissing) and "not pulled" in str(error) and "404" in str(error)
        # In the store already: nobody is asked again.
        assert await ready_image(f"docker://{address}/some/image:1") == pulled
        # Two names of one image: each is removed once, and what legorl did not name stays.
        for name in loaded:
            os.utime(_mark(name), (1, 1))
        gone, kept = await prune(YEAR_S)
        assert set(loaded) <= set(gone) and not set(loaded) & set(kept) and await exists(pulled)
        await remove(pulled, named, built, another)

    do(work())


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        ("", ""),
        ("localhost/x:1", "localhost/x:1"),
        ("environment/Dockerfile", "{task}/environment/Dockerfile"),
        ("../shared/Containerfile", "{set}/shared/Containerfile"),
        ("oci-archive:images/a.tar", "oci-archive:{task}/images/a.tar"),
        ("docker-archive:/a/b.tar", "docker-archive:/a/b.tar"),
        ("docker://localhost:5000/a/b:1", "docker://localhost:5000/a/b:1"),
        ("docker://docker.io/library/python:3.9", "docker://docker.io/library/python:3.9"),
        *((bad, None) for bad in ("Dockerfile", "tests/Dockerfile", "../Dockerfile", "none/Dockerfile", "docker://a")),
        *((bad, None) for bad in ("docker://a/b:1", "Python 3", "-v", "docker:x y")),
    ],
)
def test_what_image_can_say(tmp_path: Path, image: str, wanted: str | None) -> None:
    task = tmp_path / "task"
    for folder in (task, task / "tests", task / "environment", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "Dockerfile").touch()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "Containerfile").touch()
    if wanted is None:
        with pytest.raises(ValueError, match="image '"):
            image_reference.absolute(image, task)
    else:
        assert image_reference.absolute(image, task) == wanted.format(task=task, set=tmp_path)


def test_only_loopback_may_speak_plain_http() -> None:
    for image, plain in (
        ("127.0.0.1:5000/a", True),
        ("localhost/a", True),
        ("[::1]:1/a", True),
        ("localhost.org/a", False),
    ):
        assert image_reference.is_loopback(f"docker://{image}") == plain


def test_what_a_dockerfile_begins_from() -> None:
    text = (
        "# FROM no\nfrom a:1 AS one\nRUN echo FROM b\n FROM --platform=linux/amd64 c/d@sha256:0\nCOPY --from=one / /\n"
    )
    assert begins_from(text) == ["a:1", "c/d@sha256:0"]
