"""vLLM in this process: one thread owns the engine and steps it; tokens reach asyncio as they are sampled.

Departs from vLLM's own server: one process (no engine core behind a socket), log-probabilities always processed (those
of the distribution sampled from), weights replaced in place between two steps with every cache cleared, and cores of
its own where cores are few, because one busy neighbour makes its OpenMP barriers several times slower.
"""

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from legorl.commands.serve.engine import Ask, ContextOverflow, Delta, EngineError, EngineInfo, Sampling, Unsupported
from legorl.model import is_sparse
from legorl.routing import Shape

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
NOT_ON_CPU = "vLLM's CPU build cannot tell which experts were chosen; --engine torch can"
STEP_TOKENS = 2048  # of all prompts that one step reads
BLOCK = 32  # smallest block that the CPU attention accepts: the finer, the more of a prefix is found in the cache


class VllmEngine:
    """`await VllmEngine.start(folder, ...)`; then as the Engine protocol says."""

    def __init__(
        self,
        folder: Path,
        version: int,
        context: int | None,
        sequences: int,
        kv_bytes: int,
        dtype: str | None,
        cores: list[int],
        routing: str = "auto",
        own: dict[str, Any] | None = None,
    ):
        """`own`: settings of vLLM's by their names in its EngineArgs, over those made here."""
        self._folder, self.version, self._cores = folder, version, cores
        self._wanted = {"context": context, "sequences": sequences, "kv_bytes": kv_bytes, "dtype": dtype}
        self._own = own or {}
        self._routing = routing
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[Delta | BaseException]] = {}
        self._routing_from: dict[str, int] = {}  # of each stream
        self._shape: Shape | None = None
        self._sparse_layers: list[int] = []  # among all of the model's
        self._unrouted: str | None = None
        self._loop = asyncio.get_running_loop()
        self.failure: str | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    @classmethod
    async def start(cls, folder: Path, version: int, **wanted: Any) -> "VllmEngine":
        os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
        engine = cls(folder, version, **wanted)
        engine._thread.start()
        await engine._ready
        return engine

    def info(self) -> EngineInfo:
        return EngineInfo("vllm", self._context, self._cores, self._shape, self._unrouted)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._build()
        except BaseException as error:
            self._tell(self._ready.set_exception, EngineError(f"vLLM did not start: {error}"))
            return
        self._tell(self._ready.set_result, None)
        try:
            while True:
                busy = self._engine.has_unfinished_requests()
                command = self._next(block=not busy)
                if command is None and not busy:
                    return
                if command is not None:
                    command()
                    continue
                if news := [found for output in self._engine.step() if (found := self._news(output))]:
                    self._tell(_hand_over, news)  # one wake-up of the other thread a step, not one a token
        except BaseException as error:
            self.failure = f"vLLM failed: {type(error).__name__}: {error}"
            self._tell(self._fail_all, EngineError(self.failure))

    def _next(self, block: bool) -> Callable[[], None] | None:
        try:
            return self._commands.get(block=block)
        except queue.Empty:
            return None

    def _build(self) -> None:
        if self._cores:
            # Threads made from here on (OpenMP's) inherit these cores; the rest of the process keeps its own.
            os.sched_setaffinity(0, self._cores)
        import torch

        if self._cores:
            torch.set_num_threads(len(self._cores))
        from transformers import AutoConfig, AutoTokenizer

        cuda = torch.cuda.is_available()
        description = AutoConfig.from_pretrained(self._folder)
        sparse = is_sparse(description)
        if sparse:
            self._unrouted = "--routing off" if self._routing == "off" else None if cuda else NOT_ON_CPU
        if self._routing == "require" and (not sparse or self._unrouted):
            raise EngineError(f"--routing require: {self._unrouted or 'a dense model chooses no experts'}")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.tokenizer = AutoTokenizer.from_pretrained(self._folder)
        arguments: dict[str, Any] = {
            "model": str(self._folder),
            "dtype": self._wanted["dtype"] or ("bfloat16" if cuda else "float32"),
            "enforce_eager": not cuda,
            "max_model_len": self._wanted["context"],
            "max_num_seqs": self._wanted["sequences"],
            "seed": 0,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
        }
        if sparse and not self._unrouted:
            arguments["enable_return_routed_experts"] = True
        if not cuda:
            context = self._wanted["context"] or int(description.max_position_embeddings)
            arguments |= {
                "kv_cache_memory_bytes": self._wanted["kv_bytes"],
                "block_size": BLOCK,
                # A prompt that is read in parts makes vLLM turn back its request's random generator, which CPU
                # generators cannot: RuntimeError, and the engine is lost. So a prompt is read in one step or waits.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(context, STEP_TOKENS),
            }
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments | self._own))
        if self._cores:
            os.sched_setaffinity(0, self._cores)
            torch.set_num_threads(len(self._cores))
        config = self._engine.vllm_config.model_config
        self._context = int(config.max_model_len)
        self._tied_on_cpu = not cuda and bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
        self._moe_on_cpu = not cuda and sparse
        if "enable_return_routed_experts" in arguments:
            self._sparse_layers = self._engine.collective_rpc(_sparse_layers)[0]
            sizes = (config.get_num_experts_per_tok(), config.get_num_experts())
            self._shape = Shape(len(self._sparse_layers), *sizes)

    def _news(self, output: Any) -> "tuple[asyncio.Queue[Delta | BaseException], Delta] | None":
        """The delta that a step brought for a request, and the stream that waits for it; None if none does."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return None
        part = output.outputs[0]
        ids = list(part.token_ids)
        values = [entry[token].logprob for token, entry in zip(ids, part.logprobs or [], strict=True)]
        finish = part.finish_reason if output.finished else None
        routed = None
        if part.routed_experts is not None:  # with the last output, from the wanted position on, for every layer
            routed = (self._routing_from[output.request_id], part.routed_experts[:, self._sparse_layers])
        delta = Delta(ids, values, self.version, finish, cached_tokens=output.num_cached_tokens, routing=routed)
        return stream, delta

    # -- asyncio side ----------------------------------------------------------------------------------------------

    def _tell(self, function: Callable, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *arguments)

    def _fail_all(self, error: EngineError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        if self.failure:
            raise EngineError(self.failure)
        done = self._loop.create_future()

        def work() -> None:
            try:
                result = function()
            except Exception as error:
                self._tell(_settle, done.set_exception, error)
            else:
                self._tell(_settle, done.set_result, result)

        def _settle(setter: Callable, value: Any) -> None:
            if not done.done():
                setter(value)

        self._commands.put(work)
        return await done

    def admit(self, ask: Ask) -> None:
        pass

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, routing_from: int = 0
    ) -> AsyncIterator[Delta]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if len(prompt_ids) >= self._context:
            raise ContextOverflow
        parameters = SamplingParams(
            output_kind=RequestOutputKind.DELTA,
            logprobs=0,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=min(sampling.max_tokens, self._context - len(prompt_ids)),
            stop=list(sampling.stop),
            seed=sampling.seed & 0x7FFFFFFF,
            skip_special_tokens=False,
            detokenize=bool(sampling.stop),  # the session makes its own text; only stop strings need the engine's
            routed_experts_prompt_start=routing_from,
        )
        stream: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self._streams[request_id], self._routing_from[request_id] = stream, routing_from
        finished = False
        try:
            prompt: Any = {"prompt_token_ids": prompt_ids}
            await self._in_thread(lambda: self._engine.add_request(request_id, prompt, parameters))
            while True:
                delta = await stream.get()
                if isinstance(delta, BaseException):
                    raise delta
                finished = delta.finish is not None
                yield delta
                if finished:
                    return
        finally:
            del self._streams[request_id], self._routing_from[request_id]
            if not finished and not self.failure:
                self._commands.put(lambda: self._engine.abort_request([request_id]))

    async def abort(self, request_id: str) -> None:
        """Stop sampling for one request; its stream ends with finish `abort`."""
        await self._in_thread(lambda: self._engine.abort_request([request_id]))
        if request_id in self._streams:
            self._streams[request_id].put_nowait(Delta([], [], self.version, "abort"))

    async def load_weights(self, folder: Path, version: int) -> None:
        """Replace the weights in place and clear every cache. No request may be running."""
        if self._moe_on_cpu:
            raise Unsupported(
                "vLLM's CPU build reports success and computes wrong outputs after reloading MoE weights in place; "
                "restart lego-serve on the new checkpoint, or use --engine torch"
            )

        def work() -> None:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            if self._tied_on_cpu:
                self._engine.collective_rpc(_repack_tied_head)
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("the prefix cache could not be cleared after loading weights")
            self.version = version

        await self._in_thread(work)

    async def close(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, 10)


def _sparse_layers(worker: Any) -> list[int]:
    """Which layers of the model have experts, in order of depth: vLLM's rows have a place for every layer."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    modules = worker.model_runner.get_model().modules()
    return sorted({int(module.layer_id) for module in modules if isinstance(module, MoERunner)})


def _hand_over(news: "list[tuple[asyncio.Queue[Delta | BaseException], Delta]]") -> None:
    for stream, delta in news:
        stream.put_nowait(delta)


def _repack_tied_head(worker: Any) -> None:
    """Make the output head of a model with tied embeddings use the weights just loaded.

    vLLM's CPU build packs the head's matrix when it first loads. A reload brings new embeddings, but no weights of the
    head's own, so it would go on with the packed old ones (measured: off by up to 1.7 nats).
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(worker.model_runner.get_model().modules())
    embeddings = [m for m in modules if type(m) is VocabParallelEmbedding]
    for head in (m for m in modules if isinstance(m, ParallelLMHead)):
        same = [e for e in embeddings if e.weight.shape == head.weight.shape]
        if len(same) != 1:
            raise EngineError(
                f"{len(same)} embeddings could be tied to the output head; restart lego-serve on the new weights"
            )
        head.tie_weights(same[0])
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
