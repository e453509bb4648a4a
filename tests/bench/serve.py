"""How fast lego-serve is, as ratios within one run: `make bench-serve`, or `tests/bench/serve.py [script] [vllm]`.

script  no model: what a turn takes from the client's request to its reply, less what the engine alone takes for the
        same answer; turns a second at 384 and at 96 sessions; resident memory of open sessions, and over 200 turns.
        `server_cpu_ms` is the server's processor time a turn: it says the same on a busy machine.
vllm    tokens a second at 1, 8 and 32 sessions against vLLM's own OpenAI server, with the same requests and settings,
        rounds alternating between the two, every core free for either.

ROUNDS and SESSIONS in the environment change those of `vllm`. JSON on stdout, medians over rounds; words on stderr.
Exit 4 where a bound does not hold.
"""

import asyncio
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from client import Client

from legorl import paths
from legorl.control import Control, SessionRequest

MODEL = paths.cache_dir() / "models" / "SmolLM2-135M-Instruct"
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
ANSWER = "I look at the files first, then I change what has to be changed.\n" + (
    '<tool_call>\n{"name": "bash", "arguments": {"command": "grep -rn parse src | head -20"}}\n</tool_call>'
)
RESULT = "\n".join(f"src/module_{k}.py:{17 * k}: def parse_{k}(text: str) -> Node:" for k in range(6))
CONTEXT = 200_000
BOUNDS = {"added_ms": 3.0, "ratio_384_to_96": 0.9, "ratio_to_vllm": 0.95}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def lego_serve(*arguments: str) -> Iterator[tuple[Path, int]]:
    """A running lego-serve: (control socket, process id)."""
    command = [sys.executable, "-c", "from legorl.commands.serve.cli import main; main()", str(MODEL), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit("lego-serve did not start")
        yield Path(line), process.pid
    finally:
        process.terminate()
        process.wait(60)


# -- script ------------------------------------------------------------------------------------------------------------


async def play(where: Path, key: str, turns: int) -> list[float]:
    """One multi-turn session with tool calls; returns the seconds of each turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend the parser. " + RESULT}]
    took = []
    async with Client(where, key) as client:
        for _ in range(turns):
            begun = time.perf_counter()
            reply = await client.ask({"model": "m", "messages": messages, "tools": [TOOL]})
            took.append(time.perf_counter() - begun)
            message = reply["choices"][0]["message"]
            (call,) = message["tool_calls"]
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
    return took


async def many(control: Control, where: Path, sessions: int, turns: int) -> float:
    """Turns a second of `sessions` sessions at once."""
    contexts = [control.session(SessionRequest(f"b{k}")) for k in range(sessions)]
    opened = await asyncio.gather(*(c.__aenter__() for c in contexts))
    begun = time.perf_counter()
    await asyncio.gather(*(play(where, session.key, turns) for session in opened))
    took = time.perf_counter() - begun
    await asyncio.gather(*(c.__aexit__(None, None, None) for c in contexts))
    return sessions * turns / took


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Resident memory of a process, bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def engine_alone(script: Path, rounds: int) -> float:
    """Seconds that the script engine takes for the same answer, one request at a time: the median."""
    from legorl.commands.serve.engine import Ask, Sampling
    from legorl.commands.serve.script_engine import ScriptEngine, read_script
    from legorl.tree import Node, ids

    engine = ScriptEngine(MODEL, 0, read_script(script), CONTEXT)
    took = []
    for k in range(rounds):
        begun = time.perf_counter()
        node = Node(0, -1, 0, ids([1]), ids([]))
        engine.admit(Ask(f"s/{k}", "a", [{"role": "user", "content": RESULT}], node, ids([1]), Sampling()))
        async for _delta in engine.generate(f"s/{k}", [1], Sampling()):
            pass
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


async def script(rounds: int = 3) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.jsonl"
        file.write_text(json.dumps({"text": ANSWER}) + "\n")
        alone = await engine_alone(file, 200)
        with lego_serve("--engine", "script", "--script", str(file), "--context", str(CONTEXT)) as (socket, pid):
            async with Control(socket) as control:
                where = Path((await control.health()).llm_dir) / "llm.sock"
                await many(control, where, 4, 20)  # warm up
                out: dict[str, Any] = {"engine_alone_ms": 1e3 * alone}
                short, begun = [], cpu_s(pid)
                for _ in range(rounds):
                    async with control.session(SessionRequest("l")) as session:
                        short += await play(where, session.key, 40)
                out["server_cpu_ms"] = 1e3 * (cpu_s(pid) - begun) / len(short)
                out["turn_ms"] = 1e3 * statistics.median(short)
                out["added_ms"] = out["turn_ms"] - out["engine_alone_ms"]
                say(f"a turn: {out['turn_ms']:.2f} ms, of it the engine {out['engine_alone_ms']:.2f} ms")
                out |= await long(control, where, pid)
                few, most = [], []
                for _ in range(rounds):
                    few.append(await many(control, where, 96, 8))
                    most.append(await many(control, where, 384, 8))
                    say(f"turns a second: {few[-1]:.0f} at 96 sessions, {most[-1]:.0f} at 384")
                out |= {
                    "turns_per_s_96": statistics.median(few),
                    "turns_per_s_384": statistics.median(most),
                    "ratio_384_to_96": statistics.median(b / a for a, b in zip(few, most, strict=True)),
                }
    out["holds"] = out["added_ms"] <= BOUNDS["added_ms"] and out["ratio_384_to_96"] >= BOUNDS["ratio_384_to_96"]
    return out


async def long(control: Control, where: Path, pid: int, sessions: int = 8) -> dict[str, Any]:
    """Resident memory while `sessions` sessions take 200 turns each, and what a turn takes then."""
    before, late = resident(pid), []
    grown, spent = {}, {}
    contexts = [control.session(SessionRequest(f"m{k}", turn_tokens=512)) for k in range(sessions)]
    opened = await asyncio.gather(*(c.__aenter__() for c in contexts))
    histories = [Long(where, session.key) for session in opened]
    for upto in (50, 100, 150, 200):
        begun = cpu_s(pid)
        late = [t for took in await asyncio.gather(*(h.play(upto) for h in histories)) for t in took]
        grown[upto] = (resident(pid) - before) / sessions
        spent[upto] = 1e3 * (cpu_s(pid) - begun) / len(late)
    tokens = statistics.mean(session.state.tokens for session in opened)
    await asyncio.gather(*(h.close() for h in histories))
    await asyncio.gather(*(c.__aexit__(None, None, None) for c in contexts))
    say("resident KiB a session after 50, 100, 150, 200 turns: " + ", ".join(f"{v / 1024:.0f}" for v in grown.values()))
    return {
        "resident_kib_per_session": {str(k): v / 1024 for k, v in grown.items()},
        "sampled_tokens_per_session_200": tokens,
        "server_cpu_ms_up_to_turn": {str(k): v for k, v in spent.items()},
    }


class Long:
    """A session that can be played on."""

    def __init__(self, where: Path, key: str):
        self._client: Client | None = None
        self._where, self._key = where, key
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend the parser."}]
        self._turns = 0

    async def play(self, upto: int) -> list[float]:
        took = []
        if self._client is None:
            self._client = await Client(self._where, self._key).__aenter__()
        while self._turns < upto:
            begun = time.perf_counter()
            reply = await self._client.ask({"model": "m", "messages": self._messages, "tools": [TOOL]})
            took.append(time.perf_counter() - begun)
            message = reply["choices"][0]["message"]
            call = message["tool_calls"][0]["id"]
            self._messages += [message, {"role": "tool", "tool_call_id": call, "content": RESULT}]
            self._turns += 1
        return took

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__()


# -- vllm --------------------------------------------------------------------------------------------------------------

VLLM_CONTEXT, KV_GIB, SEQUENCES, BLOCK, NEW = 2048, 1, 32, 32, 32


@contextmanager
def vllm_server() -> Iterator[int]:
    """vLLM's own server with the settings of ours; gives its port."""
    port = 18_000 + os.getpid() % 1000
    environment = {
        **os.environ,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--seed", "0",
        "--max-model-len", str(VLLM_CONTEXT), "--max-num-seqs", str(SEQUENCES), "--block-size", str(BLOCK),
        "--kv-cache-memory-bytes", str(KV_GIB << 30), "--generation-config", "vllm", "--disable-log-stats",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment, stdout=2, start_new_session=True)
    try:
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def until_up(port: int) -> None:
    for _ in range(600):
        try:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(1)
        else:
            writer.close()
            return
    raise SystemExit("vLLM's server did not start")


def prompts(count: int) -> list[dict[str, Any]]:
    """Requests of about 130 tokens that no prefix cache knows, whose answers seldom end before NEW tokens."""
    return [
        {
            "model": "m",
            "temperature": 1.0,
            "max_tokens": NEW,
            "messages": [
                {
                    "role": "user",
                    "content": f"{secrets.token_hex(8)}: write a long story of a hundred sentences about {k}. "
                    + RESULT[:250],
                }
            ],
        }
        for k in range(count)
    ]


async def tokens_a_second(where: Path | int, keys: list[str], bodies: list[dict[str, Any]]) -> float:
    """One round: every request at once. Connections are new: a server closes those that idled through the other's."""
    clients = await asyncio.gather(*(Client(where, key).__aenter__() for key in keys))
    begun = time.perf_counter()
    replies = await asyncio.gather(*(c.ask(b) for c, b in zip(clients, bodies, strict=True)))
    took = time.perf_counter() - begun
    for client in clients:
        await client.__aexit__()
    return sum(r["usage"]["completion_tokens"] for r in replies) / took


async def vllm(rounds: int = int(os.environ.get("ROUNDS", "7"))) -> dict[str, Any]:
    out: dict[str, Any] = {}
    arguments = ["--engine", "vllm", "--cores", "all", "--kv-gib", str(KV_GIB), "--context", str(VLLM_CONTEXT)]
    with vllm_server() as port, lego_serve(*arguments, "--sequences", str(SEQUENCES)) as (control_socket, _pid):
        await until_up(port)
        async with Control(control_socket) as control:
            where = Path((await control.health()).llm_dir) / "llm.sock"
            for count in map(int, os.environ.get("SESSIONS", "1 8 32").split()):
                contexts = [control.session(SessionRequest(f"v{k}", turn_tokens=NEW)) for k in range(count)]
                opened = await asyncio.gather(*(c.__aenter__() for c in contexts))
                ours, theirs = (where, [s.key for s in opened]), (port, ["none"] * count)
                speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
                for k in range(rounds + 1):
                    bodies = prompts(count)
                    for name, (socket, keys) in (("ours", ours), ("theirs", theirs))[:: 1 if k % 2 else -1]:
                        speed = await tokens_a_second(socket, keys, bodies)
                        if k:  # the first round warms up
                            speeds[name].append(speed)
                    say(f"{count} sessions: " + ", ".join(f"{n} {v[-1]:.1f} tokens/s" for n, v in speeds.items() if v))
                await asyncio.gather(*(c.__aexit__(None, None, None) for c in contexts))
                ratios = [a / b for a, b in zip(speeds["ours"], speeds["theirs"], strict=True)]
                out[str(count)] = {
                    "lego_serve_tokens_per_s": statistics.median(speeds["ours"]),
                    "vllm_tokens_per_s": statistics.median(speeds["theirs"]),
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                }
    out["holds"] = all(v["ratio"] >= BOUNDS["ratio_to_vllm"] for v in out.values())
    return out


def main() -> int:
    parts = sys.argv[1:] or ["script", "vllm"]
    result: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "load_before": os.getloadavg(),
        "bounds": BOUNDS,
    }
    for part in parts:
        result[part] = asyncio.run({"script": script, "vllm": vllm}[part]())
    result["load_after"] = os.getloadavg()
    print(json.dumps(result, indent=1))
    return 0 if all(result[part]["holds"] for part in parts) else 4


if __name__ == "__main__":
    sys.exit(main())
