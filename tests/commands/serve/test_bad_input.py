"""What bad input gets: the protocol's own error, and a session in which nothing is lost."""

import asyncio
import contextlib
import json

from commands.serve.clients import CLAUDE_TOOLS, capture, claude, run

from legorl.control import SessionRequest

REFUSED = [
    ("messages", b"{", "not JSON"),
    ("messages", b'{"messages": []}', "no messages"),
    ("messages", b'{"messages": 5}', "must be a list"),
    ("messages", b'{"messages": [{"role": "tool"}]}', "role"),
    ("messages", b'{"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}', "text only"),
    ("messages", b'{"messages": [{"role": "user", "content": [{"type": "document"}]}]}', "text only"),
    ("messages", b'{"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}', "tool_use_id"),
    ("messages", b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 1}]}]}', "input"),
    ("messages", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "name"),
    ("messages", b'{"messages": [{"role": "user", "content": "x"}], "stop_sequences": [1]}', "stop_sequences"),
    ("messages", b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "auto"}', "tool_choice"),
    ("messages", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', "max_tokens"),
    ("messages", b'{"messages": [{"role": "assistant", "content": "x"}]}', "last message"),
    ("messages", b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}", "not JSON"),
    ("messages/count_tokens", b'{"messages": []}', "no messages"),
    ("responses", b"[1]", "JSON object"),
    ("responses", b"{}", "no messages"),
    ("responses", b'{"input": 5}', "must be a string or a list"),
    ("responses", b'{"input": [5]}', "object"),
    ("responses", b'{"input": [{"role": "robot", "content": ""}]}', "role"),
    ("responses", b'{"input": [{"type": "item_reference", "id": "x"}]}', "stored"),
    ("responses", b'{"input": [{"type": "local_shell_call"}]}', "local_shell_call"),
    ("responses", b'{"input": [{"type": "function_call", "name": "x"}]}', "call_id"),
    ("responses", b'{"input": [{"role": "user", "content": [{"type": "input_image"}]}]}', "text only"),
    ("responses", b'{"input": "x", "previous_response_id": "resp_1"}', "previous_response_id"),
    ("responses", b'{"input": "x", "tools": [{"name": "y"}]}', "type"),
    ("responses", b'{"input": "x", "tool_choice": {"type": "function", "name": "y"}}', "tool_choice"),
    ("responses", b'{"input": "x", "text": {"format": {"type": "json_object"}}}', "text.format"),
    ("responses", b'{"input": "x", "max_output_tokens": 0.5}', "max_output_tokens"),
    ("chat/completions", b'{"messages": [{"role": {}, "content": "x"}]}', "role"),
    ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": 1}', "tools"),
    ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true}', "logprobs"),
    ("chat/completions", b'{"messages": [], "response_format": {"type": "json_object"}}', "response_format"),
    ("chat/completions", b'{"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}', "tool call"),
]  # fmt: skip


def test_what_cannot_be_answered_gets_the_protocols_own_error(run_server):
    async def steps(running, session):
        async with running.harness(session.key) as http:
            for path, body, word in REFUSED:
                reply = await http.post(f"/v1/{path}", content=body)
                assert reply.status_code == 400, (path, body, reply.text)
                data = reply.json()
                assert data["error"]["type"] == "invalid_request_error", (path, body, data)
                assert word in data["error"]["message"], (path, body, data)
                assert (data.get("type") == "error") == path.startswith("messages")
            reply = await http.post("/v1/responses", json={"input": "still here?"})
            assert reply.json()["output"][0]["content"][0]["text"] == "fine"

    assert len(run(capture(run_server, steps, "fine"))) == 1


def test_half_a_character_from_javascript_does_not_break_the_conversation(run_server):
    async def steps(running, session):
        async with running.harness(session.key) as http:
            body = rb'{"messages": [{"role": "user", "content": "cut \ud83d here, whole \ud83d\ude00"}]}'
            assert (await http.post("/v1/messages", content=body)).status_code == 200

    (turn,) = run(capture(run_server, steps, "ok"))
    assert json.loads(turn["messages"])[0]["content"] == "cut \ufffd here, whole \U0001f600"


