"""Inside the container: TCP 127.0.0.1:PORT -> the Unix socket of the model API. Standard library only.

Runs as its own uid, forked by the supervisor, in one thread: no process limit that an agent exhausts can stop it.
"""

import asyncio
import os
from typing import NoReturn

PORT = 8400
SOCKET = "/run/llm/llm.sock"


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of `reader`, then close the writing side only: the answer may still be under way."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:  # one side hung up: the other must notice too
        writer.transport.abort()


async def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        api_reader, api_writer = await asyncio.open_unix_connection(SOCKET)
    except OSError:
        writer.transport.abort()  # the client sees a reset, as with any server that is down
        return
    try:
        await asyncio.gather(_pump(reader, api_writer), _pump(api_reader, writer))
    finally:
        api_writer.close()
        writer.close()


async def _serve(ready_fd: int) -> None:
    server = await asyncio.start_server(_connection, "127.0.0.1", PORT, backlog=256)
    os.write(ready_fd, b"1")
    os.close(ready_fd)
    async with server:
        await server.serve_forever()


def main(ready_fd: int) -> NoReturn:
    """Serve for ever; one byte on `ready_fd` once the port listens."""
    asyncio.run(_serve(ready_fd))
    raise SystemExit(1)
