"""Chat templates: how calls come out of them and back, and how sampled answers are continued token by token."""

import asyncio
import copy
import itertools
import json

import pytest
from families import BASH, FAMILIES, LLAMA32, MISTRAL3, QWEN3, QWEN25, QWEN35, SMOLLM2, SYSTEM, as_harness, call
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl.commands.serve import delivery
from legorl.commands.serve import tools as toolformat
from legorl.commands.serve.messages import BadRequest
from legorl.commands.serve.render import Template
from legorl.commands.serve.script_engine import ScriptEngine, read_script
from legorl.commands.serve.session import Session
from legorl.commands.serve.turn import Request
from legorl.control import SessionRequest

ARGUMENTS = {"command": "ls 'é' <b>", "timeout": 5, "env": {"A": "1"}, "paths": ["x", "y"], "force": True}
by_name = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    """One script engine for all: loading its tokenizer takes most of the time."""
    script = tmp_path_factory.mktemp("script") / "none.jsonl"
    script.write_text('{"text": ""}')
    return ScriptEngine(tiny_model, 0, read_script(script), 100_000)


@pytest.fixture(scope="module")
def base(engine):
    return copy.deepcopy(engine.tokenizer)


@pytest.fixture(scope="module")
def template(base):
    made = {}

    def get(family, history="exact"):
        if (family, history) not in made:
            made[family, history] = Template(family.tokenizer(base), history=history)
        return made[family, history]

    return get


def oracle(template, family, messages, prompt):
    """What the tokenizer itself renders; for SmolLM2, whose template has no tools, in the documented default format."""
    shown, tools = as_harness(messages, family), [BASH]
    if family is SMOLLM2:
        shown, tools = [toolformat.as_text(m) for m in messages], None
        shown[0] = {"role": "system", "content": f"{SYSTEM['content']}\n\n{toolformat.guide([BASH])}"}
    return template._tokenizer.apply_chat_template(
        shown, tools=tools, tokenize=False, add_generation_prompt=prompt, strftime_now=template.started.strftime
    )


def opening(family):
    """Mistral's template moves the system message to the last question: then no answer is rendered behind it."""
    question = {"role": "user", "content": "Fix it."}
    return [question] if family is MISTRAL3 else [SYSTEM, question]


def plan(family, count):
    """Answers of `count` turns of tool use and their results: parallel calls, text before calls, reasoning."""
    number, steps = itertools.count(), []
    for k in range(count):
        calls = [
            call({**ARGUMENTS, "timeout": k}, next(number)) for _ in range(2 if family.parallel and k % 3 == 1 else 1)
        ]
        answer = {"role": "assistant", "content": f"Step {k}." if family.mixed and k % 2 else "", "tool_calls": calls}
        if family.thinks:
            answer["reasoning"] = f"Thought {k}\nand more."
        results = [{"role": "tool", "content": f"out {k} {c['id'][-3:]}", "tool_call_id": c["id"]} for c in calls]
        steps.append((answer, results))
    return steps


def sampled(template, family, messages, answer):
    """The text that a model samples for `answer`, if it writes exactly as its template shows it."""
    prompt, whole = (oracle(template, family, m, p) for m, p in ((messages, True), ([*messages, answer], False)))
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].rstrip("\n")
    assert text.endswith(family.end)
    return text.removesuffix(family.end)


async def converse(template, tmp_path, engine, texts, ask):
    """Sample `texts` in one session. `ask(k, answer)` gives the messages in front of turn k, or None at the end."""
    script = tmp_path / "script.jsonl"
    script.write_text("\n".join(json.dumps(t if isinstance(t, dict) else {"text": t}) for t in texts))
    engine.tokenizer, engine._script = template._tokenizer, read_script(script)
    session = Session(SessionRequest("a.0", turn_tokens=2048), engine, template)
    answer = None
    for k in itertools.count():
        messages = ask(k, answer)
        if messages is None:
            break
        turn = session.open_turn(Request("openai-chat", messages, [BASH], {}))
        await turn.end()
        answer, turn.delivered = turn.answer, True
    await session.close()
    return session.record()


def prompt_of(rows, index):
    from legorl import tree

    return tree.prompt_ids(tree.nodes_of(rows), index).tolist()


