"""lego-serve: an inference engine and an LLM API in one process that records every sampled token."""

import asyncio
import gc
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from legorl import paths
from legorl.commands.serve.noise import apart
from legorl.options import Failure, command, explain, explain_option, option, printable, quiet, verbose


@command("lego-serve")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("command_line", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
# Engine
@option("--engine", type=click.Choice(["vllm", "torch", "script"]), default="vllm", help="What samples the tokens.")
@option("--script", type=click.Path(path_type=Path), help="Answers of the script engine: JSON lines of {match, text}.")
@option("--replay", type=click.Path(path_type=Path), help="Shard whose attempts the script engine samples again.")
@option("--context", type=click.IntRange(16), help="Most tokens of prompt and answer together. [default: the model's]")
@option("--sequences", type=click.IntRange(1), default=32, help="Most turns sampled at once (vllm).")
@option("--kv-gib", type=float, default=1.5, help="Memory for the KV cache on CPU, GiB (vllm).")
@option(
    "--engine-arg",
    "engine_args",
    multiple=True,
    metavar="NAME=VALUE",
    help="One of vLLM's own settings, as tensor_parallel_size=2; again for more (vllm).",
)
@option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: float32 on CPU, bfloat16 on GPU]")
@option(
    "--cores",
    help="Cores the engine keeps for itself, as 0 or 0-3; `all` shares every core. "
    "[default: all but one where there are few]",
)
@option(
    "--routing",
    type=click.Choice(["auto", "require", "off"]),
    default="auto",
    help="Record the experts that a sparse model chooses: where the engine can, always or fail, never.",
)
# Text
@option(
    "--tool-format",
    type=click.Choice(["auto", "default", "hermes", "qwen3_coder", "llama3_json", "mistral"]),
    default="auto",
    help="How the model writes tool calls; auto: as its chat template does.",
)
@option(
    "--history",
    type=click.Choice(["exact", "template"]),
    default="exact",
    help="Earlier answers as they were sampled, or as the chat template shows them (without old reasoning).",
)
# API
@option(
    "--log",
    type=click.Path(path_type=Path),
    help="Where the libraries' own words go. [default: a file that is named on failure]",
)
@option("--port", type=click.IntRange(0, 65535), help="Serve the API on loopback TCP too (0: any free port).")
@explain_option
def main(model: Path, command_line: tuple[str, ...], **wanted: Any) -> int:
    """Serve MODEL as an LLM API that records every sampled token where it is sampled.

    \b
    Examples:
      lego-serve MODEL -- make -f recipes/grpo.mk RUN=runs/x   # run a loop against it, stop with it
      lego-serve MODEL -- sh -c 'curl -s $OPENAI_BASE_URL/models -H "Authorization: Bearer $OPENAI_API_KEY"'
      lego-serve MODEL --port 8000                             # stand alone; prints the control socket

    MODEL is a Hugging Face folder or a checkpoint of lego-train. COMMAND finds the control socket in LEGORL_SERVE
    and a session of its own in OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the keys beside them. Without COMMAND the
    control socket's path goes to stdout once the engine is ready; asked to stop, it exits 0.
    """
    if command_line and command_line[0] == "--":
        command_line = command_line[1:]
    from legorl.checkpoint import open_checkpoint
    from legorl.commands.serve.cores import split_cores

    held = open_checkpoint(model)
    if (wanted["engine"] == "script") != bool(wanted["script"] or wanted["replay"]):
        raise click.UsageError("--engine script needs --script FILE or --replay SHARD, and no other engine takes them")
    if wanted["script"] and wanted["replay"]:
        raise click.UsageError("--script and --replay exclude each other")
    wanted["engine_args"] = _engine_args(wanted["engine_args"], wanted["engine"])
    try:
        split_cores(wanted["cores"], wanted["engine"])
    except ValueError as error:
        raise click.UsageError(f"--cores: {error}") from error
    if wanted.pop("explain", False):
        explain({"model": str(held.folder), "version": held.version, "command": list(command_line), **wanted})
        return 0
    if command_line and not shutil.which(command_line[0]):
        raise Failure(f"{command_line[0]}: no such command")
    log = wanted.pop("log") or paths.private_dir() / f"serve-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = False
    try:
        with apart(None if verbose() else log) as (stdout, stderr):
            return asyncio.run(_main(held, list(command_line), Voice(stdout, stderr, quiet()), wanted))
    except Failure as error:
        kept = True
        raise Failure(f"{error} (the libraries' own words: {log})", error.code) from error
    finally:
        if not kept and log.parent == paths.private_dir():
            log.unlink(missing_ok=True)


@dataclass(frozen=True)
class Voice:
    """The real stdout and stderr while the libraries' lead elsewhere."""

    stdout: int
    stderr: int
    silent: bool

    def emit(self, line: str) -> None:
        os.write(self.stdout, line.encode() + b"\n")

    def say(self, line: str) -> None:
        if not self.silent:
            os.write(self.stderr, printable(line).encode() + b"\n")


