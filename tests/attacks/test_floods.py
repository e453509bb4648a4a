"""Floods of connections from one sandbox: everybody else is still answered."""

import asyncio

from commands.serve.conftest import run_server  # noqa: F401  a fixture

from legorl.control import SessionRequest

FINE = b'{"input": "hi"}'


def http(key: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % (len(body) if length is None else length) + body


# Says nothing, half a head, half a body; a request without a key and then nothing.
OPENINGS = (b"", b"POST / HTTP/1.1\r\n", http("none", b"{", 1000), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")


def test_idle_connections_of_one_sandbox_leave_room_for_the_others(run_server) -> None:  # noqa: F811
    async def main() -> None:
        async with run_server("ok") as running, running.control.session(SessionRequest("a")) as session:
            held = []
            for number in range(2400):
                reader, writer = await asyncio.open_unix_connection(f"{running.server.llm_dir}/llm.sock")
                writer.write(OPENINGS[number % len(OPENINGS)])
                held.append((reader, writer))
            assert (await running.raw(http(session.key, FINE))).startswith(b"HTTP/1.1 200")
            # The newest are still there: they could be a request under way.
            assert not held[-1][0].at_eof()
            for _, writer in held:
                writer.transport.abort()

    asyncio.run(asyncio.wait_for(main(), 120))
