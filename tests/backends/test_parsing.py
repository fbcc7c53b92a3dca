"""What a model wrote, cut anywhere: what is reasoning, what is a call, and what is text."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit.backends.parsing.formats import (
    BARE,
    DIALECTS,
    HERMES,
    LLAMA,
    MARKERS,
    MISTRAL,
    MISTRAL_ARGS,
    CallFormat,
)
from responses_kit.backends.parsing.parser import Reader
from responses_kit.outputs import Output, Reasoning, ToolArguments, ToolCall

from ..protocol.test_state_machine import new_machine

TOOLS = ("add", "get_weather", "get")
Pair = tuple[str, str]


def pairs(outputs: Iterable[Output]) -> list[Pair]:
    """Kinds and texts, neighbours of a kind joined; a call begins anew each time."""
    made: list[Pair] = []
    for output in outputs:
        if isinstance(output, ToolCall):
            made.append(("call", output.name))
            assert (output.arguments, output.call_id) == ("", None)
            continue
        assert isinstance(output, str | Reasoning | ToolArguments)
        kind, text = (
            ("text", output)
            if isinstance(output, str)
            else ("reasoning", output.text)
            if isinstance(output, Reasoning)
            else ("arguments", output.delta)
        )
        assert text
        if made and made[-1][0] == kind:
            text = made.pop()[1] + text
        made.append((kind, text))
    return made


def read(pieces: Iterable[str], dialect: CallFormat = HERMES, *, cut: bool = False, **settings: Any) -> list[Output]:
    reader = Reader(dialect, **{"tools": TOOLS} | settings)
    made = [output for piece in pieces for output in reader.feed(piece)]
    return made + reader.end(cut=cut)


def check(text: str, *expected: Pair, dialect: CallFormat = HERMES, cut: bool = False, **settings: Any) -> None:
    """The text gives these outputs, whole, in characters and in threes."""
    for size in (len(text) or 1, 1, 3):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert pairs(read(pieces, dialect, cut=cut, **settings)) == list(expected)


def call(name: str, arguments: str) -> tuple[Pair, ...]:
    return (("call", name), ("arguments", arguments)) if arguments else (("call", name),)


ADD = '{"name": "add", "arguments": {"a": 1}}'

# Reasoning.


@pytest.mark.parametrize("tag", ["think", "thinking", "reasoning"])
def test_what_stands_in_reasoning_tags_is_reasoning(tag: str):
    check(f"<{tag}>\nhm </b>\n</{tag}>\n\nYes.", ("reasoning", "hm </b>\n"), ("text", "Yes."))


def test_a_span_that_the_prompt_opened_is_reasoning():
    check("\nhm</think>\n\nYes.", ("reasoning", "hm"), ("text", "Yes."), thinking=True)


def test_a_model_may_write_the_opener_that_the_prompt_has_already():
    check("\n<think>\nhm</think>Yes.", ("reasoning", "hm"), ("text", "Yes."), thinking=True)


@pytest.mark.parametrize("cut", [False, True])
def test_a_span_that_is_never_closed_is_reasoning_to_its_last_character(cut: bool):
    check("<think>hm </thin", ("reasoning", "hm </thin"), cut=cut)
    check("hm <", ("reasoning", "hm <"), cut=cut, thinking=True)


def test_only_one_newline_after_the_opener_is_no_content():
    check("<think>\n\n  hm</think>", ("reasoning", "\n  hm"))
    check("<think>\r\nhm</think>", ("reasoning", "hm"))


def test_a_span_without_content_is_no_reasoning():
    check("<think>\n\n</think>\n\nYes.", ("text", "Yes."))
    check("\n</think>\nYes.", ("text", "Yes."), thinking=True)
    check("<think>\n\n")


def test_a_closer_that_nothing_opened_is_text_but_for_the_beginning():
    check("</think>\n\nYes </think>.", ("text", "Yes </think>."))


def test_an_opener_within_text_is_text():
    check("Write <think>so</think>", ("text", "Write <think>so</think>"))
    check("`<think>`", ("text", "`<think>`"))


def test_whitespace_before_reasoning_is_dropped():
    check(" \n<think>a</think> <think>b</think>c", ("reasoning", "ab"), ("text", "c"))


def test_a_model_may_think_again_after_a_call_but_not_after_text():
    tagged = f"<tool_call>{ADD}</tool_call>"
    check(
        f"<think>a</think>{tagged}\n<think>b</think>{tagged}c<think>d</think>",
        ("reasoning", "a"),
        *call("add", '{"a": 1}'),
        ("reasoning", "b"),
        *call("add", '{"a": 1}'),
        ("text", "c<think>d</think>"),
    )


def test_a_call_within_reasoning_is_reasoning():
    check(f"<think><tool_call>{ADD}", ("reasoning", f"<tool_call>{ADD}"))


# Calls.


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("count", [1, 3])
def test_every_dialect_is_read_back_as_it_is_written(dialect: CallFormat, count: int):
    names = list(itertools.islice(itertools.cycle(TOOLS), count))
    arguments = '{"q": "}]\\"</tool_call> é", "n": [1, {"x": null}]}'
    calls = dialect.between.join(dialect.head + name + dialect.middle + arguments + dialect.tail for name in names)
    expected = [pair for name in names for pair in call(name, arguments)]
    check(dialect.begin + calls + dialect.end, *expected, dialect=dialect)
    for other in DIALECTS:  # none of them can be taken for another
        check(f"\n{dialect.begin}{calls}{dialect.end}\n", *expected, dialect=other)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>',
        '<tool_call>\n\n{ "arguments" :\n{"a": 1} , "name" : "add" }\n',
        '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\u0031}"}</tool_call>',
        '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "x", "n": 1, "more": {"y": ["z"]}}</tool_call>',
        '{"name": "add", "arguments": {"a": 1}}',
        '[{"name": "add", "arguments": {"a": 1}}]',
        ' ```json\n{"name": "add", "arguments": {"a": 1}}\n```',
        '```\n[{"name": "add", "parameters": {"a": 1}}]\n```\n',
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
        '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]{"name": "add", "arguments": {"a": 1}}',
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        '[TOOL_CALLS]add{"a": 1}',
        '\n<think>\n\n</think>\n\n{"name": "add", "arguments": {"a": 1}}',
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_call_is_read_in_every_spelling_that_models_use(text: str, dialect: CallFormat):
    check(text, *call("add", '{"a": 1}'), dialect=dialect)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{ADD}</tool_call>\n\n<tool_call>{ADD}</tool_call>",
        f"<tool_call>{ADD}\n<tool_call>{ADD}",
        f"<tool_call>{ADD}\n{ADD}</tool_call>",
        f"<tool_call>[{ADD}, {ADD}]</tool_call>",
        f"{ADD}; {ADD}",
        f"{ADD}\n{ADD}",
        f"[{ADD},{ADD}]",
        f"{ADD}\n<tool_call>{ADD}",
        f'{ADD}[TOOL_CALLS]add[ARGS]{{"a": 1}}',
    ],
)
def test_an_answer_may_hold_several_calls(text: str):
    check(text, *call("add", '{"a": 1}') * 2)


def test_arguments_are_passed_on_as_they_come():
    reader = Reader(HERMES, tools=TOOLS)
    assert reader.feed('<tool_call>{"name": "add", "arguments": ') == []
    assert reader.feed('{"a') == [ToolCall("add"), ToolArguments('{"a')]
    assert reader.feed('": "\\') == [ToolArguments('": "')]
    assert reader.feed('"}') == [ToolArguments('\\"}')]
    assert reader.feed('"}}</tool') == [ToolArguments('"}')]
    assert reader.feed("_call>") == reader.end() == []


def test_arguments_before_the_name_wait_for_it():
    reader = Reader(HERMES, tools=TOOLS)
    assert reader.feed('<tool_call>{"arguments": {"a": 1}, "name": "get') == []
    assert reader.feed('"') == [ToolCall("get"), ToolArguments('{"a": 1}')]


def test_text_around_calls_is_text_without_the_whitespace_at_the_calls():
    check(
        f" Let me see.\n<tool_call>{ADD}</tool_call>\n\nSo\n",
        ("text", " Let me see.\n"),
        *call("add", '{"a": 1}'),
        ("text", "So\n"),
    )


def test_a_name_alone_makes_a_call_where_something_says_that_it_is_one():
    check('<tool_call>{"name": "get"}</tool_call>', ("call", "get"))
    check('[TOOL_CALLS] [{"name": "get", "arguments": null}]', ("call", "get"))
    check('{"name": "get"}', ("text", '{"name": "get"}'))
    check('{"name": "get"}', ("call", "get"), dialect=BARE)
    check('{"name": "get"}', ("call", "get"), dialect=LLAMA)


def test_the_longer_of_two_names_is_read_whole():
    check("[TOOL_CALLS]get_weather[ARGS]{}", *call("get_weather", "{}"), dialect=MISTRAL_ARGS)
    check('<tool_call>{"name": "get_weather", "arguments": {}}', *call("get_weather", "{}"))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("arguments", ["{", '{"a": "x', '{"a": "\\', '{"a": [{"b": 1}'])
def test_of_a_call_cut_in_its_arguments_there_is_what_was_written(arguments: str, cut: bool):
    check(f'<tool_call>{{"name": "add", "arguments": {arguments}', *call("add", arguments), cut=cut)
    check(f"[TOOL_CALLS]add[ARGS]{arguments}", *call("add", arguments), cut=cut)


@pytest.mark.parametrize(
    "rest", ["}", "}\n</tool_ca", "\n", "}</tool_call>", ', "id": "x', '}\n{"name": "a', '}, {"name": "add", "argum']
)
def test_of_an_answer_cut_behind_a_call_nothing_is_left_over(rest: str):
    check(f'<tool_call>{{"name": "add", "arguments": {{}}{rest}', *call("add", "{}"), cut=True)


@pytest.mark.parametrize("text", ["<tool_call>", '<tool_call>\n{"na', '[TOOL_CALLS] [{"name": "ad', "[TOOL_CALLS]ad"])
def test_a_call_cut_before_its_name_is_dropped_and_otherwise_text(text: str):
    check(f"So: {text}", ("text", "So: "), cut=True)
    check(f"So: {text}", ("text", f"So: {text}"))


def test_broken_arguments_end_at_the_closing_tag():
    check(
        f'<tool_call>{{"name": "add", "arguments": {{"a": [1}}</tool_call>\n<tool_call>{ADD}</tool_call>',
        *call("add", '{"a": [1}'),
        *call("add", '{"a": 1}'),
    )


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_calls_beyond_the_most_are_dropped_and_are_no_text(dialect: CallFormat, most: int):
    calls = dialect.between.join([dialect.head + "add" + dialect.middle + '{"a": 1}' + dialect.tail] * 3)
    text = dialect.begin + calls + dialect.end
    check(text, *call("add", '{"a": 1}') * most, dialect=dialect, max_calls=most)
    check(text + "So.", *call("add", '{"a": 1}') * most, ("text", "So."), dialect=dialect, max_calls=most)


# What is no call.


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "  a",
        "a < b [c] {d}",
        "<tool",
        "x<tool_call",
        "<tool_call></tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "unknown"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "\\x"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "',
        "<tool_call>[]",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]add[ARGS]",
        "[TOOL_CALLS]add[ARGS]1",
        "[TOOL_CALLS]" + "a" * 99,
        "<|python_tag|>print(1)",
        '{"name": 3}',
        ' {"name": "Ada", "arguments": {}}',
        '{"title": {"name": "add"}}',
        "[1, 2]",
        "[{}]",
        "{}",
        "```json\n{}\n```",
        "```python\nadd()\n```",
        f"I would write {ADD}",
        '{"type": "object"}',
        '{"function": {"function": {"name": "add", "arguments": {}}}}',
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_what_only_looks_like_a_call_is_text_to_the_last_character(text: str, dialect: CallFormat):
    check(text, *((("text", text),) if text else ()), dialect=dialect)


@pytest.mark.parametrize("text", [ADD, f"[{ADD}]", f"<tool_call>{ADD}</tool_call>", '[TOOL_CALLS]add[ARGS]{"a": 1}'])
def test_without_tools_nothing_is_a_call(text: str):
    check(text, ("text", text), tools=())


def test_a_call_behind_something_that_only_began_like_one_is_read():
    check(f"<tool_call><tool_call>{ADD}", ("text", "<tool_call>"), *call("add", '{"a": 1}'))
    check(f'{{"name": 3}}\n<tool_call>{ADD}', ("text", '{"name": 3}\n'), *call("add", '{"a": 1}'))


def test_an_unknown_tool_among_known_ones_is_text():
    check(
        f'[TOOL_CALLS] [{ADD}, {{"name": "rm", "arguments": {{}}}}]',
        *call("add", '{"a": 1}'),
        ("text", ', {"name": "rm", "arguments": {}}]'),
    )


# Streaming.


def test_text_goes_out_at_once_but_for_what_may_become_a_tag():
    reader = Reader(HERMES, tools=TOOLS)
    assert reader.feed("Hello") == ["Hello"]
    assert reader.feed(" \n\n") == [" \n\n"]
    assert reader.feed("a < b <tool") == ["a < b "]
    assert reader.feed("box> [") == ["<toolbox> "]
    assert reader.feed("0]") == ["[0]"]
    assert reader.feed("") == reader.end() == []


def test_json_goes_out_as_soon_as_it_is_surely_no_call():
    reader = Reader(LLAMA, tools=TOOLS)
    assert [reader.feed(piece) for piece in ("{", '"n', "u", 'mber": 1}')] == [[], [], ['{"nu'], ['mber": 1}']]


def test_a_reader_says_what_the_last_piece_was_a_part_of():
    reader = Reader(HERMES, tools=TOOLS)
    assert reader.reading == "text"
    seen = []
    for piece in ("<think>", "hm", "</think>", "\n", "So", "<tool_call>", '{"name": "add", ', '"arguments": {}}', "no"):
        reader.feed(piece)
        seen.append(reader.reading)
    assert seen == ["reasoning"] * 4 + ["text"] + ["call"] * 3 + ["text"]
    assert Reader(HERMES, thinking=True).reading == "reasoning"


SNIPPETS = [
    *sorted(MARKERS),
    ADD,
    "<tool_response>",
    "```json\n",
    "```",
    '{"name": "',
    '{"name": "get", "parameters": ',
    '{"arguments": {"a": "',
    '{"name": "add", "arguments": "{}"',
    '"add"',
    '"name": ',
    '"arguments": ',
    '"type": "function"',
    '"function": {',
    "add",
    "get_weather",
    *'{}[],;:"\\<> \n\r',
    "}}",
    "null",
    "1",
    "é😀\u2028",
    "\ud83d",
    "Hello",
]
answers = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=3), max_size=14).map("".join)


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "dialect": draw(st.sampled_from(DIALECTS)),
        "tools": draw(st.sampled_from([(), TOOLS])),
        "thinking": draw(st.booleans()),
        "max_calls": draw(st.sampled_from([None, 0, 1, 2])),
        "cut": draw(st.booleans()),
    }


def chopped(text: str, cuts: Sequence[int]) -> list[str]:
    marks = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(marks)]


@given(answers, settings(), st.lists(st.integers(0, 10_000), max_size=12))
def test_what_comes_out_does_not_depend_on_where_the_pieces_end(text: str, chosen: dict[str, Any], cuts: list[int]):
    whole = pairs(read([text], **chosen))
    assert pairs(read(chopped(text, cuts), **chosen)) == whole
    assert pairs(read(text, **chosen)) == whole


@given(answers, settings())
def test_nothing_is_made_up_and_the_order_is_kept(text: str, chosen: dict[str, Any]):
    at = 0
    for kind, part in pairs(read([text], **chosen)):
        if kind in ("text", "reasoning") or part in text[at:]:  # arguments in a JSON string are not there as they are
            for piece in part if kind in ("text", "reasoning") else [part]:
                at = text.index(piece, at)


@given(st.text(st.characters(exclude_characters="<["), max_size=40), settings())
def test_without_tools_and_tags_the_text_comes_out_as_it_went_in(text: str, chosen: dict[str, Any]):
    made = read(text, **chosen | {"tools": (), "thinking": False})
    assert "".join(map(str, made)) == text


@given(answers, settings(), st.booleans())
def test_every_answer_is_one_that_the_machine_takes(text: str, chosen: dict[str, Any], whole: bool):
    machine = new_machine()
    machine.start()
    for output in read([text] if whole else text, **chosen):
        machine.feed(output)
    machine.close(1_750_000_000.0)
    for item in machine.response["output"]:
        assert item["type"] != "function_call" or item["name"] in chosen["tools"]


@given(st.dictionaries(st.text(max_size=5), st.recursive(st.text(max_size=5) | st.integers(), st.lists), max_size=3))
def test_arguments_come_out_exactly_as_they_were_written(arguments: dict[str, Any]):
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=1)):
        for dialect in DIALECTS:
            answer = dialect.begin + dialect.head + "add" + dialect.middle + text + dialect.tail + dialect.end
            assert pairs(read(answer, dialect)) == [*call("add", text)]


def steps(pieces: Iterable[str]) -> int:
    """Lines of Python that run while the pieces are read."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read(pieces)
    finally:
        sys.settrace(before)
    return count


