"""Detokenizing, tool calls and message equality, as properties."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl.commands.serve import tools
from legorl.commands.serve.cores import parse_cores, split_cores
from legorl.commands.serve.delivery import REASONING, TEXT, Held
from legorl.commands.serve.detokenize import Detokenizer
from legorl.commands.serve.messages import same_answer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=60), cuts=st.lists(st.integers(1, 7), max_size=40))
def test_pieces_add_up_to_the_whole_text(tokenizer, text, cuts):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    words, at, pieces = Detokenizer(tokenizer), 0, []
    for cut in [*cuts, len(ids)]:
        pieces.append(words.push(ids[at : at + cut]))
        at += cut
    pieces.append(words.push([], last=True))
    whole = tokenizer.decode(ids, skip_special_tokens=True)  # this tokenizer cannot encode every character
    assert "".join(pieces) == whole
    assert not any("\ufffd" in p for p in pieces[:-1]) or "\ufffd" in whole


@settings(deadline=None, max_examples=60)
@given(
    before=st.text("ab\n", max_size=12), stop=st.sampled_from(["STOP", "aab", "\n\n"]), after=st.text("abS", max_size=8)
)
def test_nothing_of_a_stop_string_is_shown(tokenizer, before, stop, after):
    words = Detokenizer(tokenizer, (stop,))
    whole = before + stop + after
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    shown = "".join(words.push([i]) for i in ids) + words.push([], last=True)
    assert shown == whole[: whole.index(stop)]


THINKING = tools.Thinking("<think>", "</think>", False)
BITS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</", "<th", "a", "b ", " ", "\n", "{"]), max_size=12
)


@given(BITS.map("".join), st.lists(st.integers(1, 5), max_size=30), st.sampled_from([None, THINKING, "begun"]))
def test_streamed_text_is_always_a_beginning_of_the_content(text, cuts, thinking):
    if thinking == "begun":
        thinking = tools.Thinking("<think>", "</think>", True)
    held, at, shown = Held(True, thinking), 0, {REASONING: "", TEXT: ""}
    for cut in [*cuts, len(text)]:
        if text[at : at + cut]:
            for kind, new in held.push(text[at : at + cut]):
                shown[kind] += new
        at += cut
    reasoning, rest, _ = tools.split_reasoning(text, thinking)
    content, _ = tools.parse(rest, [{"function": {"name": "x"}}])
    assert tools.OPEN not in shown[TEXT]
    assert reasoning.strip().startswith(shown[REASONING]) and content.startswith(shown[TEXT])
    assert {k: len(v) for k, v in shown.items()} == held.shown


def test_reasoning_is_split_off_and_calls_inside_it_are_text():
    call = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    assert tools.split_reasoning(f"<think>\n{call}\n</think>\n\nhi", THINKING) == (call, "hi", True)
    assert tools.split_reasoning("no marks", THINKING) == ("", "no marks", True)
    assert tools.split_reasoning("<think>cut", THINKING) == ("cut", "", False)
    assert tools.split_reasoning("on and on</think>so", tools.Thinking("<think>", "</think>", True))[:2] == (
        "on and on",
        "so",
    )


@pytest.mark.parametrize(
    "body",
    ["[" * 5000, '{"name": "x", "arguments": {"n": ' + "1" * 5000 + "}}", '{"name": "x", "arguments": {"n": NaN}}'],
)
def test_a_call_that_json_cannot_hold_is_invalid_and_no_fault_of_ours(body):
    text = f"<tool_call>{body}</tool_call>"
    content, calls = tools.parse(text, [{"function": {"name": "x", "parameters": {"properties": {"n": True}}}}])
    assert content == text and [c.valid for c in calls] == [False]


def test_arguments_get_the_types_of_the_schema():
    schema = {"properties": {k: {"type": k} for k in ("integer", "number", "boolean", "array", "object", "string")}}
    given_ = {"integer": "5", "number": "0.5", "boolean": "true", "array": "[1]", "object": '{"a": 1}', "string": 7}
    assert tools.coerce(given_, schema) == {
        "integer": 5, "number": 0.5, "boolean": True, "array": [1], "object": {"a": 1}, "string": "7",
    }  # fmt: skip
    assert tools.coerce({"integer": "five", "number": True}, schema) == {"integer": "five", "number": True}


def test_parallel_calls_are_read_in_order_and_unknown_tools_are_invalid():
    bash = [{"function": {"name": "bash"}}]
    one, other = (f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("bash", "rm"))
    content, calls = tools.parse(f"hi\n{one}\n{one}", bash)
    assert content == "hi" and [c.valid for c in calls] == [True, True] and calls[0].id != calls[1].id
    content, calls = tools.parse(one + other, bash)
    assert content == one + other and [c.valid for c in calls] == [True, False]


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5), st.booleans()), max_size=4))
def test_reserialised_arguments_are_the_same_answer_and_changed_ones_are_not(arguments):
    def answer(raw):
        return {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "name": "f", "arguments": raw}]}

    sampled = answer(json.dumps(arguments, ensure_ascii=False, indent=1))
    assert same_answer(answer(json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))), sampled)
    assert not same_answer(answer(json.dumps({**arguments, "extra": 1})), sampled)
    assert not same_answer({**answer(json.dumps(arguments)), "content": "y"}, sampled)


def test_cores_are_split_only_where_they_are_few():
    assert split_cores("all", "vllm") == ([], []) and split_cores(None, "script") == ([], [])
    mine, free = split_cores(None, "vllm")
    assert not set(mine) & set(free)
    with pytest.raises(ValueError):
        parse_cores("9999")