def test_half_a_character_from_the_model_does_not_lose_the_record(run_server):
    body = r"""<tool_call>{"name": "%s", "arguments": {"command": "a \ud83d b", "timeout": %s}}</tool_call>"""

    async def steps(running, session):
        for text in "12":
            message = {"role": "user", "content": text}
            await claude(running.anthropic(session.key), [message], tools=CLAUDE_TOOLS)

    turns = run(capture(run_server, steps, body % ("bash", "5"), body % (r"\ude00", r'"\ud83d"')))
    calls = [c for t in turns for c in t["tool_calls"]]
    assert [c["valid"] for c in calls] == [True, False] and calls[1]["name"] == "\ufffd"
    assert json.loads(calls[0]["arguments"])["command"] == "a \ufffd b"


def test_what_is_nested_deeply_is_refused_before_it_is_recorded(run_server):
    async def steps(running, session):
        async with running.harness(session.key) as http:
            for depth, status in ((40, 200), (80, 400), (900, 400)):
                nested = "[" * depth + "]" * depth
                for field in (
                    f'"thinking": {{"budget": {nested}}}',
                    f'"tools": [{{"name": "x", "input_schema": {{"a": {nested}}}}}]',
                ):
                    body = f'{{"messages": [{{"role": "user", "content": "x"}}], {field}}}'
                    assert (await http.post("/v1/messages", content=body)).status_code == status, (depth, field[:20])

    assert len(run(capture(run_server, steps, "ok"))) == 2


def http(key, body, head=b"", path=b"/v1/responses"):
    """The bytes of a request that ends its connection."""
    first = b"POST " + path + b" HTTP/1.1\r\nhost: model\r\nconnection: close\r\nauthorization: Bearer "
    return first + key.encode() + b"\r\n" + head + b"content-length: %d\r\n\r\n" % len(body) + body


def status_of(reply):
    return int(reply.split(b" ", 2)[1])


FINE = b'{"input": "x"}'
MALFORMED = [
    (b'{"input": "a\xff"}', b"", 400, "not JSON"),
    (b'{"input": "a\xed\xa0\x80b"}', b"", 400, "not JSON"),  # half a surrogate pair as bytes
    ('{"input": "é"}'.encode("utf-16"), b"", 400, "not JSON"),
    (b'{"input": "x", "temperature": NaN}', b"", 400, "not a number"),
    (b'{"input": "x", "reasoning": {"effort": 1e999}}', b"", 400, "not a number"),
    (b'{"input": ' + b"9" * 5000 + b"}", b"", 400, "not JSON"),
    (FINE, b"content-encoding: gzip\r\n", 400, "content-encoding"),
    (b"\xef\xbb\xbf" + FINE, b"user-agent: \xff\xfe\r\nx-y: \xed\xa0\x80\r\nexpect: banana\r\n", 200, "completed"),
    (FINE, b"upgrade: websocket\r\nconnection: upgrade\r\n", 400, "not JSON"),  # its body is another protocol's
]


