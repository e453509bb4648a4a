"""An engine without a model: emits given answers as tokens through the same path as a sampled one.

A script is JSON lines with these keys, all but one of `text` and `fault` optional:

    match    regular expression to be found in the text of the last message (default: anything)
    system   regular expression to be found in the system text in front: tells sub-agents and title requests apart
    text     the answer
    fault    what goes wrong with it, for tests of harnesses and of what is recorded of them (FAULTS)

For each new turn the first fitting line not yet used in that session is taken; when all are used, the last fitting one
again. Good for trying a harness without a model, and for an expert that plays known answers. Its tokens have
probability one in the distribution they come from: log-probability 0, support `greedy`, never a policy gradient.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.commands.serve.engine import Ask, ContextOverflow, Delta, EngineError, EngineInfo, Refused, Sampling

# The first three turn the request away before anything is sampled; of the others the sample is recorded as any other.
FAULTS = {
    "500": "an error that may be tried again",
    "429": "too many requests",
    "overflow": "a prompt that does not fit the context (400)",
    "cut": "the connection is closed when half of the answer's tokens have been sampled, once",
    "length": "the answer ends where its text does, without an end token, as if the limit of tokens had been met",
}


@dataclass(frozen=True)
class Line:
    match: re.Pattern[str]
    system: re.Pattern[str]
    text: str = ""
    fault: str = ""

    def fits(self, last: str, system: str) -> bool:
        return bool(self.match.search(last) and self.system.search(system))


def read_script(path: Path) -> list[Line]:
    """Read a script; raise EngineError naming the bad line."""
    lines = []
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        if not raw.strip():
            continue
        try:
            lines.append(_line(json.loads(raw)))
        except (ValueError, KeyError, TypeError, AttributeError, re.error) as error:
            raise EngineError(
                f'{path}:{number}: not a script line ({error}); want {{"match": regex, "text": answer}}'
            ) from error
    if not lines:
        raise EngineError(f"{path}: an empty script")
    return lines


def _line(data: dict[str, Any]) -> Line:
    if unknown := sorted(set(data) - {"match", "system", "text", "fault"}):
        raise ValueError(f"unknown key {unknown[0]!r}")
    fault = data.get("fault", "")
    if fault and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; known: {', '.join(FAULTS)}")
    text = data.get("text", "") if fault in ("500", "429", "overflow") else data["text"]
    if not isinstance(text, str) or (fault in ("cut", "length") and not text):
        raise ValueError("'text' must be a string, and not empty where it is cut")
    match, system = (re.compile(data.get(key, ""), re.DOTALL) for key in ("match", "system"))
    return Line(match, system, text, fault)


class ScriptEngine:
    failure = None

    def __init__(self, folder: Path, version: int, script: list[Line], context: int | None):
        from transformers import AutoConfig, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.version = version
        self._script = script
        self._used: dict[str, set[int]] = {}
        self._chosen: dict[str, Line | None] = {}
        self._stopped: set[str] = set()
        config = AutoConfig.from_pretrained(folder)
        self._context = context or int(getattr(config, "max_position_embeddings", 8192))

    def info(self) -> EngineInfo:
        return EngineInfo("script", self._context)

    def admit(self, ask: Ask) -> None:
        """Choose the turn's line. Raises Refused and ContextOverflow where it says so."""
        line = self._choose(ask)
        if line and line.fault in ("500", "429"):
            raise Refused(int(line.fault), f"the script answers with {line.fault} here")
        if line and line.fault == "overflow":
            raise ContextOverflow
        self._chosen[ask.request_id] = line

    def _choose(self, ask: Ask) -> Line | None:
        used = self._used.setdefault(ask.request_id.split("/")[0], set())
        front = next((k for k, m in enumerate(ask.messages) if m["role"] != "system"), len(ask.messages))
        system = "\n".join(m["content"] for m in ask.messages[:front])
        last = ask.messages[-1]["content"]
        fitting = [k for k, line in enumerate(self._script) if line.fits(last, system)]
        if not fitting:
            return None
        choice = next((k for k in fitting if k not in used), fitting[-1])
        used.add(choice)
        return self._script[choice]

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, routing_from: int = 0
    ) -> AsyncIterator[Delta]:
        """Emit the line that was chosen when `request_id` was admitted. Raises EngineError if none fits."""
        line = self._chosen.pop(request_id)
        if line is None:
            raise EngineError("no script line matches the last message")
        ids, end = self.tokenizer(line.text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id
        room = min(sampling.max_tokens, self._context - len(prompt_ids))
        if line.fault == "length":
            room = min(room, len(ids))
        else:
            ids = [*ids, end]
        cut = len(ids) // 2 if line.fault == "cut" else None
        seen = ""
        for position, token in enumerate(ids[:room]):
            if request_id in self._stopped:
                self._stopped.discard(request_id)
                yield Delta([], [], self.version, "abort", support="greedy")
                return
            seen = str(self.tokenizer.decode(ids[: position + 1], skip_special_tokens=True)) if sampling.stop else ""
            ended = token == end or any(s in seen for s in sampling.stop)
            finish = "stop" if ended else "length" if position + 1 == room else None
            yield Delta([token], [0.0], self.version, finish, cached_tokens=0, support="greedy", cut=position == cut)
            if finish:
                return

    async def abort(self, request_id: str) -> None:
        self._stopped.add(request_id)

    async def load_weights(self, folder: Path, version: int) -> None:
        """A script has no weights; the version moves so that loops can be rehearsed without a model."""
        self.version = version

    async def close(self) -> None:
        pass
