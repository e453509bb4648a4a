"""The engine seam: what lego-serve asks of whatever samples tokens. A structural type, three implementations.

`generate` yields deltas as tokens are sampled. Ids and log-probabilities are those of the distribution sampled from
(after temperature and every other processor), and each delta belongs to exactly one policy version. Sampled end tokens
and tokens behind a stop string are part of the stream: nothing that was sampled is hidden.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from legorl import tree
from legorl.routing import Shape


class EngineError(Exception):
    """The engine failed; sessions that depend on it are lost (blame infra)."""


class ContextOverflow(Exception):
    """The prompt leaves no room for one more token. The session adds the numbers of tokens."""

    def __init__(self, prompt: int | None = None, context: int | None = None):
        super().__init__(
            f"This model's maximum context length is {context} tokens, and the messages come to {prompt} tokens. "
            "Reduce the length of the messages."
        )
        self.prompt, self.context = prompt, context


class Refused(Exception):
    """The request is turned away before anything was sampled; trying again may help. `status`: 429 or 500."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Unsupported(Exception):
    """This engine cannot do what was asked, and says so instead of doing something else."""


@dataclass(frozen=True)
class Sampling:
    """How one turn is sampled. `max_tokens` counts sampled tokens; `stop` are strings."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    seed: int = 0

    @property
    def support(self) -> str:
        """Which support the log-probabilities are over: `full` is what the trainer can reproduce."""
        if self.temperature == 0:
            return "greedy"
        return "full" if self.top_p >= 1 else "top_p"


@dataclass(frozen=True)
class Ask:
    """A new turn that is about to be sampled: what is asked, and its place in the tree of its session's attempt."""

    request_id: str
    attempt_id: str
    messages: list[dict[str, Any]]  # canonical, the whole conversation
    node: tree.Node
    prompt_ids: Any  # int32 array
    sampling: Sampling


@dataclass
class Delta:
    """Newly sampled tokens. `finish` is set on the last delta: stop (end token or stop string), length or abort."""

    ids: list[int]
    logprobs: list[float]
    version: int
    finish: str | None = None
    cached_tokens: int | None = None  # prompt tokens that came from the prefix cache; on the first delta
    support: str | None = None  # where the engine knows better than the request
    routing: tuple[int, Any] | None = None  # input position of the first row, experts [rows, layers, topk]
    cut: bool = False  # a fault that a script asks for: who waits for this answer loses the connection here, once


@dataclass(frozen=True)
class EngineInfo:
    name: str
    context: int  # most tokens of prompt and completion together
    cores: list[int] = field(default_factory=list)
    routing: Shape | None = None  # of the rows of experts that it delivers
    unrouted: str | None = None  # why it delivers none for a sparse model; None: there are none to deliver
    recorded: dict[int, dict[str, Any]] = field(default_factory=dict)  # weights by version, where a record is replayed

    @property
    def routing_words(self) -> str:
        if self.routing:
            return f"experts of {self.routing.layers} sparse layers recorded"
        return f"experts not recorded ({self.unrouted})" if self.unrouted else "no experts to record"


class Engine(Protocol):
    tokenizer: Any  # transformers tokenizer of the model folder
    failure: str | None  # why it can sample no more; the server then stops

    def info(self) -> EngineInfo: ...

    def admit(self, ask: Ask) -> None:
        """Told of each turn before it is recorded. Raises ContextOverflow or Refused to turn it away, unrecorded."""

    def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, routing_from: int = 0
    ) -> AsyncIterator[Delta]:
        """`routing_from`: the first input position whose experts are wanted, if the model is sparse."""

    async def abort(self, request_id: str) -> None: ...

    async def load_weights(self, folder: Path, version: int) -> None: ...

    async def close(self) -> None: ...
