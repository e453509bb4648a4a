"""What the tests of the protocols share: a conversation, its tools in each protocol, and a captured session."""

import asyncio
import itertools

from legorl import tree
from legorl.control import SessionRequest

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run", "parameters": PARAMETERS}}]
TOOLS = [{"type": "function", "name": "bash", "description": "Run", "parameters": PARAMETERS, "strict": False}]
CLAUDE_TOOLS = [{"name": "bash", "description": "Run", "input_schema": PARAMETERS}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls  é", "timeout": "5"}}\n</tool_call>'
ARGUMENTS = {"command": "ls  é", "timeout": 5}
ECHOED = {"timeout": 5, "command": "ls  \u00e9"}  # as harnesses echo it: in another order
USER = {"role": "user", "content": "list the files"}
GO_ON = {"role": "user", "content": "go on"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def capture(run_server, steps, *lines, context=None, **request):
    """Run `steps(running, session)` in a session; check its tree and return its turns."""
    async with (
        run_server(*lines, context=context) as running,
        running.control.session(SessionRequest("a", **request)) as session,
    ):
        await steps(running, session)
        turns = (await session.close()).turns.to_pylist()[0]
    tree.check(turns)
    return turns


def extended(turns):
    """Every turn after the first extends the one before it by exactly what is new."""
    assert [t["cause"] for t in turns] == ["root"] + ["extend"] * (len(turns) - 1)
    for before, turn in itertools.pairwise(turns):
        assert turn["parent"] == before["index"]
    assert all(t["delivered"] for t in turns)
    return True


async def claude(client, messages, stream=False, **more):
    """One request; streamed or not, the client library builds the same Message."""
    asked = {"model": "m", "max_tokens": 400, "messages": messages, **more}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


async def respond(client, items, stream=False, **more):
    asked = {"model": "m", "input": items, "store": False, "prompt_cache_key": "k", **more}
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        return await events.get_final_response()