async def _main(held: Any, argv: list[str], voice: Voice, wanted: dict[str, Any]) -> int:
    from legorl.commands.serve.cores import split_cores
    from legorl.commands.serve.engine import EngineError
    from legorl.commands.serve.launch import make_llm_dir, run_command, serving
    from legorl.commands.serve.server import Server

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    mine, free = split_cores(wanted["cores"], wanted["engine"])
    begun = time.monotonic()
    try:
        engine = await _until(_engine(held, mine, wanted), stop)
    except EngineError as error:
        raise Failure(str(error)) from error
    if engine is None:
        return 0
    info = engine.info()
    required = wanted["routing"] == "require"
    if required and not info.routing:
        await engine.close()
        raise Failure(f"--routing require: {info.unrouted or f'{held.name} on {info.name} chooses no experts'}")
    voice.say(
        f"lego-serve: {held.name} version {held.version} on {info.name}, context {info.context}, {info.routing_words}, "
        f"ready in {time.monotonic() - begun:.0f} s"
    )
    llm_dir = make_llm_dir()
    try:
        text = {k: wanted[k] for k in ("tool_format", "history")}
        server = Server(engine, held, llm_dir, free, required, **text)
        voice.say(f"lego-serve: {server.template.describe()}")
        await asyncio.to_thread(lambda: held.digest)
        port = wanted["port"] if wanted["port"] is not None else (0 if argv else None)
        # What has been loaded stays: else the garbage collections of every request look through millions of objects.
        gc.collect()
        gc.freeze()
        async with serving(server, port) as (control, bound):
            if argv:
                assert bound is not None
                code = await _until(run_command(server, argv, control, bound, voice.stdout, voice.stderr), stop)
                if server.failed:
                    raise Failure(f"the engine failed: {server.failed}")
                return 0 if code is None else code
            voice.emit(str(control))
            if bound:
                voice.say(
                    f"lego-serve: API on http://127.0.0.1:{bound}/v1 (open a session on the control socket for a key)"
                )
            while not stop.is_set() and not server.failed:
                await _until(asyncio.sleep(0.5), stop)
            if server.failed:
                raise Failure(f"the engine failed: {server.failed}")
            return 0
    finally:
        gc.unfreeze()  # libraries complain of leaks at the end else
        shutil.rmtree(llm_dir, ignore_errors=True)
        await engine.close()
        if wanted["replay"]:
            voice.say(f"lego-serve: {engine.words()}")


async def _engine(held: Any, cores: list[int], wanted: dict[str, Any]) -> Any:
    kind, context = wanted["engine"], wanted["context"]
    if wanted["replay"]:
        from legorl.commands.serve.replay_engine import ReplayEngine, read_record

        record = read_record(wanted["replay"], held.tokenizer_digest)
        return ReplayEngine(held.folder, held.version, record, context)
    if kind == "script":
        from legorl.commands.serve.script_engine import ScriptEngine, read_script

        return ScriptEngine(held.folder, held.version, read_script(wanted["script"]), context)
    if kind == "torch":
        from legorl.commands.serve.torch_engine import TorchEngine

        dtype = wanted["dtype"] or "float32"
        return await asyncio.to_thread(TorchEngine, held.folder, held.version, context, dtype, wanted["routing"])
    from legorl.commands.serve.vllm_engine import VllmEngine

    return await VllmEngine.start(
        held.folder,
        held.version,
        context=context,
        sequences=wanted["sequences"],
        kv_bytes=int(wanted["kv_gib"] * (1 << 30)),
        dtype=wanted["dtype"],
        cores=cores,
        routing=wanted["routing"],
        own=wanted["engine_args"],
    )


# What decides which tokens are sampled, which numbers are recorded with them, and what --options of ours set.
_OURS = (
    "model", "dtype", "max_model_len", "max_num_seqs", "seed", "generation_config", "logprobs_mode", "tokenizer",
    "enable_return_routed_experts", "trust_remote_code", "speculative_config", "override_generation_config",
    "logits_processors", "data_parallel_size",
)  # fmt: skip


def _engine_args(given: tuple[str, ...], engine: str) -> dict[str, Any]:
    """The settings of --engine-arg; a value is JSON where it can be read as such, else text."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if engine != "vllm" or not equals or name in _OURS:
            why = "is lego-serve's to set" if engine == "vllm" and equals else "needs NAME=VALUE and --engine vllm"
            more = "; start a lego-serve a GPU instead" if name == "data_parallel_size" else ""
            raise click.UsageError(f"--engine-arg {text}: {why}{more}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


async def _until(work: Any, stop: asyncio.Event) -> Any:
    """Await `work`, or None as soon as `stop` is set (then `work` is cancelled and waited for)."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None
    finally:
        stopped.cancel()