@by_name
def test_twenty_turns_of_tool_use_are_what_the_template_itself_renders(template, family, engine, tmp_path):
    one = template(family)
    assert one.fault is None and one.format.name == family.native
    start = opening(family)
    told, texts, wanted, messages = [start], [], [], list(start)
    for answer, results in plan(family, 20):
        texts.append(sampled(one, family, messages, answer))
        wanted.append(one.ids(oracle(one, family, messages, prompt=True)))
        messages += [answer, *results]
        told.append(results)

    conversation = list(start)

    def ask(k, answer):
        if k == 20:
            return None
        if answer:
            # The harness sees our ids only, and drops the reasoning.
            results = [{**r, "tool_call_id": c["id"]} for r, c in zip(told[k], answer["tool_calls"], strict=True)]
            conversation.extend([{x: v for x, v in answer.items() if x != "reasoning"}, *results])
        return list(conversation)

    rows = asyncio.run(converse(one, tmp_path, engine, texts, ask))
    assert [r["cause"] for r in rows] == ["root"] + ["extend"] * 19
    for k, row in enumerate(rows):
        assert prompt_of(rows, k) == wanted[k], k
        assert row["text"] == texts[k] and row["stop_token_sampled"]
        answer = plan(family, 20)[k][0]
        assert [c["valid"] for c in row["tool_calls"]] == [True] * len(answer["tool_calls"])
        assert [json.loads(c["arguments"]) for c in row["tool_calls"]] == [
            json.loads(c["arguments"]) for c in answer["tool_calls"]
        ]
        assert (row["reasoning"] or "") == answer.get("reasoning", "")


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize("family", [QWEN3, QWEN35], ids=lambda f: f.name)
def test_reasoning_before_a_new_question(template, family, history, engine, tmp_path):
    """Qwen's templates strip it: by default it stays as it was sampled."""
    one = template(family, history)
    start = opening(family)
    (answer, results), (later, more) = plan(family, 2)
    question = {"role": "user", "content": "And now?"}
    texts = [sampled(one, family, start, answer), sampled(one, family, [*start, answer, *results], later)] * 2
    asked = [start]

    def ask(k, said):
        if k == 4:
            return None
        if k:
            rest = [
                {**r, "tool_call_id": c["id"]}
                for r, c in zip((results, more)[(k - 1) % 2], said["tool_calls"], strict=True)
            ]
            asked.append([*asked[-1], {**said, "reasoning": ""}, *rest, *([question] if k == 2 else [])])
        return asked[-1]

    rows = asyncio.run(converse(one, tmp_path, engine, texts, ask))
    kept = one._tokenizer.decode(prompt_of(rows, 2))
    full = [SYSTEM, start[1], answer, *results, later, *more, question]
    tail = oracle(one, family, full, prompt=True)
    if history == "exact":
        assert [r["cause"] for r in rows] == ["root", "extend", "extend", "extend"]
        assert "Thought 0" in kept and "Thought 1" in kept
        assert kept.endswith(tail[tail.rindex("</tool_call>") + len("</tool_call>") :])
    else:
        # Rendered in full where the template takes something back, and continued again behind that.
        assert [r["cause"] for r in rows] == ["root", "extend", "rewrite", "extend"]
        assert prompt_of(rows, 2) == one.ids(tail)


WORDS = st.text("ab \n\"'\\{}<>/|é中[]", max_size=12)


@st.composite
def conversations(draw, family):
    """A conversation that ends with what follows the answer at `at`; the template can say all of it."""
    number, messages = itertools.count(), [SYSTEM, {"role": "user", "content": draw(WORDS)}]
    at = 0
    for _ in range(draw(st.integers(1, 4))):
        calls = [
            call({"command": draw(WORDS), "env": {"word": f"unique{next(number)}x"}}, next(number))
            for _ in range(draw(st.integers(0, 2 if family.parallel else 1)))
        ]
        content = draw(WORDS) if family.mixed or not calls else ""
        if not calls:
            content += f"unique{next(number)}x"
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        if family.thinks and draw(st.booleans()):
            answer["reasoning"] = "thought" + draw(WORDS).strip()
        at = len(messages)
        messages.append(answer)
        messages += [{"role": "tool", "content": draw(WORDS), "tool_call_id": c["id"]} for c in calls]
        if not calls or (family is not MISTRAL3 and draw(st.booleans())):
            messages.append({"role": "user", "content": draw(WORDS)})
    return messages, at


