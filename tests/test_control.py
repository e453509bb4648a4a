"""The control socket's client, where lego-serve dies at the worst moment: one error, that says what to do."""

import asyncio
from pathlib import Path

import pytest

from legorl.control import Control, ServeError, SessionRequest

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("answer", [b"", HEAD, HEAD + b"0\r\n\r\n"], ids=["nothing", "a head", "no session"])
def test_a_server_that_goes_away_while_a_session_opens(tmp_path: Path, answer: bytes):
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(dying, tmp_path / "control.sock")
        async with server, Control(tmp_path / "control.sock") as control:
            with pytest.raises(ServeError, match=r"no lego-serve answers on .*control.sock .*start one with"):
                async with control.session(SessionRequest("a")):
                    pass

    asyncio.run(main())


def test_nobody_listens(tmp_path: Path):
    async def main() -> None:
        async with Control(tmp_path / "none.sock") as control:
            for asked in (control.health(), control.session(SessionRequest("a")).__aenter__()):
                with pytest.raises(ServeError, match=r"no lego-serve answers on .*none.sock"):
                    await asked

    asyncio.run(main())


def test_a_server_that_does_not_answer_is_not_called_absent(tmp_path: Path):
    async def main() -> None:
        server = await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "control.sock")
        async with server, Control(tmp_path / "control.sock") as control:
            with pytest.raises(ServeError, match=r"control.sock has not answered POST /weights in 0.01 s"):
                await control._call("POST", "/weights", timeout=0.01)

    asyncio.run(main())
