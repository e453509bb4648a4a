"""One session: an attempt's conversation tree as it grows, and how each request finds its place in it.

A request is matched to what is known by a chain of digests over its messages. Where an assistant message is the answer
of a recorded turn (after harmless transformations), the chain goes on from that turn, so that the next request is
answered from the turn's own tokens: prompt = path of the turn + bridge over the new messages. Where the harness changed
anything, nothing matches from there on, and what it sent is rendered as it is: its edits are never undone.

Each turn samples once. Handlers follow a turn (`Turn.follow`); a request repeated while it runs, or after an answer
that did not arrive, follows the recorded turn instead of sampling again. The same request after a complete delivery is
a new sample: the harness rejecting an answer is a consequence of the action.

A turn that has ended is spilled to a file, and only its `Past` stays once the answer has been handed over: memory grows
with the tokens, never with the history that each request repeats.
"""

import asyncio
import hashlib
import re
import secrets
import time
from dataclasses import replace
from typing import Any

import numpy as np

from legorl import routing, tree
from legorl.commands.serve import tools as toolformat
from legorl.commands.serve.budgets import Budgets, BudgetSpent
from legorl.commands.serve.detokenize import Detokenizer, tokens_through
from legorl.commands.serve.engine import Ask, ContextOverflow, Engine, EngineError, Sampling
from legorl.commands.serve.messages import Message, call_ids, digest, message_key, same_answer
from legorl.commands.serve.render import Template
from legorl.commands.serve.spill import Spill
from legorl.commands.serve.turn import Past, Request, Turn, row
from legorl.control import SessionRequest

# Turns of one session under way at a time. Harnesses with sub-agents need a handful; a flood would hold up the others.
AT_ONCE = 16


class TooManyAtOnce(Exception):
    """The session already has as many turns under way as one attempt may: the client is to try again later."""

    def __init__(self) -> None:
        super().__init__(f"{AT_ONCE} requests of this session are being answered; try again when one has ended")


class SessionClosed(Exception):
    """The session ended while the request waited."""