def test_bytes_that_are_no_request_are_refused_and_odd_ones_understood(run_server):
    async def steps(running, session):
        for body, head, status, word in MALFORMED:
            reply = await running.raw(http(session.key, body, head))
            assert status_of(reply) == status and word in reply.decode(), (body[:40], reply)
        reply = await running.raw(http("\u00ff\u00fe", FINE))
        assert status_of(reply) == 401
        for path in (b"/v1/\xff", b"/v1/%ff", b"/v1/models/%ed%a0%80", b"//x", b"*"):
            reply = await running.raw(b"GET " + path + b" HTTP/1.1\r\nhost: [\r\nconnection: close\r\n\r\n")
            assert status_of(reply) in (400, 401, 404), (path, reply)
            assert str(running.server.llm_dir).encode() not in reply
        for garbage in (b"\x16\x03\x01\x02\x00\x01", b"BREW / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            assert status_of(await running.raw(garbage)) == 400

    turns = run(capture(run_server, steps, "ok"))
    assert len(turns) == 1 and all(t["delivered"] for t in turns)


def test_requests_may_come_in_any_pieces(run_server):
    async def steps(running, session):
        whole = http(session.key, FINE)
        assert status_of(await running.raw(*(whole[k : k + 7] for k in range(0, len(whole), 7)))) == 200
        stay = [http(session.key, b'{"input": "%d"}' % k).replace(b"connection: close\r\n", b"") for k in range(2)]
        reply = await running.raw(b"".join(stay) + http(session.key, b"{"))
        assert reply.count(b"HTTP/1.1 200 OK") == 2 and reply.count(b"HTTP/1.1 400") == 1
        chunked = whole.replace(b"content-length: 14", b"transfer-encoding: chunked").removesuffix(FINE)
        assert status_of(await running.raw(chunked, b'3\r\n{"i\r\n', b'b\r\nnput": "c"}\r\n0\r\n\r\n')) == 200
        assert status_of(await running.raw(chunked, b'3\r\n{"i\r\nzz\r\n')) == 400
        expecting = http(session.key, FINE, b"expect: 100-continue\r\n")
        reply = await running.raw(expecting)
        assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
        assert status_of(await running.raw(http("no", FINE, b"expect: 100-continue\r\n"))) == 401

    assert len(run(capture(run_server, steps, "ok"))) == 5


def test_a_body_that_is_cut_leaves_no_trace(run_server):
    async def steps(running, session):
        for cut in (http(session.key, FINE)[:-4], http(session.key, FINE)[:-20]):
            _reader, writer = await asyncio.open_unix_connection(f"{running.server.llm_dir}/llm.sock")
            writer.write(cut)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        assert status_of(await running.raw(http(session.key, FINE))) == 200

    assert len(run(capture(run_server, steps, "ok"))) == 1


def test_a_request_must_come_in_time_and_with_a_short_head(run_server, monkeypatch):
    from legorl.commands.serve import guard

    async def steps(running, session):
        reply = await running.raw(http(session.key, FINE, b"x: " + b"y" * 60_000 + b"\r\n"))
        assert status_of(reply) == 200
        reader, writer = await asyncio.open_unix_connection(f"{running.server.llm_dir}/llm.sock")
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET / HTTP/1.1\r\n")
            while not reader.at_eof() and not writer.is_closing():  # an endless head
                writer.write(b"x: " + b"y" * 4096 + b"\r\n")
                await writer.drain()
        writer.close()
        monkeypatch.setattr(guard, "REQUEST_S", 0.05)
        for late in (b"", b"GET / HT", http(session.key, FINE)[:-1]):
            assert await running.raw(late) == b""

    assert len(run(capture(run_server, steps, "ok"))) == 1


def test_large_bodies_get_an_answer_that_can_be_read(run_server):
    long = b'{"input": "' + b"word " * 2_000_000 + b'"}'

    async def steps(running, session):
        assert status_of(await running.raw(http("no", long))) == 401
        assert status_of(await running.raw(http(session.key, long, path=b"/v1/none"))) == 404
        other = asyncio.create_task(running.raw(http(session.key, FINE)))
        reply = await running.raw(http(session.key, long))
        assert status_of(reply) == 400 and b"context_length_exceeded" in reply
        assert status_of(await other) == 200
        assert status_of(await running.raw(http(session.key, long * 4))) == 413
        schema = {"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(40_000)}}
        schema["properties"]["self"] = {"$ref": "#"}
        tool = {"type": "function", "name": "x", "parameters": schema}
        body = json.dumps({"input": "x", "tools": [tool]}).encode()
        assert len(body) > 1 << 20 and b"context_length_exceeded" in await running.raw(http(session.key, body))

    assert len(run(capture(run_server, steps, "ok"))) == 1


def test_who_reads_slowly_or_goes_away_keeps_nobody_waiting(run_server):
    async def steps(running, session):
        asked = b'{"input": "%s", "stream": true}'
        slow = await asyncio.open_unix_connection(f"{running.server.llm_dir}/llm.sock")
        slow[1].write(http(session.key, asked % b"slow"))
        gone = await asyncio.open_unix_connection(f"{running.server.llm_dir}/llm.sock")
        gone[1].write(http(session.key, asked % b"gone"))
        assert (await gone[0].readline()).startswith(b"HTTP/1.1 200")
        gone[1].close()
        await gone[1].wait_closed()
        both = [http(session.key, b'{"input": "%d"}' % k) for k in range(2)]
        assert [status_of(r) for r in await asyncio.gather(*(running.raw(b) for b in both))] == [200, 200]
        again = await running.raw(http(session.key, asked % b"gone"))
        assert b"response.completed" in again
        assert b"response.completed" in await slow[0].read()
        slow[1].close()

    turns = run(capture(run_server, steps, "word " * 400))
    assert len(turns) == 4 and all(t["delivered"] for t in turns)


def test_a_key_dies_with_its_session(run_server):
    async def main():
        async with run_server("ok") as running:
            async with running.control.session(SessionRequest("a")) as session:
                assert status_of(await running.raw(http(session.key, FINE))) == 200
                other = b"x-api-key: another\r\n"
                assert status_of(await running.raw(http(session.key, FINE, other))) == 200
            for path in (b"/v1/responses", b"/k/" + session.key.encode() + b"/v1/messages"):
                assert status_of(await running.raw(http(session.key, FINE, path=path))) == 401

    run(main())
