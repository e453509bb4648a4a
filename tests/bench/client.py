"""A chat client that costs little: HTTP/1.1 over one kept connection, so that the server is what is measured."""

import asyncio
import json
from pathlib import Path
from typing import Any


class Client:
    """One connection to a Unix socket or a TCP port, with a key. `ask` sends one chat completion and waits for it."""

    def __init__(self, where: Path | int, key: str):
        self._where, self._key = where, key

    async def __aenter__(self) -> "Client":
        limit = 1 << 24
        if isinstance(self._where, int):
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._where, limit=limit)
        else:
            self._reader, self._writer = await asyncio.open_unix_connection(self._where, limit=limit)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply's body. Raises RuntimeError for anything but 200."""
        data = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: model\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)
        answered = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in answered.split("\r\n")[1:] if ": " in line)
        reply = json.loads(await self._reader.readexactly(int(fields["content-length"])))
        if " 200 " not in answered.split("\r\n")[0]:
            raise RuntimeError(f"{answered.splitlines()[0]}: {reply}")
        return reply