class Session:
    """The turns of one attempt. `key` is the harness's API key; `events` feeds the control connection."""

    def __init__(self, request: SessionRequest, engine: Engine, template: Template):
        self.request = request
        self.id = secrets.token_hex(8)
        self.key = secrets.token_urlsafe(32)
        self.turns: list[Turn | Past] = []
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.overflow = False
        self.spent: str | None = None  # the budget that a request was refused for
        self.lost: str | None = None  # why the engine could not serve it any more
        self.closed = False
        self.require_routing = False
        self._engine, self._template = engine, template
        self._tasks: set[asyncio.Task] = set()
        self._spill = Spill()
        self._fresh: list[Turn] = []  # turns that are no Past yet
        self._by_digest: dict[str, list[int]] = {}  # digest of a request -> its turns
        self._called: set[str] = set()  # ids of all tool calls in answers
        self._results: dict[str, str] = {}  # digest of the result that was first sent to each
        self._done_tokens = 0
        self.engine_s = self.queue_s = 0.0  # summed over turns that have ended
        self._budgets = Budgets(request)
        self._last_tools: str | None = None
        self._side = [re.compile(p) for p in request.side_patterns]
        self._agent = re.compile(request.user_agent) if request.user_agent else None

    # -- what a request is answered from ---------------------------------------------------------------------------

    def open_turn(self, request: Request) -> Turn:
        """Find the request's place and return the turn that answers it: a recorded one, or a new one (not sampled yet).

        Raises BudgetSpent, BadRequest, ContextOverflow, Refused, TooManyAtOnce, SessionClosed: nothing is recorded.
        """
        if self.closed:
            raise SessionClosed
        self._shed()
        chain, base, at, told = self._match(request)
        known = [self.turns[k] for k in self._by_digest.get(chain, [])]
        if known and (
            not known[-1].done
            or (not known[-1].delivered and not known[-1].error)
            or (request.retry and not known[-1].error)
        ):
            return self._recorded(known[-1], request)
        try:
            self._budgets.check(len(self.turns), self.tokens)
        except BudgetSpent as spent:
            self.spent = spent.which
            self.events.put_nowait({"event": "budget", "which": spent.which})
            raise
        running = [t for t in self._fresh if not t.done]
        if len(running) >= AT_ONCE:
            raise TooManyAtOnce
        for other in running:  # the harness may already repeat what it has seen of an answer
            other.node.completion_ids = tree.ids(other.ids)
        resample = sum(1 for t in known if not t.error)
        prompt, continued = self._prompt(told, request.tools, base, at)
        parent, prefix_len = tree.place([t.node for t in self.turns], prompt, continued)
        index = len(self.turns)
        limit = self._engine.info().context - len(prompt)
        if limit < 1:
            self.overflow = True
            raise ContextOverflow(len(prompt), self._engine.info().context)
        node = tree.Node(index, parent, prefix_len, prompt[prefix_len:].copy(), tree.ids([]))
        unmatched = request.messages[at + 1 :] if base else request.messages
        sampling = self._sampling(request, index, resample, limit)
        self._admit(Ask(f"{self.id}/{index}", self.request.attempt_id, request.messages, node, prompt, sampling))
        tools_digest = digest(request.tools)
        turn = Turn(
            node=node,
            cause="retry" if known and not resample else self._cause(request, unmatched, parent, prefix_len, resample),
            request=request,
            digest=chain,
            sampling=sampling,
            new_messages=unmatched,
            tools_changed=tools_digest != self._last_tools,
            foreign=bool(self._agent and not self._agent.search(request.user_agent)),
            thinking=self._template.thinking,
            format=self._template.format,
            live=request.streamed,
        )
        self._last_tools = tools_digest
        for message in unmatched:
            if result := message.get("tool_call_id"):
                self._results.setdefault(result, digest(message_key(message)))
        self._budgets.begin()
        self.turns.append(turn)
        self._fresh.append(turn)
        self._by_digest.setdefault(chain, []).append(index)
        self.events.put_nowait({"event": "begin"})
        task = asyncio.create_task(self._sample(turn, prompt.tolist()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return turn

    def _admit(self, ask: Ask) -> None:
        try:
            self._engine.admit(ask)
        except ContextOverflow:
            self.overflow = True
            raise ContextOverflow(len(ask.prompt_ids), self._engine.info().context) from None

    def count(self, request: Request) -> int:
        """Return how many prompt tokens the request would have now. Nothing is recorded."""
        if self.closed:
            raise SessionClosed
        _chain, base, at, told = self._match(request)
        return len(self._prompt(told, request.tools, base, at)[0])

    def _shed(self) -> None:
        """Keep no more than needed of the turns that are over."""
        still = []
        for turn in self._fresh:
            if turn.at is not None and (turn.delivered or turn.error):
                self.turns[turn.node.index] = Past.of(turn)
            else:
                still.append(turn)
        self._fresh = still

    def _recorded(self, known: Turn | Past, request: Request) -> Turn:
        """The recorded turn that answers `request` again, read back where it was spilled."""
        if isinstance(known, Turn):
            return known
        turn: Turn = self._spill.read(known.at)
        turn.request, turn.delivered = replace(request, messages=[]), True
        return turn

    def _match(self, request: Request) -> tuple[str, Turn | Past | None, int, list[Message]]:
        """Return (digest of the request, last turn it continues exactly, index of that turn's answer, messages).

        The messages are the request's, with recorded answers (their reasoning too) where the request repeats them.
        """
        chain, told = digest("tools", request.tools, request.stop), [*request.messages]
        base, at = None, -1
        for position, message in enumerate(request.messages):
            if message["role"] == "assistant":
                turn = self._answered(chain, message)
                if turn:
                    chain, base, at = digest(chain, "turn", turn.node.index), turn, position
                    told[position] = turn.answer or message
                    continue
            chain = digest(chain, message_key(message))
        return chain, base, at, told

    def _answered(self, chain: str, message: Message) -> Turn | Past | None:
        for index in reversed(self._by_digest.get(chain, [])):
            turn = self.turns[index]
            if turn.answer and same_answer(message, turn.answer):
                return turn
        return None

    def _prompt(
        self, told: list[Message], tools: list[dict[str, Any]], base: Turn | Past | None, at: int
    ) -> tuple[np.ndarray, int | None]:
        """Return (prompt ids, the turn that they continue token-exactly; None where all was rendered)."""
        if base is not None:
            last = int(base.node.completion_ids[-1]) if base.closed_itself else None
            bridge = self._template.bridge(told, at, tools, last)
            if bridge is not None:
                path = tree.path_ids([t.node for t in self.turns], base.node.index)
                return np.concatenate([path, tree.ids(bridge)]), base.node.index
        return tree.ids(self._template.full(told, tools)), None

    def _cause(self, request: Request, unmatched: list[Message], parent: int, prefix_len: int, resample: int) -> str:
        first = next((m["content"] for m in request.messages if m["role"] in ("system", "user")), "")
        if any(p.search(first) for p in self._side):
            return "side"
        if resample:
            return "resample"
        structural = tree.cause_of([t.node for t in self.turns], parent, prefix_len)
        if structural == "extend" and not self.turns[parent].done:
            structural = "rewrite"  # a parallel request: the parent's answer is still being sampled
        if structural != "rewrite":
            return structural
        return "edited" if any(self._edits(m) for m in unmatched) else "rewrite"

    def _edits(self, message: Message) -> bool:
        """Does a message that matches nothing carry the id of a known call, a result other content than before?"""
        result = message.get("tool_call_id")
        if result in self._results:
            return self._results[result] != digest(message_key(message))
        return bool(call_ids(message) & self._called)

    def _sampling(self, request: Request, index: int, resample: int, room: int) -> Sampling:
        wanted = self.request
        tokens = min(wanted.turn_tokens, request.max_tokens or wanted.turn_tokens, room)
        if wanted.max_tokens is not None:
            tokens = min(tokens, wanted.max_tokens - self.tokens)
        seed = hashlib.sha256(f"{wanted.seed}|{wanted.attempt_id}|{index}|{resample}".encode()).digest()
        return Sampling(wanted.temperature, wanted.top_p, max(1, tokens), request.stop, int.from_bytes(seed[:8], "big"))

    # -- sampling --------------------------------------------------------------------------------------------------

    async def _sample(self, turn: Turn, prompt: list[int]) -> None:
        try:
            await self._run(turn, prompt)
        except ContextOverflow:
            self.overflow, turn.error = True, ContextOverflow(len(prompt), self._engine.info().context)
        except asyncio.CancelledError:
            turn.drop("cut")
            turn.error = SessionClosed()
        except Exception as error:
            turn.drop("cut")
            self._lose(
                turn, error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            )
        self._ended(turn)
        turn.wake()
        used = {"turns": len(self.turns), "tokens": self.tokens, "engine_s": self.engine_s, "queue_s": self.queue_s}
        self.events.put_nowait({"event": "turn", **used})

    def _lose(self, turn: Turn, error: Exception) -> None:
        turn.error, self.lost = error, str(error)
        self.events.put_nowait({"event": "lost", "detail": self.lost})

    def _ended(self, turn: Turn) -> None:
        """Count the turn and spill it."""
        turn.node.completion_ids = tree.ids(turn.ids)
        self._done_tokens += len(turn.ids)
        self.engine_s += (turn.prefill_s or 0.0) + (turn.decode_s or 0.0)
        self.queue_s += turn.queue_s
        self._budgets.end(turn)
        if turn.answer:
            self._called |= call_ids(turn.answer)
        kept = turn.request
        turn.request = replace(kept, messages=[], tools=kept.tools if turn.tools_changed else [])
        try:
            turn.at = self._spill.add(turn)
        except OSError as error:
            turn.request = kept
            self._lose(turn, turn.error or EngineError(f"the turn could not be kept on disk: {error}"))
        else:
            turn.request = replace(kept, messages=[])
            turn.new_messages = []

    async def _run(self, turn: Turn, prompt: list[int]) -> None:
        words = Detokenizer(self._engine.tokenizer, turn.sampling.stop, self._template.hidden)
        asked = time.monotonic()
        await self.gate()
        begun, first = time.monotonic(), None
        turn.queue_s = begun - asked
        turn.support = turn.sampling.support
        finish, unread, routed = None, [], []
        wanted = routing.positions(turn.node.prefix_len, len(prompt), 0).start
        try:
            async for delta in self._engine.generate(f"{self.id}/{turn.node.index}", prompt, turn.sampling, wanted):
                first = first or time.monotonic()
                turn.ids += delta.ids
                turn.logprobs += delta.logprobs
                turn.support = delta.support or turn.support
                if delta.cut:
                    turn.cut_at = len(turn.pieces)
                turn.note_version(delta.version, len(delta.ids))
                if delta.cached_tokens is not None and turn.cached_tokens is None:
                    turn.cached_tokens = delta.cached_tokens
                if delta.routing is not None:
                    routed.append(delta.routing)
                finish = delta.finish
                unread += delta.ids
                if turn.live or turn.sampling.stop or finish:
                    piece, unread = words.push(unread, last=finish is not None), []
                    if piece:
                        turn.pieces.append(piece)
                        turn.wake()
                        await asyncio.sleep(0)  # it leaves before more is taken from an engine that is ahead
        finally:
            self.leave()
            turn.node.completion_ids = tree.ids(turn.ids)
            turn.route(self._engine.info().routing, routed)
        if self.require_routing and finish in ("stop", "length"):
            turn.check_routing()
        ended = time.monotonic()
        turn.prefill_s = (first or ended) - begun
        turn.decode_s = ended - (first or ended)
        turn.stopped = words.stopped
        self._finish(turn, finish or "abort")

    def _finish(self, turn: Turn, finish: str) -> None:
        reasoning, rest, _ = toolformat.split_reasoning(turn.text, turn.thinking)
        content, turn.calls = toolformat.parse(rest, turn.request.tools, turn.format)
        valid = [c for c in turn.calls if c.valid] if all(c.valid for c in turn.calls) else []
        turn.answer = {
            "role": "assistant",
            "content": content,
            "reasoning": reasoning.strip(),
            "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in valid],
        }
        if reasoning and turn.thinking:
            turn.reasoning_tokens = tokens_through(self._engine.tokenizer, turn.ids, turn.thinking.close)
        turn.closed_itself = bool(turn.ids) and turn.ids[-1] in self._template.end_ids
        if finish == "abort":
            turn.drop("cut")
        if turn.support != "full":
            turn.drop("support")
        if turn.cause == "side":
            turn.drop("side")
        if turn.foreign:
            turn.drop("foreign")
        turn.finish = finish

    async def gate(self) -> None:
        """Wait until the engine takes turns; the server replaces this with its own gate."""

    def leave(self) -> None:
        """The turn no longer uses the engine."""

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Sampled tokens so far, those of running turns too."""
        return self._done_tokens + sum(len(t.ids) for t in self._fresh if not t.done)

    @property
    def spilled(self) -> int:
        """Bytes of turns on disk."""
        return self._spill.size

    async def close(self) -> None:
        """End the session: running turns are cut, waiting handlers get SessionClosed."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.events.put_nowait(None)

    def record(self) -> list[dict[str, Any]]:
        """The turns as rows of schema.TURN. Can be asked for once, after `close`."""
        rows = [
            row(turn) if turn.at is None else {**row(self._spill.read(turn.at)), "delivered": turn.delivered}
            for turn in self.turns
        ]
        self._spill.close()
        return rows
