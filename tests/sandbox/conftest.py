"""Real containers, opened once and shared: a test leaves no file behind that another could trip over."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from sandbox.boxes import Boxes

from legorl.sandbox import Sandbox

T = TypeVar("T")


@pytest.fixture(scope="session")
def boxes() -> Iterator[Boxes]:
    with asyncio.Runner() as runner:
        boxes = Boxes(runner)
        yield boxes
        boxes.close()


@pytest.fixture(scope="session")
def do(boxes: Boxes) -> Any:
    """Run a coroutine to its result."""

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return boxes.run(coroutine)

    return run


@pytest.fixture(scope="session")
def box(boxes: Boxes) -> Sandbox:
    """Where the agent works."""
    return boxes.open()


@pytest.fixture(scope="session")
def fresh(boxes: Boxes) -> Sandbox:
    """Where patches are applied: no agent ever ran here."""
    return boxes.open()
