"""What one connection may cost before a request is known: bytes of its head, and time until it is whole.

uvicorn bounds neither with its fast parser, and everything behind the sandbox's socket is an agent's to try. Nor may
one sandbox's idle connections use up those of all (uvicorn's limit_concurrency): of those that have no whole request,
the oldest are closed once there are too many. A client that sends its request as it connects is never among them.
"""

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 128 << 10  # bytes of request line and headers
REQUEST_S = 300.0  # for a request to arrive, from its connection or its first byte
MOST_IDLE = 1024  # connections without a whole request, of all sandboxes together


class Guarded(HttpToolsProtocol):
    """uvicorn's protocol, which closes connections that send too long a head or too slowly."""

    _head: int | None = 0  # bytes received of a head that is not complete, None behind it
    _late: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MOST_HEAD:
                self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        self._head = 0
        self._await_request()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._request_is_there()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._idle()  # until its next request; uvicorn has a time limit for that

    def _await_request(self) -> None:
        self._request_is_there()
        self._late = self.loop.call_later(REQUEST_S, self._close)
        self._idle()

    def _idle(self) -> None:
        idle = self._all_idle()
        idle.pop(self, None)
        idle[self] = None
        if len(idle) > MOST_IDLE:
            oldest = next(iter(idle))
            del idle[oldest]
            oldest._close()

    def _all_idle(self) -> "dict[Guarded, None]":
        """This server's connections without a whole request, those that have been so for longest first."""
        return self.server_state.__dict__.setdefault("idle", {})

    def _request_is_there(self) -> None:
        self._all_idle().pop(self, None)
        if self._late:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self.transport.close()
