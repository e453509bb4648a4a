"""The plain reference engine on transformers: one request at a time, small and slow, exact log-probabilities.

It is the referee: `lego-inspect verify` and the tests compare every other engine with it. One thread computes; each
turn is prefilled from scratch (no cache survives a turn), so new weights need no cache to be cleared, and every input
position passes the routers of a sparse model in the turn that reads it.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from legorl.commands.serve.engine import Ask, ContextOverflow, Delta, EngineInfo, Sampling


class TorchEngine:
    failure = None

    def __init__(self, folder: Path, version: int, context: int | None, dtype: str, routing: str = "auto"):
        from transformers import AutoTokenizer

        from legorl.model import load_model

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.version = version
        self._dtype, self._routing = dtype, routing
        self._use(load_model(folder, dtype))
        limit = int(getattr(self._model.config, "max_position_embeddings", 8192))
        self._context = min(context or limit, limit)
        ends = self._model.generation_config.eos_token_id if self._model.generation_config else None
        ends = ends if ends is not None else self.tokenizer.eos_token_id
        self._ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}
        self._turn = asyncio.Lock()
        self._stopped: set[str] = set()

    def _use(self, model: Any) -> None:
        from legorl.model import ModelError, find_routers

        self._model, self._routers, self._unrouted = model, None, None
        try:
            self._routers = find_routers(model)
        except ModelError as error:
            self._unrouted = str(error)
        if self._routers and self._routing == "off":
            self._routers, self._unrouted = None, "--routing off"

    def info(self) -> EngineInfo:
        shape = self._routers.shape if self._routers else None
        return EngineInfo("torch", self._context, routing=shape, unrouted=self._unrouted)

    def admit(self, ask: Ask) -> None:
        pass

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, routing_from: int = 0
    ) -> AsyncIterator[Delta]:
        if len(prompt_ids) >= self._context:
            raise ContextOverflow
        loop = asyncio.get_running_loop()
        stream: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        async with self._turn:

            def tell(item: Delta | BaseException) -> None:
                loop.call_soon_threadsafe(stream.put_nowait, item)

            def work() -> None:
                try:
                    self._sample(request_id, prompt_ids, sampling, routing_from, tell)
                except BaseException as error:
                    tell(error)

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            try:
                while True:
                    delta = await stream.get()
                    if isinstance(delta, BaseException):
                        raise delta
                    yield delta
                    if delta.finish:
                        return
            finally:
                self._stopped.add(request_id)
                await asyncio.to_thread(thread.join)
                self._stopped.discard(request_id)

    def _sample(self, request_id: str, prompt_ids: list[int], sampling: Sampling, routing_from: int, tell: Any) -> None:
        import torch

        random = torch.Generator().manual_seed(sampling.seed & 0x7FFFFFFF)
        room = min(sampling.max_tokens, self._context - len(prompt_ids))
        done: list[int] = []
        feed, cache, fed = torch.tensor([prompt_ids]), None, 0
        chosen: list[Any] = []  # in the pass under way: int64 [fed tokens, topk] of each sparse layer
        watching = (
            self._routers.watched(lambda _layer, _logits, experts: chosen.append(experts))
            if self._routers
            else nullcontext()
        )
        with torch.inference_mode(), watching:
            for position in range(room):
                if request_id in self._stopped:
                    tell(Delta([], [], self.version, "abort"))
                    return
                out = self._model(input_ids=feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                routed = _rows(chosen, fed, routing_from, self._routers.shape.dtype) if self._routers else None
                fed += feed.shape[1]
                token, value = draw(out.logits[0, -1].float(), sampling, random)
                done.append(token)
                text = self.tokenizer.decode(done) if sampling.stop else ""
                ended = token in self._ends or any(s in text for s in sampling.stop)
                finish = "stop" if ended else "length" if position + 1 == room else None
                tell(Delta([token], [value], self.version, finish, cached_tokens=0, routing=routed))
                if finish:
                    return
                feed = torch.tensor([[token]])

    async def abort(self, request_id: str) -> None:
        self._stopped.add(request_id)

    async def load_weights(self, folder: Path, version: int) -> None:
        from legorl.model import load_model

        async with self._turn:
            self._use(await asyncio.to_thread(load_model, folder, self._dtype))
            self.version = version

    async def close(self) -> None:
        pass


def _rows(chosen: list[Any], fed: int, routing_from: int, dtype: str) -> tuple[int, Any]:
    """Take what each sparse layer chose: (position of the first row, experts [rows, layers, topk]).

    `fed`: input position of the first token of the pass; rows in front of `routing_from` are left out.
    """
    import torch

    skip = max(0, routing_from - fed)
    rows = torch.stack([experts[skip:] for experts in chosen], dim=1).cpu().numpy().astype(dtype)
    chosen.clear()
    return fed + skip, rows


def draw(logits: Any, sampling: Sampling, random: Any) -> tuple[int, float]:
    """Draw one token from `logits` (float32, [vocabulary]); return it and its log-probability where it was drawn.

    Temperature first, then top-p, as vLLM orders them. Temperature 0 takes the maximum and gives the log-probability
    in the model's own distribution.
    """
    import torch

    if sampling.temperature == 0:
        values = torch.log_softmax(logits, -1)
        token = int(values.argmax())
        return token, float(values[token])
    values = torch.log_softmax(logits / sampling.temperature, -1)
    if sampling.top_p < 1:
        ordered, places = values.sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        values = values.index_fill(0, places[before >= sampling.top_p], float("-inf")).log_softmax(-1)
    token = int(torch.multinomial(values.exp(), 1, generator=random))
    return token, float(values[token])
