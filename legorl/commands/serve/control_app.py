"""The control side: sessions, weights, health and metrics on a socket that no sandbox can reach.

The protocol is described, and its client kept, in legorl/control.py.
"""

import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from legorl import schema
from legorl.checkpoint import ModelError
from legorl.commands.serve.engine import EngineError, Unsupported
from legorl.commands.serve.server import Server, _Gated
from legorl.control import SessionRequest


def control_app(server: Server) -> Starlette:
    async def health(_request: Request) -> Response:
        return JSONResponse(asdict(server.health()))

    async def open_session(request: Request) -> Response:
        if server.failed:
            return PlainTextResponse(server.failed, 503)
        try:
            body = await request.json()
            wanted = SessionRequest(**{**body, "side_patterns": tuple(body.get("side_patterns", ()))})
            session = server.open_session(wanted)
        except (TypeError, ValueError) as error:
            return PlainTextResponse(f"not a session request: {error}", 400)
        return StreamingResponse(_events(server, session), media_type="application/x-ndjson")  # type: ignore[arg-type]

    async def close_session(request: Request) -> Response:
        session = server.session(request.path_params["session"])
        if session is None:
            return PlainTextResponse("no such session: it was closed, or its control connection ended", 404)
        await server.end_session(session)
        return Response(closed_ipc(server, session), media_type="application/vnd.apache.arrow.stream")  # type: ignore[arg-type]

    async def weights(request: Request) -> Response:
        body = await request.json()
        try:
            return JSONResponse(await server.load_weights(Path(body["path"]), body.get("version")))
        except (ModelError, Unsupported) as error:
            return PlainTextResponse(str(error), 409)
        except EngineError as error:
            return PlainTextResponse(f"loading failed and the engine is lost: {error}", 500)

    async def metrics(_request: Request) -> Response:
        lines = [f"legorl_{name}_total {value}" for name, value in server.counters.items()]
        lines += [f"legorl_sessions_open {server.open_sessions}", f"legorl_policy_version {server.version}"]
        lines += [f"legorl_open_{name} {value}" for name, value in server.held().items()]
        lines.append(f"legorl_resident_bytes {_resident()}")
        return PlainTextResponse("\n".join(lines) + "\n")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/sessions", open_session, methods=["POST"]),
            Route("/sessions/{session}/close", close_session, methods=["POST"]),
            Route("/weights", weights, methods=["POST"]),
        ]
    )


def _resident() -> int:
    """Resident memory of this process, bytes: divided by the open sessions, what one costs at most."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _events(server: Server, session: _Gated) -> AsyncIterator[bytes]:
    try:
        yield _line({"event": "open", "session": session.id, "key": session.key})
        while (event := await session.events.get()) is not None:
            yield _line(event)
    finally:
        await server.end_session(session)


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def closed_ipc(server: Server, session: _Gated) -> bytes:
    """What a session recorded, as an Arrow IPC stream (legorl.control.Closed)."""
    turns = session.turns
    last = turns[-1] if turns else None
    summary = {
        "weights": list(session.weights.values()),
        "tokenizer_digest": server.model.tokenizer_digest,
        "template_digest": server.template.digest,
        "engine_s": session.engine_s,
        "queue_s": session.queue_s,
        "tokens": session.tokens,
        "count": len(turns),
        "text_only": bool(last and not (last.answer or {}).get("tool_calls")),
        "overflow": session.overflow,
        "budget": session.spent,
        "lost": session.lost,
    }
    column = pa.array([session.record()], type=pa.list_(schema.TURN))
    table = pa.table({"turns": column}).replace_schema_metadata({b"legorl": json.dumps(summary).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