@by_name
@settings(max_examples=25)
@given(data=st.data())
def test_the_bridge_is_what_the_template_puts_behind_the_answer(template, family, data):
    one = template(family)
    messages, at = data.draw(conversations(family))
    bridge = one.bridge(messages, at, [BASH], last=None)
    calls = messages[at]["tool_calls"]
    whole = oracle(one, family, messages, prompt=True)
    unique = json.loads(calls[-1]["arguments"])["env"]["word"] if calls else messages[at]["content"].split()[-1][-9:]
    behind = whole[whole.rindex(unique) + len(unique) :]
    assert behind.find(family.end) >= 0
    assert one._tokenizer.decode(bridge) == behind[behind.index(family.end) :]
    assert bridge == one.ids(behind[behind.index(family.end) :])
    end = one._tokenizer.convert_tokens_to_ids(family.end)
    assert one.bridge(messages, at, [BASH], last=end) == bridge[1:]


VALUES = {
    "command": WORDS,
    "timeout": st.integers(-(10**9), 10**9),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "force": st.booleans(),
    "env": st.dictionaries(
        st.text("ab", min_size=1, max_size=2), st.one_of(WORDS, st.none(), st.integers()), max_size=2
    ),
    "paths": st.lists(WORDS, max_size=2),
}


@by_name
@settings(max_examples=40)
@given(data=st.data())
def test_calls_are_read_back_as_the_template_writes_them(template, family, data):
    one = template(family)
    wanted = data.draw(
        st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=3 if family.parallel else 1)
    )
    content = data.draw(st.sampled_from(["", "Some text."])) if family.mixed else ""
    answer = {"role": "assistant", "content": content, "tool_calls": [call(a, k) for k, a in enumerate(wanted)]}
    text = sampled(one, family, opening(family), answer)
    _reasoning, rest, _over = toolformat.split_reasoning(text, one.thinking)
    said, calls = toolformat.parse(rest, [BASH], one.format)
    assert [(c.name, c.valid, json.loads(c.arguments)) for c in calls] == [("bash", True, a) for a in wanted]
    assert said.strip() == content


def test_several_calls_at_once_where_the_template_takes_one(template):
    """Llama 3.x refuses to render them; what its models write is continued all the same, and rendered in full."""
    one = template(LLAMA32)
    calls = [call({"command": c}, k) for k, c in enumerate("ab")]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": "out", "tool_call_id": c["id"]} for c in calls]
    messages = [SYSTEM, {"role": "user", "content": "x"}, answer, *results]
    tail = one._tokenizer.decode(one.bridge(messages, 2, [BASH], last=None))
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    told = header.format("ipython") + '"out"<|eot_id|>'
    assert tail == f"<|eot_id|>{told}{told}{header.format('assistant')}"
    assert one._tokenizer.decode(one.full(messages, [BASH])).endswith(one.format.write(calls) + tail)


def test_an_answer_cut_short_gets_its_end_from_the_bridge(template, engine, tmp_path):
    one = template(QWEN25)
    start = [SYSTEM, {"role": "user", "content": "x"}]

    def ask(k, answer):
        return [start, [*start, answer or {}, {"role": "user", "content": "go on"}], None][k]

    texts = [{"text": "I was", "fault": "length"}, "done"]
    rows = asyncio.run(converse(one, tmp_path, engine, texts, ask))
    assert not rows[0]["stop_token_sampled"] and rows[1]["cause"] == "extend"
    assert prompt_of(rows, 1) == one.ids(
        oracle(one, QWEN25, ask(1, rows[0] | {"role": "assistant", "content": "I was"}), True)
    )


def test_a_date_in_the_template_does_not_change_while_the_server_runs(template):
    one = template(LLAMA32)
    assert f"Today Date: {one.started:%d %b %Y}" in one.text([{"role": "user", "content": "x"}], [], prompt=True)


