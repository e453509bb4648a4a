"""The harness side: the HTTP routes that a sandbox can reach, and nothing else.

Every request needs the key of a live session: `Authorization: Bearer`, `x-api-key`, or a path prefix `/k/KEY/v1/...`
for harnesses that take only a base URL. Bodies are bounded; errors have the protocol's own shape, and those that a
retry cannot mend are 4xx, so that harnesses do not retry them.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from legorl.commands.serve import chat
from legorl.commands.serve.engine import ContextOverflow, EngineError
from legorl.commands.serve.messages import BadRequest
from legorl.commands.serve.server import Server
from legorl.commands.serve.session import BudgetSpent, Session, SessionClosed, Turn, reject_unanswerable

MAX_BODY = 32 << 20  # bytes


def harness_app(server: Server) -> Starlette:
    """The app behind the sandbox's socket."""

    def session_of(request: HttpRequest) -> Session | None:
        key = request.path_params.get("key") or request.headers.get("x-api-key")
        bearer = request.headers.get("authorization", "")
        if not key and bearer.lower().startswith("bearer "):
            key = bearer[7:].strip()
        return server.session_by_key(key) if key else None

    async def models(request: HttpRequest) -> Response:
        if session_of(request) is None:
            return _unknown_key()
        item = {"id": server.name, "object": "model", "created": int(server.started), "owned_by": "legorl"}
        return JSONResponse({"object": "list", "data": [item]})

    async def completions(request: HttpRequest) -> Response:
        session = session_of(request)
        if session is None:
            return _unknown_key()
        try:
            body = await _json(request)
            retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            asked = chat.read_request(body, request.headers.get("user-agent", ""), retry)
            reject_unanswerable(asked)
            turn = session.open_turn(asked)
        except Exception as error:
            return _failed(error)
        if asked.streamed:
            include = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(
                _deliver(turn, server.name, include, request), media_type="text/event-stream", headers=NO_BUFFER
            )
        try:
            async for _piece in turn.follow():
                pass
            return _Delivered(turn, chat.reply(turn, server.name), request)
        except Exception as error:
            return _failed(error)

    async def alive(_request: HttpRequest) -> Response:
        return Response()

    routes = [Route("/", alive, methods=["GET", "HEAD"])]
    for prefix in ("", "/k/{key}"):
        routes += [
            Route(prefix + "/v1/models", models, methods=["GET"]),
            Route(prefix + "/v1/chat/completions", completions, methods=["POST"]),
        ]
    return Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})


NO_BUFFER = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class _Delivered(JSONResponse):
    """Marks the turn delivered once its whole body has been handed to a client that is still there."""

    def __init__(self, turn: Turn, content: Any, request: HttpRequest):
        super().__init__(content)
        self._turn, self._request = turn, request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not await self._request.is_disconnected():
            await super().__call__(scope, receive, send)
            self._turn.delivered = True


async def _deliver(turn: Turn, model: str, include_usage: bool, request: HttpRequest) -> AsyncIterator[bytes]:
    try:
        async for event in chat.stream(turn, model, include_usage):
            yield event
    except Exception as error:
        # The status line is out already: the error travels as an event, and the stream ends without [DONE].
        yield b"data: " + _failed(error).body + b"\n\n"
        return
    # Sending to a client that went away does not fail, so ask.
    turn.delivered = turn.delivered or not await request.is_disconnected()


async def _json(request: HttpRequest) -> dict[str, Any]:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise BadRequest(f"the request body is larger than {MAX_BODY >> 20} MiB")
    try:
        body = json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _unknown_key() -> Response:
    return JSONResponse(chat.error("no live session has this API key", "authentication_error", "invalid_api_key"), 401)


async def _no_route(request: HttpRequest, _error: Exception) -> Response:
    return JSONResponse(chat.error(f"no route {request.method} {request.url.path}", "invalid_request_error"), 404)


def _failed(error: Exception) -> Response:
    if isinstance(error, BadRequest):
        return JSONResponse(chat.error(str(error), "invalid_request_error", error.code), 400)
    if isinstance(error, ContextOverflow):
        text = "This model's maximum context length is exceeded by the prompt"
        return JSONResponse(chat.error(text, "invalid_request_error", "context_length_exceeded"), 400)
    if isinstance(error, BudgetSpent):
        return JSONResponse(chat.error(str(error), "invalid_request_error", "session_budget_spent"), 400)
    if isinstance(error, SessionClosed):
        return JSONResponse(chat.error("this session is closed", "authentication_error", "invalid_api_key"), 401)
    if isinstance(error, EngineError):
        return JSONResponse(chat.error(str(error), "server_error", "engine_error"), 500)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    raise error
