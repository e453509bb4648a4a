"""Fixtures of several test modules: for lego-train a model and the command in this process, a run folder to inspect."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands.inspecting import make_run_folder
from commands.train_rows import World, tiny_llama, train_in_process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A small Llama, a folder of its own for each module. Modules that want another model have a `world` of theirs."""
    return World(tiny_llama(tmp_path_factory.mktemp("model") / "m"))


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """lego-train in this process: `cli(*arguments)` gives (exit code, stdout, stderr)."""
    with train_in_process(capsys, monkeypatch) as run:
        yield run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("runs") / "r1")
