"""A running server in this process, on real sockets, with the script engine."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anthropic
import httpx
import httpx2  # what the anthropic package speaks HTTP with
import openai
import pytest

from legorl.checkpoint import open_checkpoint
from legorl.commands.serve.launch import make_llm_dir, serving
from legorl.commands.serve.script_engine import ScriptEngine, read_script
from legorl.commands.serve.server import Server
from legorl.control import Control


class Running:
    """One server: its control client, and HTTP clients of its harness side."""

    def __init__(self, server: Server, control: Control):
        self.server, self.control = server, control

    def harness(self, key: str) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=f"{self.server.llm_dir}/llm.sock")
        return httpx.AsyncClient(
            transport=transport, base_url="http://model", headers={"authorization": f"Bearer {key}"}, timeout=60
        )

    def openai(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(api_key=key, base_url="http://model/v1", http_client=self.harness(key), max_retries=0)

    def anthropic(self, key: str) -> anthropic.AsyncAnthropic:
        transport = httpx2.AsyncHTTPTransport(uds=f"{self.server.llm_dir}/llm.sock")
        http = httpx2.AsyncClient(transport=transport, timeout=60)
        return anthropic.AsyncAnthropic(api_key=key, base_url="http://model", http_client=http, max_retries=0)


@pytest.fixture
def run_server(tiny_model: Path, tmp_path: Path) -> Callable:
    @contextlib.asynccontextmanager
    async def run(*lines: str | dict, context: int | None = None) -> AsyncIterator[Running]:
        script = tmp_path / "script.jsonl"
        script.write_text("\n".join(json.dumps({"text": x} if isinstance(x, str) else x) for x in lines))
        held = open_checkpoint(tiny_model)
        engine = ScriptEngine(held.folder, held.version, read_script(script), context)
        server = Server(engine, held, make_llm_dir(), [])
        async with serving(server, None) as (control, _port), Control(control) as client:
            yield Running(server, client)

    return run
