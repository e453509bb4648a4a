"""Detokenizing, tool calls and message equality, as properties."""

import copy
import json

import pytest
from families import LLAMA31, MISTRAL3, QWEN35
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl.commands.serve import tools
from legorl.commands.serve.cores import parse_cores, split_cores
from legorl.commands.serve.delivery import REASONING, TEXT, Held
from legorl.commands.serve.detokenize import Detokenizer, hidden_tokens
from legorl.commands.serve.formats import BY_NAME
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


HERMES = BY_NAME["hermes"]
THINKING = tools.Thinking("<think>", "</think>", False)
TOOL = {"function": {"name": "x", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}}
CALLS = [{"id": "1", "name": "x", "arguments": '{"s": "</tool_call> {", "n": 5}'}]
# Pieces of calls in every format, whole calls, and text that looks like the beginning of one.
BITS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "</",
            "<th",
            "a",
            "b ",
            " ",
            "\n",
            "{",
            "}",
            '"name": "x"',
            '{"name"',
            "[TOOL_CALLS]",
            "[TO",
        ]
        + [
            "<tool_call>",
            "</tool_call>",
            "<function=x>",
            "</function>",
            "<parameter=s>",
            "</parameter>",
            "<|python_tag|>",
        ]
        + ["; ", "[", "]", ",", '{"name": "x", "arguments": {}}', "[ARGS]", "x{}", "x.call()", "<|py", "\u00e9"]
        + [f.write(CALLS) for f in BY_NAME.values()]
    ),
    max_size=12,
)
formats = pytest.mark.parametrize("format", BY_NAME.values(), ids=lambda f: f.name)


@formats
@given(BITS.map("".join), st.lists(st.integers(1, 5), max_size=30), st.sampled_from([None, THINKING, "begun"]))
def test_streamed_text_is_always_a_beginning_of_the_content(format, text, cuts, thinking):
    """Whatever the model writes and however it is cut; and reading it raises nothing."""
    if thinking == "begun":
        thinking = tools.Thinking("<think>", "</think>", True)
    held, at, shown = Held(format, thinking), 0, {REASONING: "", TEXT: ""}
    for cut in [*cuts, len(text)]:
        if text[at : at + cut]:
            for kind, new in held.push(text[at : at + cut]):
                shown[kind] += new
        at += cut
    reasoning, rest, _ = tools.split_reasoning(text, thinking)
    content, calls = tools.parse(rest, [TOOL], format)
    assert content == rest if not all(c.valid for c in calls) or not calls else rest.startswith(content)
    assert reasoning.strip().startswith(shown[REASONING]) and content.startswith(shown[TEXT])
    assert {k: len(v) for k, v in shown.items()} == held.shown


@formats
@given(cut=st.integers(0, 200), text=st.sampled_from(["", "Look.\n"]))
def test_a_call_that_was_cut_off_is_never_made(format, cut, text):
    whole = text + format.write(CALLS)
    content, calls = tools.parse(whole[:cut], [TOOL], format)
    if cut >= len(whole):
        assert [(c.valid, json.loads(c.arguments)) for c in calls] == [(True, {"s": "</tool_call> {", "n": 5})]
        assert content == text.rstrip()
    elif any(c.valid for c in calls):
        # What is missing is the closing mark only.
        assert json.loads(calls[0].arguments) == {"s": "</tool_call> {", "n": 5} and content == text.rstrip()
    else:
        assert content == whole[:cut]


