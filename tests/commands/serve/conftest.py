"""A running server in this process, on real sockets, with the script engine."""

import asyncio
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

    def openai_sync(self, key: str) -> "openai.OpenAI":
        transport = httpx.HTTPTransport(uds=f"{self.server.llm_dir}/llm.sock")
        http = httpx.Client(transport=transport, timeout=60)
        return openai.OpenAI(api_key=key, base_url="http://model/v1", http_client=http, max_retries=0)

    def anthropic_sync(self, key: str) -> "anthropic.Anthropic":
        transport = httpx2.HTTPTransport(uds=f"{self.server.llm_dir}/llm.sock")
        http = httpx2.Client(transport=transport, timeout=60)
        return anthropic.Anthropic(api_key=key, base_url="http://model", http_client=http, max_retries=0)

    async def raw(self, *pieces: bytes) -> bytes:
        """Write bytes to a connection of its own, half-close nothing, and return all that comes until it is closed."""
        reader, writer = await asyncio.open_unix_connection(f"{self.server.llm_dir}/llm.sock")
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
        finally:
            writer.close()


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
