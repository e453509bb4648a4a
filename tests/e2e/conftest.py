"""A run folder for one test, and an end to its processes whatever becomes of the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.driving import Run


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    folder = tmp_path / request.path.stem
    folder.mkdir()
    run = Run(folder)
    yield run
    run.end()