@formats
@given(
    wanted=st.lists(
        st.fixed_dictionaries({}, optional={"n": st.integers(), "s": st.text("a\n\"' {}<>=/é;,")}),
        min_size=1,
        max_size=3,
    ),
    before=st.sampled_from(["", "Look.", "{not a call}"]),
)
def test_calls_are_read_back_as_they_are_written(format, wanted, before):
    calls = [{"id": "1", "name": "x", "arguments": json.dumps(a)} for a in wanted]
    text = tools.with_calls({"content": before, "tool_calls": calls}, format)
    content, read = tools.parse(text, [TOOL], format)
    assert content == before and [c.valid for c in read] == [True] * len(wanted)
    assert [json.loads(c.arguments) for c in read] == wanted


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"n\\": \\"5\\"}"}', [{"n": 5}]),
        ("hermes", '<tool_call>\n{"name": "x", "arguments": {"n": 5}}}\n</tool_call>', None),
        ("hermes", '<tool_call>{"name": "x", "arguments": [5]}</tool_call>', None),
        ("qwen3_coder", "<function=x>\n<parameter=n>\n5\n</parameter>\n</function>", [{"n": 5}]),
        ("qwen3_coder", "<tool_call><function=x><parameter=s>a</parameter></function></tool_call>", [{"s": "a"}]),
        ("qwen3_coder", "<tool_call>\n<function=x>\n</function>\n</tool_call>", [{}]),
        ("qwen3_coder", "<tool_call>\n<function=x>\n<parameter=s>\nrm -rf /\n", None),
        ("qwen3_coder", '<tool_call>{"name": "x", "arguments": {}}</tool_call>', None),
        ("llama3_json", '<|python_tag|>{"name": "x", "parameters": {"n": "5"}}', [{"n": 5}]),
        ("llama3_json", 'Look:\n{"type": "function", "name": "x", "parameters": {"n": 5}}', [{"n": 5}]),
        (
            "llama3_json",
            '{"name": "x", "parameters": {}}\n{"name": "x", "parameters": {"n": 1}}\nDone.',
            [{}, {"n": 1}],
        ),
        ("llama3_json", '<|python_tag|>x.call(s="say "hi", please", n="5")', [{"s": 'say "hi", please', "n": 5}]),
        ("llama3_json", "<|python_tag|>import os", None),
        ("llama3_json", '{"name": "Ann", "age": 3}', []),
        ("llama3_json", 'The object {"name": "x", "parameters": {}} inside a line', []),
        ("mistral", '[TOOL_CALLS] [{"name": "x", "arguments": {"n": 5}, "id": "abcdefghi"}]', [{"n": 5}]),
        ("mistral", '[TOOL_CALLS]x[ARGS]{"n": 5}[TOOL_CALLS]x[CALL_ID]abcdefghi[ARGS]{}', [{"n": 5}, {}]),
        ("mistral", '[TOOL_CALLS]x{"n": 5}', [{"n": 5}]),
        ("mistral", '[TOOL_CALLS][{"name": "x", "argum', None),
    ],
)
def test_what_models_write(name, text, wanted):
    """`wanted` None: a call that cannot be read, so that all of it is text."""
    content, calls = tools.parse(text, [TOOL], BY_NAME[name])
    if wanted is None:
        assert content == text and calls and not any(c.valid for c in calls)
    else:
        assert [json.loads(c.arguments) for c in calls if c.valid] == wanted and len(calls) == len(wanted)
        assert all(c.id.endswith("_abcdefghi") for c in calls[-1:]) or "abcdefghi" not in text
        assert calls or content == text


def test_marks_of_calls_stay_in_the_text_and_ends_do_not(tokenizer):
    for family in (LLAMA31, MISTRAL3, QWEN35):
        own = family.tokenizer(tokenizer)
        format = BY_NAME[family.native]
        text = "Héllo " + "".join(format.marks)
        ids = own.encode(family.end + text + family.end, add_special_tokens=False)
        words = Detokenizer(own, (), hidden_tokens(own, format.marks))
        assert "".join(words.push([i]) for i in ids) + words.push([], last=True) == text
        assert set(own.convert_tokens_to_ids(list(format.marks))) & set(ids) or family is QWEN35


def test_white_space_is_not_cleaned_up(tokenizer):
    """Llama 3's tokenizers ask for it; in an argument it would change what runs."""
    own = copy.deepcopy(tokenizer)
    own.clean_up_tokenization_spaces = True
    text = "echo a . b , do n't ! x"
    words = Detokenizer(own)
    assert words.push(own(text, add_special_tokens=False)["input_ids"], last=True) == text


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
    content, calls = tools.parse(text, [{"function": {"name": "x", "parameters": {"properties": {"n": True}}}}], HERMES)
    assert content == text and [c.valid for c in calls] == [False]


def test_arguments_get_the_types_of_the_schema():
    schema = {"properties": {k: {"type": k} for k in ("integer", "number", "boolean", "array", "object", "string")}}
    given_ = {"integer": "5", "number": "0.5", "boolean": "true", "array": "[1]", "object": '{"a": 1}', "string": 7}
    assert tools.coerce(given_, schema) == {
        "integer": 5, "number": 0.5, "boolean": True, "array": [1], "object": {"a": 1}, "string": "7",
    }  # fmt: skip
    assert tools.coerce({"integer": "five", "number": True}, schema) == {"integer": "five", "number": True}
    assert tools.coerce({"number": "NaN", "boolean": "True"}, schema) == {"number": "NaN", "boolean": "True"}


def test_types_are_found_wherever_a_schema_says_them():
    schema = {
        "$defs": {"deep": {"type": ["integer", "null"]}},
        "properties": {
            "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "ref": {"$ref": "#/$defs/deep"},
            "enum": {"enum": [1, 2]},
            "text": {"type": ["string", "null"]},
            "flag": {"type": "boolean"},
            "loop": {"$ref": "#/properties/loop"},
        },
    }
    given_ = {"any": "5", "ref": "6", "enum": "1", "text": "7", "flag": "True", "loop": "8", "unknown": "9"}
    typed = {"any": 5, "ref": 6, "enum": 1, "text": "7", "flag": True, "loop": "8", "unknown": "9"}
    assert tools.coerce(given_, schema, typed=False) == typed
    assert tools.coerce({"any": "None", "text": "null"}, schema, typed=False) == {"any": None, "text": None}


def test_parallel_calls_are_read_in_order_and_unknown_tools_are_invalid():
    bash = [{"function": {"name": "bash"}}]
    one, other = (f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("bash", "rm"))
    content, calls = tools.parse(f"hi\n{one}\n{one}", bash, HERMES)
    assert content == "hi" and [c.valid for c in calls] == [True, True] and calls[0].id != calls[1].id
    content, calls = tools.parse(one + other, bash, HERMES)
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