def test_mistral_template_here_is_what_mistral_common_writes(template):
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    one = template(MISTRAL3)
    messages = [SYSTEM, {"role": "user", "content": "x"}]
    for answer, results in plan(MISTRAL3, 3):
        messages += [answer, *results]
    messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "More"}]
    shown = as_harness(messages, MISTRAL3)
    mine = one.text(messages, [BASH], prompt=True)
    for message in shown:
        for c in message.get("tool_calls", []):
            c["function"]["arguments"] = json.dumps(c["function"]["arguments"])
    request = ChatCompletionRequest.from_openai(messages=shown, tools=[BASH])
    assert mine == MistralTokenizer.v3(is_tekken=True).encode_chat_completion(request).text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not show an answer"),
        ("{% for m in messages | reverse %}{{ m.role + m.content + eos_token }}{% endfor %}", "behind the answer"),
        (
            "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}{{ messages | length }}",
            "depends on earlier messages",
        ),
        ("{{ messages[-1].content }}", "does not show an answer"),
    ],
)
def test_a_template_that_cannot_be_bridged_says_why(base, source, why, engine, tmp_path):
    tokenizer = SMOLLM2.tokenizer(base)
    tokenizer.chat_template = source
    one = Template(tokenizer)
    assert why in one.fault and "rendered in full" in one.describe() and why in one.describe()
    start = [{"role": "user", "content": "x"}]

    def ask(k, answer):
        return [start, [*start, answer or {}, {"role": "user", "content": "y"}], None][k]

    rows = asyncio.run(converse(one, tmp_path, engine, ["One.", "Two."], ask))
    asked = ask(1, {"role": "assistant", "content": "One."})
    assert prompt_of(rows, 1) == one.full(asked, [BASH]) and rows[1]["cause"] in ("root", "rewrite")


def test_a_template_that_loses_messages_is_refused(base):
    tokenizer = SMOLLM2.tokenizer(base)
    tokenizer.chat_template = "{% for m in messages %}{% for b in m.content %}{{ b.text }}{% endfor %}{% endfor %}"
    with pytest.raises(BadRequest, match="made for content in blocks"):
        Template(tokenizer)


BLOCKS = """{%- for m in messages %}{{ "[INST]" if m.role == "user" }}
{%- if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}
{{- "[THINK]" + b.thinking + "[/THINK]" if b.type == "thinking" else b.text }}{% endfor %}{% endif %}
{{- "[/INST]" if m.role == "user" else eos_token }}{% endfor %}"""
PLAIN = "{% for m in messages %}{{ m.content + eos_token if m.content is string else m.content }}{% endfor %}[/THINK]"


@pytest.mark.parametrize(("source", "kept"), [(BLOCKS, "[THINK]so[/THINK]b</s>"), (PLAIN, "b</s>")])
def test_reasoning_goes_where_the_template_has_a_place_for_it(base, source, kept):
    """As blocks of the content (Mistral's templates, written here), or nowhere."""
    tokenizer = MISTRAL3.tokenizer(base)
    tokenizer.chat_template = source
    one = Template(tokenizer)
    assert one.thinking == toolformat.Thinking("[THINK]", "[/THINK]", False) and one.strips == (source is PLAIN)
    answer = {"role": "assistant", "content": "b", "reasoning": "so"}
    assert kept in one.text([{"role": "user", "content": "x"}, answer], [], prompt=False)
    assert one.hidden.isdisjoint(tokenizer.convert_tokens_to_ids(["[THINK]", "[/THINK]"]))


def test_what_is_found_is_told_in_one_line(template):
    assert template(QWEN35).describe() == (
        "tool calls: qwen3_coder; reasoning <think>...</think>; answers are continued token by token "
        "(history exact; the template alone would strip earlier reasoning)"
    )
    assert template(SMOLLM2).describe().startswith("tool calls: default, shown in the system prompt; ")
    assert template(QWEN35).thinking.begun and not template(QWEN3).thinking.begun


@pytest.mark.parametrize("family", [QWEN25, QWEN35, LLAMA32, MISTRAL3], ids=lambda f: f.name)
def test_text_in_front_of_a_call_streams_and_the_call_arrives_whole(template, family, engine, tmp_path):
    one = template(family)
    calls = [call({"command": "ls", "timeout": 5}, k) for k in range(2)]
    text = ("thought</think>\n\n" if family.thinks else "") + "First I look. "
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"text": f"{text}\n{one.format.write(calls)}"}))
    engine.tokenizer, engine._script = one._tokenizer, read_script(script)
    seen = []

    async def go():
        session = Session(SessionRequest("a.0"), engine, one)
        turn = session.open_turn(Request("openai-chat", opening(family), [BASH], {}, streamed=True))
        async for kind, piece in delivery.parts(turn):
            seen.append((kind, piece, turn.done))
        await session.close()
        return turn

    turn = asyncio.run(go())
    assert "".join(p for kind, p, _ in seen if kind == delivery.TEXT) == "First I look."
    assert [json.loads(c.arguments) for c in turn.calls] == [{"command": "ls", "timeout": 5}] * 2
    assert sum(not done for _kind, _piece, done in seen) > 2  # pieces that came before the end
