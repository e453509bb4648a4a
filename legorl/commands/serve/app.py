"""The harness side: the HTTP routes that a sandbox can reach, and nothing else.

Every request needs the key of a live session: `Authorization: Bearer`, `x-api-key`, or a path prefix `/k/KEY/v1/...`
for harnesses that take only a base URL. Bodies are bounded; errors have the protocol's own shape, and those that a
retry cannot mend are 4xx, so that harnesses do not retry them. What differs between the protocols is in a module each
(chat, responses_api, messages_api), all with the functions of `Wire`; what they share is here.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from legorl.commands.serve import bound, chat, messages_api, responses_api
from legorl.commands.serve.delivery import Failure, failure_of
from legorl.commands.serve.engine import ContextOverflow
from legorl.commands.serve.messages import BadRequest, mend
from legorl.commands.serve.server import Server
from legorl.commands.serve.session import Session
from legorl.commands.serve.turn import Cut, Request, Turn, reject_unanswerable

MAX_BODY = 32 << 20  # bytes
MOST_DRAINED = 4 * MAX_BODY
NO_BUFFER = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Wire(Protocol):
    """One protocol: what its module offers."""

    def read_request(self, body: dict[str, Any]) -> Request:
        """Raises BadRequest."""

    def reply(self, turn: Turn, asked: Request, model: str) -> dict[str, Any]: ...

    def stream(self, turn: Turn, asked: Request, model: str) -> AsyncIterator[bytes]: ...

    def error(self, failure: Failure) -> dict[str, Any]: ...


def harness_app(server: Server) -> Starlette:
    """The app behind the sandbox's socket."""

    def session_of(request: HttpRequest) -> Session:
        keys = [request.path_params.get("key"), request.headers.get("x-api-key")]
        bearer = request.headers.get("authorization", "")
        if bearer.lower().startswith("bearer "):
            keys.append(bearer[7:].strip())
        for key in keys:  # clients with several settings send several keys
            if key and (session := server.session_by_key(key)):
                return session
        raise _UnknownKey

    async def models(request: HttpRequest) -> Response:
        try:
            session_of(request)
        except _UnknownKey as error:
            return await _failed(error, _wire(request), request)
        item = _model(server.name, server.started, server.engine.info().context)
        wanted = request.path_params.get("model")
        if wanted is None:
            page = {"has_more": False, "first_id": server.name, "last_id": server.name}
            return JSONResponse({"object": "list", "data": [item], **page})
        if wanted != server.name:
            why = f"no model {wanted!r}; this is {server.name!r}"
            return JSONResponse(_wire(request).error(Failure(404, "route", why, "model_not_found", param="model")), 404)
        return JSONResponse(item)

    async def refuse_oversized(asked: Request, size: int, session: Session) -> None:
        context = server.engine.info().context
        if size <= bound.MOST_PER_TOKEN * context:
            return
        tokens = await asyncio.to_thread(bound.least_tokens, server.engine.tokenizer, asked, context)
        if tokens > context:
            session.overflow = True
            raise ContextOverflow(tokens, context)

    def answers(wire: Wire) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(request: HttpRequest) -> Response:
            try:
                session = session_of(request)
                asked = _identified(wire.read_request(await _json(request)), request)
                reject_unanswerable(asked)
                await refuse_oversized(asked, request.state.size, session)
                turn = session.open_turn(asked)
                ids = {"request-id": turn.id, "x-request-id": turn.id}
                if asked.streamed:
                    events = _deliver(wire.stream(turn, asked, server.name), turn, request)
                    return StreamingResponse(events, media_type="text/event-stream", headers={**NO_BUFFER, **ids})
                await turn.end()
                return _Delivered(turn, wire.reply(turn, asked, server.name), request, ids)
            except Cut:
                return StreamingResponse(_broken_off(), media_type="application/json")
            except Exception as error:
                return await _failed(error, wire, request)

        return answer

    async def count_tokens(request: HttpRequest) -> Response:
        try:
            session = session_of(request)
            asked = messages_api.read_request(await _json(request))
            return JSONResponse(messages_api.count(await asyncio.to_thread(session.count, asked)))
        except Exception as error:
            return await _failed(error, messages_api, request)

    async def alive(_request: HttpRequest) -> Response:
        return Response()

    routes = [Route("/", alive, methods=["GET", "HEAD"])]
    for prefix in ("", "/k/{key}"):
        routes += [
            Route(prefix + "/v1/models", models, methods=["GET"]),
            Route(prefix + "/v1/models/{model:path}", models, methods=["GET"]),
            Route(prefix + "/v1/chat/completions", answers(chat), methods=["POST"]),
            Route(prefix + "/v1/responses", answers(responses_api), methods=["POST"]),
            Route(prefix + "/v1/messages", answers(messages_api), methods=["POST"]),
            Route(prefix + "/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        ]
    handlers: Any = {404: _no_route, 405: _no_route, 500: _broken}
    return Starlette(routes=routes, exception_handlers=handlers)


class _UnknownKey(Exception):
    pass


class _TooLarge(Exception):
    pass


class _Delivered(JSONResponse):
    """Marks the turn delivered once its whole body has been handed to a client that is still there."""

    def __init__(self, turn: Turn, content: Any, request: HttpRequest, headers: dict[str, str]):
        super().__init__(content, headers=headers)
        self._turn, self._request = turn, request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not await self._request.is_disconnected():
            await super().__call__(scope, receive, send)
            self._turn.delivered = True


async def _deliver(events: AsyncIterator[bytes], turn: Turn, request: HttpRequest) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield event
    except Exception as error:
        if failure_of(error) is None:
            raise
        return  # the status line is out already: the stream itself has said what happened
    # Sending to a client that went away does not fail, so ask.
    turn.delivered = turn.delivered or not await request.is_disconnected()


async def _broken_off() -> AsyncIterator[bytes]:
    """The beginning of a body; the connection is closed behind it."""
    yield b'{"id": '
    raise Cut


def _identified(asked: Request, request: HttpRequest) -> Request:
    """Add what the headers say: who asks, and whether it is a repetition."""
    retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    return replace(asked, user_agent=request.headers.get("user-agent", ""), retry=retry)


async def _json(request: HttpRequest) -> dict[str, Any]:
    """The body: strict JSON in UTF-8, of numbers and characters that the record can hold."""
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise BadRequest(f"a body with content-encoding {coding!r} is not supported", "unsupported_value")
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise _TooLarge
    request.state.size = len(data)
    try:
        # Decoded here because json would let half a surrogate pair pass.
        body = _DECODER.decode(data.decode("utf-8-sig"))
        if b"\\ud" in data or b"\\uD" in data:
            # JavaScript programs cut strings within a character.
            body = json.loads(mend(json.dumps(body, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", "invalid_type")
    return body


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a number that can be kept")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _model(name: str, started: float, context: int) -> dict[str, Any]:
    """The one model, as both families of clients read it, and with what other servers add about its context."""
    since = datetime.fromtimestamp(int(started), UTC).isoformat().replace("+00:00", "Z")
    openai = {"id": name, "object": "model", "created": int(started), "owned_by": "legorl", "max_model_len": context}
    anthropic = {"type": "model", "display_name": name, "created_at": since, "lifecycle": "active"}
    return {**openai, **anthropic, "max_input_tokens": context}


def _wire(request: HttpRequest) -> Wire:
    """The protocol that a request without a route of its own is most likely to speak."""
    theirs = "/messages" in request.scope["path"] or "anthropic-version" in request.headers
    return messages_api if theirs else chat


async def _failed(error: Exception, wire: Wire, request: HttpRequest) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, _UnknownKey):
        failure: Failure | None = Failure(401, "key", "no live session has this API key", "invalid_api_key")
    elif isinstance(error, _TooLarge):
        failure = Failure(413, "large", f"the request body is larger than {MAX_BODY >> 20} MiB", "request_too_large")
    else:
        failure = failure_of(error)
    if failure is None:
        raise error
    await _drain(request)
    headers = {"retry-after": "1"} if failure.kind == "busy" else None
    return JSONResponse(wire.error(failure), failure.status, headers)


async def _drain(request: HttpRequest) -> None:
    """Read what is left of a body that is refused unread: many clients read no answer before they have written all.

    Not that of a client which waits to be told (Expect: 100-continue).
    """
    unread = "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
    if not unread or "expect" in request.headers or hasattr(request.state, "size"):
        return
    left = MOST_DRAINED
    while left > 0:
        message = await request.receive()
        left -= len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


async def _no_route(request: HttpRequest, error: Any) -> Response:
    await _drain(request)
    failure = Failure(error.status_code, "route", f"no route {request.method} {request.scope['path']}", "unknown_url")
    return JSONResponse(_wire(request).error(failure), failure.status, error.headers)


async def _broken(request: HttpRequest, error: Exception) -> Response:
    """A fault of this server's own; Starlette logs it after this answer."""
    failure = Failure(500, "engine", f"lego-serve failed: {type(error).__name__}", "server_error")
    return JSONResponse(_wire(request).error(failure), 500)
