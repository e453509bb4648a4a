"""An engine without a model: emits given answers as tokens through the same path as a sampled one.

A script is JSON lines: {"match": regex, "text": answer}. For each request the first line not yet used in that session
whose `match` (default: anything) is found in the last user or tool message is emitted; when all are used, the last
matching one again. Good for trying a harness without a model, and for an expert that plays known answers. Its tokens
have probability one in the distribution they come from: log-probability 0, support `greedy`, never a policy gradient.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from legorl.commands.serve.engine import ContextOverflow, Delta, EngineError, EngineInfo, Sampling


@dataclass(frozen=True)
class Line:
    match: re.Pattern[str]
    text: str


def read_script(path: Path) -> list[Line]:
    """Read a script; raise EngineError naming the bad line."""
    lines = []
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        if not raw.strip():
            continue
        try:
            data = json.loads(raw)
            lines.append(Line(re.compile(data.get("match", ""), re.DOTALL), data["text"]))
        except (json.JSONDecodeError, KeyError, TypeError, re.error) as error:
            raise EngineError(
                f'{path}:{number}: not a script line ({error}); want {{"match": regex, "text": answer}}'
            ) from error
    if not lines:
        raise EngineError(f"{path}: an empty script")
    return lines


class ScriptEngine:
    failure = None

    def __init__(self, folder: Path, version: int, script: list[Line], context: int | None):
        from transformers import AutoConfig, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.version = version
        self._script = script
        self._used: dict[str, set[int]] = {}
        self._stopped: set[str] = set()
        config = AutoConfig.from_pretrained(folder)
        self._context = context or int(getattr(config, "max_position_embeddings", 8192))

    def info(self) -> EngineInfo:
        return EngineInfo("script", self._context)

    def _choose(self, session: str, last: str) -> str:
        used = self._used.setdefault(session, set())
        fitting = [k for k, line in enumerate(self._script) if line.match.search(last)]
        if not fitting:
            raise EngineError(f"no script line matches {last[:80]!r}")
        fresh = [k for k in fitting if k not in used]
        choice = fresh[0] if fresh else fitting[-1]
        used.add(choice)
        return self._script[choice].text

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> AsyncIterator[Delta]:
        """`request_id` is SESSION/TURN; the last message is read back from the prompt's tokens."""
        if len(prompt_ids) >= self._context:
            raise ContextOverflow
        text = self._choose(request_id.split("/")[0], last_message(self.tokenizer, prompt_ids))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        room = min(sampling.max_tokens, self._context - len(prompt_ids))
        seen = ""
        for position, token in enumerate(ids[:room]):
            if request_id in self._stopped:
                self._stopped.discard(request_id)
                yield Delta([], [], self.version, "abort", support="greedy")
                return
            seen = str(self.tokenizer.decode(ids[: position + 1], skip_special_tokens=True)) if sampling.stop else ""
            ended = token == self.tokenizer.eos_token_id or any(s in seen for s in sampling.stop)
            finish = "stop" if ended else "length" if position + 1 == room else None
            yield Delta([token], [0.0], self.version, finish, cached_tokens=0, support="greedy")
            if finish:
                return

    async def abort(self, request_id: str) -> None:
        self._stopped.add(request_id)

    async def load_weights(self, folder: Path, version: int) -> None:
        """A script has no weights; the version moves so that loops can be rehearsed without a model."""
        self.version = version

    async def close(self) -> None:
        pass


def last_message(tokenizer: object, prompt_ids: list[int]) -> str:
    """Return the text of the last message in a rendered prompt: what stands before the generation prompt."""
    text = tokenizer.decode(prompt_ids[-4096:], skip_special_tokens=False)  # type: ignore[attr-defined]
    marks = list(re.finditer(r"<\|im_start\|>\w+\n(.*?)<\|im_end\|>", text, re.DOTALL))
    return marks[-1].group(1) if marks else text