LONG = [
    ("", "<tool_call>"),
    ("", "<tool_call>{"),
    ("", '<tool_call>{"arguments":{'),
    ("", '<tool_call>{"arguments":"'),
    ("", "[TOOL_CALLS]"),
    ("", '[TOOL_CALLS]{"arguments":[{'),
    ("", "[TOOL_CALLS]a"),
    ("", "<"),
    ("", " "),
    ("", "\n<"),
    ("<think>", " "),
    ("<think>", "</thin"),
    ('{"arguments": {"', "a"),
    ('{"arguments": "', "\\"),
    ('{"arguments": {"a": ', "["),
    ("<tool_call>", " "),
    ('<tool_call>{"name": "add", "arguments": {"', "a<[{"),
    ('<tool_call>{"name": "add", "arguments": {}', ',"a":1'),
    (ADD, ADD),
    (ADD, ","),
    ("", '<tool_call>{"name":"add","arguments":{}}'),
]


@pytest.mark.parametrize(("head", "body"), LONG)
@pytest.mark.parametrize("size", [1, 10**9])
def test_twice_as_much_text_takes_twice_as_many_steps(head: str, body: str, size: int):
    counts = []
    for length in (2_000, 4_000):
        text = head + body * (length // len(body))
        counts.append(steps([text[at : at + size] for at in range(0, len(text), size)]))
    assert counts[1] <= 2.2 * counts[0] + 200


@pytest.mark.parametrize(("head", "body"), LONG)
def test_text_that_waits_is_not_copied_again_and_again(head: str, body: str):
    """Steps do not show how much text a step copies: the window does."""
    reader = Reader(HERMES, tools=TOOLS)
    source = reader._source
    copied = 0
    for piece in head + body * (4_000 // len(body)):
        reader.feed(piece)
        copied += len(source.window)
    assert copied < 30 * 4_000


def test_of_a_megabyte_of_text_no_more_than_a_piece_is_kept():
    reader = Reader(HERMES, tools=TOOLS)
    for _ in range(16):
        reader.feed("word <b> [1] " * 5_000)
        assert len(reader._source.window) <= 65_000
        assert not reader._source._kept


def test_of_a_megabyte_of_arguments_no_more_than_a_piece_is_kept():
    reader = Reader(HERMES, tools=TOOLS)
    reader.feed('<tool_call>{"name": "add", "arguments": {"a": "')
    for _ in range(16):
        assert reader.feed("word {b} [1] " * 5_000)
        assert len(reader._source.window) <= 65_000
        assert not reader._source._kept


def test_the_older_mistral_has_its_whole_list_in_one_place():
    check("[TOOL_CALLS][" + ADD + "]Done", *call("add", '{"a": 1}'), ("text", "Done"), dialect=MISTRAL)
