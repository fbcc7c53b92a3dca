"""The parser separates text, reasoning and calls, whatever the boundaries of the pieces."""

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
    BARE_JSON,
    CALL_FORMATS,
    HERMES,
    LLAMA3,
    MARKER_TOKENS,
    MISTRAL_ARGS,
    MISTRAL_LIST,
    CallFormat,
)
from responses_kit.backends.parsing.parser import Parser
from responses_kit.outputs import Output, Reasoning, ToolArguments, ToolCall

from ..protocol.test_state_machine import new_machine

TOOLS = ("add", "get_weather", "get")
Pair = tuple[str, str]


def pairs(outputs: Iterable[Output]) -> list[Pair]:
    """Return the outputs as pairs of kind and text; consecutive ones of a kind are joined, except for calls."""
    result: list[Pair] = []
    for output in outputs:
        if isinstance(output, ToolCall):
            result.append(("call", output.name))
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
        if result and result[-1][0] == kind:
            text = result.pop()[1] + text
        result.append((kind, text))
    return result


def parse(
    pieces: Iterable[str], call_format: CallFormat = HERMES, *, truncated: bool = False, **settings: Any
) -> list[Output]:
    parser = Parser(call_format, **{"tools": TOOLS} | settings)
    result = [output for piece in pieces for output in parser.feed(piece)]
    return result + parser.finish(truncated=truncated)


def check(
    text: str, *expected: Pair, call_format: CallFormat = HERMES, truncated: bool = False, **settings: Any
) -> None:
    """Assert that a text gives these outputs, in one piece, in single characters and in pieces of three."""
    for size in (len(text) or 1, 1, 3):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert pairs(parse(pieces, call_format, truncated=truncated, **settings)) == list(expected)


def call(name: str, arguments: str) -> tuple[Pair, ...]:
    return (("call", name), ("arguments", arguments)) if arguments else (("call", name),)


ADD = '{"name": "add", "arguments": {"a": 1}}'

# Reasoning.


@pytest.mark.parametrize("tag", ["think", "thinking", "reasoning"])
def test_tagged_text_is_reasoning(tag: str):
    check(f"<{tag}>\nhm </b>\n</{tag}>\n\nYes.", ("reasoning", "hm </b>\n"), ("text", "Yes."))


def test_span_opened_by_prompt_is_reasoning():
    check("\nhm</think>\n\nYes.", ("reasoning", "hm"), ("text", "Yes."), in_reasoning=True)


def test_repeated_opener_is_accepted():
    check("\n<think>\nhm</think>Yes.", ("reasoning", "hm"), ("text", "Yes."), in_reasoning=True)


@pytest.mark.parametrize("truncated", [False, True])
def test_unclosed_span_is_reasoning(truncated: bool):
    check("<think>hm </thin", ("reasoning", "hm </thin"), truncated=truncated)
    check("hm <", ("reasoning", "hm <"), truncated=truncated, in_reasoning=True)


def test_one_newline_after_opener_is_dropped():
    check("<think>\n\n  hm</think>", ("reasoning", "\n  hm"))
    check("<think>\r\nhm</think>", ("reasoning", "hm"))


def test_empty_span_is_dropped():
    check("<think>\n\n</think>\n\nYes.", ("text", "Yes."))
    check("\n</think>\nYes.", ("text", "Yes."), in_reasoning=True)
    check("<think>\n\n")


def test_stray_closer_is_text_except_at_start():
    check("</think>\n\nYes </think>.", ("text", "Yes </think>."))


def test_opener_within_text_is_text():
    check("Write <think>so</think>", ("text", "Write <think>so</think>"))
    check("`<think>`", ("text", "`<think>`"))


def test_whitespace_before_reasoning_is_dropped():
    check(" \n<think>a</think> <think>b</think>c", ("reasoning", "ab"), ("text", "c"))


def test_reasoning_may_follow_call_but_not_text():
    tagged = f"<tool_call>{ADD}</tool_call>"
    check(
        f"<think>a</think>{tagged}\n<think>b</think>{tagged}c<think>d</think>",
        ("reasoning", "a"),
        *call("add", '{"a": 1}'),
        ("reasoning", "b"),
        *call("add", '{"a": 1}'),
        ("text", "c<think>d</think>"),
    )


def test_call_within_reasoning_is_reasoning():
    check(f"<think><tool_call>{ADD}", ("reasoning", f"<tool_call>{ADD}"))


# Calls.


@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda call_format: call_format.name)
@pytest.mark.parametrize("count", [1, 3])
def test_every_call_format_round_trips(call_format: CallFormat, count: int):
    names = list(itertools.islice(itertools.cycle(TOOLS), count))
    arguments = '{"q": "}]\\"</tool_call> é", "n": [1, {"x": null}]}'
    calls = call_format.separator.join(
        call_format.before_name + name + call_format.before_arguments + arguments + call_format.after_arguments
        for name in names
    )
    expected = [pair for name in names for pair in call(name, arguments)]
    check(call_format.before_calls + calls + call_format.after_calls, *expected, call_format=call_format)
    for other in CALL_FORMATS:  # formats are not ambiguous
        check(f"\n{call_format.before_calls}{calls}{call_format.after_calls}\n", *expected, call_format=other)


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
@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda call_format: call_format.name)
def test_every_call_spelling_is_parsed(text: str, call_format: CallFormat):
    check(text, *call("add", '{"a": 1}'), call_format=call_format)


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
def test_several_calls_are_parsed(text: str):
    check(text, *call("add", '{"a": 1}') * 2)


def test_arguments_stream_as_they_arrive():
    parser = Parser(HERMES, tools=TOOLS)
    assert parser.feed('<tool_call>{"name": "add", "arguments": ') == []
    assert parser.feed('{"a') == [ToolCall("add"), ToolArguments('{"a')]
    assert parser.feed('": "\\') == [ToolArguments('": "')]
    assert parser.feed('"}') == [ToolArguments('\\"}')]
    assert parser.feed('"}}</tool') == [ToolArguments('"}')]
    assert parser.feed("_call>") == parser.finish() == []


def test_arguments_before_name_are_buffered():
    parser = Parser(HERMES, tools=TOOLS)
    assert parser.feed('<tool_call>{"arguments": {"a": 1}, "name": "get') == []
    assert parser.feed('"') == [ToolCall("get"), ToolArguments('{"a": 1}')]


def test_text_around_calls_is_trimmed():
    check(
        f" Let me see.\n<tool_call>{ADD}</tool_call>\n\nSo\n",
        ("text", " Let me see.\n"),
        *call("add", '{"a": 1}'),
        ("text", "So\n"),
    )


def test_name_alone_is_call_with_marker():
    check('<tool_call>{"name": "get"}</tool_call>', ("call", "get"))
    check('[TOOL_CALLS] [{"name": "get", "arguments": null}]', ("call", "get"))
    check('{"name": "get"}', ("text", '{"name": "get"}'))
    check('{"name": "get"}', ("call", "get"), call_format=BARE_JSON)
    check('{"name": "get"}', ("call", "get"), call_format=LLAMA3)


def test_longer_of_two_names_matches():
    check("[TOOL_CALLS]get_weather[ARGS]{}", *call("get_weather", "{}"), call_format=MISTRAL_ARGS)
    check('<tool_call>{"name": "get_weather", "arguments": {}}', *call("get_weather", "{}"))


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("arguments", ["{", '{"a": "x', '{"a": "\\', '{"a": [{"b": 1}'])
def test_call_truncated_in_arguments_is_partial(arguments: str, truncated: bool):
    check(f'<tool_call>{{"name": "add", "arguments": {arguments}', *call("add", arguments), truncated=truncated)
    check(f"[TOOL_CALLS]add[ARGS]{arguments}", *call("add", arguments), truncated=truncated)


@pytest.mark.parametrize(
    "rest", ["}", "}\n</tool_ca", "\n", "}</tool_call>", ', "id": "x', '}\n{"name": "a', '}, {"name": "add", "argum']
)
def test_answer_truncated_after_call_leaves_no_text(rest: str):
    check(f'<tool_call>{{"name": "add", "arguments": {{}}{rest}', *call("add", "{}"), truncated=True)


@pytest.mark.parametrize("text", ["<tool_call>", '<tool_call>\n{"na', '[TOOL_CALLS] [{"name": "ad', "[TOOL_CALLS]ad"])
def test_call_truncated_before_name_is_dropped(text: str):
    check(f"So: {text}", ("text", "So: "), truncated=True)
    check(f"So: {text}", ("text", f"So: {text}"))


def test_broken_arguments_end_at_closing_tag():
    check(
        f'<tool_call>{{"name": "add", "arguments": {{"a": [1}}</tool_call>\n<tool_call>{ADD}</tool_call>',
        *call("add", '{"a": [1}'),
        *call("add", '{"a": 1}'),
    )


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda call_format: call_format.name)
def test_calls_beyond_limit_are_dropped(call_format: CallFormat, limit: int):
    calls = call_format.separator.join(
        [call_format.before_name + "add" + call_format.before_arguments + '{"a": 1}' + call_format.after_arguments] * 3
    )
    text = call_format.before_calls + calls + call_format.after_calls
    check(text, *call("add", '{"a": 1}') * limit, call_format=call_format, max_calls=limit)
    check(text + "So.", *call("add", '{"a": 1}') * limit, ("text", "So."), call_format=call_format, max_calls=limit)


# Text that is not a call.


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
@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda call_format: call_format.name)
def test_text_resembling_call_is_text(text: str, call_format: CallFormat):
    check(text, *((("text", text),) if text else ()), call_format=call_format)


@pytest.mark.parametrize("text", [ADD, f"[{ADD}]", f"<tool_call>{ADD}</tool_call>", '[TOOL_CALLS]add[ARGS]{"a": 1}'])
def test_without_tools_calls_are_text(text: str):
    check(text, ("text", text), tools=())


def test_call_after_false_start_is_parsed():
    check(f"<tool_call><tool_call>{ADD}", ("text", "<tool_call>"), *call("add", '{"a": 1}'))
    check(f'{{"name": 3}}\n<tool_call>{ADD}', ("text", '{"name": 3}\n'), *call("add", '{"a": 1}'))


def test_unknown_tool_is_text():
    check(
        f'[TOOL_CALLS] [{ADD}, {{"name": "rm", "arguments": {{}}}}]',
        *call("add", '{"a": 1}'),
        ("text", ', {"name": "rm", "arguments": {}}]'),
    )


# Streaming.


def test_text_is_emitted_except_possible_tags():
    parser = Parser(HERMES, tools=TOOLS)
    assert parser.feed("Hello") == ["Hello"]
    assert parser.feed(" \n\n") == [" \n\n"]
    assert parser.feed("a < b <tool") == ["a < b "]
    assert parser.feed("box> [") == ["<toolbox> "]
    assert parser.feed("0]") == ["[0]"]
    assert parser.feed("") == parser.finish() == []


def test_json_is_emitted_once_it_cannot_be_call():
    parser = Parser(LLAMA3, tools=TOOLS)
    assert [parser.feed(piece) for piece in ("{", '"n', "u", 'mber": 1}')] == [[], [], ['{"nu'], ['mber": 1}']]


def test_parser_reports_kind_of_last_chunk():
    parser = Parser(HERMES, tools=TOOLS)
    assert parser.state == "text"
    seen = []
    for piece in ("<think>", "hm", "</think>", "\n", "So", "<tool_call>", '{"name": "add", ', '"arguments": {}}', "no"):
        parser.feed(piece)
        seen.append(parser.state)
    assert seen == ["reasoning"] * 4 + ["text"] + ["call"] * 3 + ["text"]
    assert Parser(HERMES, in_reasoning=True).state == "reasoning"


SNIPPETS = [
    *sorted(MARKER_TOKENS),
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
def parser_arguments(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "call_format": draw(st.sampled_from(CALL_FORMATS)),
        "tools": draw(st.sampled_from([(), TOOLS])),
        "in_reasoning": draw(st.booleans()),
        "max_calls": draw(st.sampled_from([None, 0, 1, 2])),
        "truncated": draw(st.booleans()),
    }


def split_at(text: str, cuts: Sequence[int]) -> list[str]:
    marks = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(marks)]


@given(answers, parser_arguments(), st.lists(st.integers(0, 10_000), max_size=12))
def test_output_is_independent_of_chunking(text: str, arguments: dict[str, Any], cuts: list[int]):
    whole = pairs(parse([text], **arguments))
    assert pairs(parse(split_at(text, cuts), **arguments)) == whole
    assert pairs(parse(text, **arguments)) == whole


@given(answers, parser_arguments())
def test_output_preserves_content_and_order(text: str, arguments: dict[str, Any]):
    at = 0
    for kind, part in pairs(parse([text], **arguments)):
        if kind in ("text", "reasoning") or part in text[at:]:  # arguments in a JSON string are escaped in the text
            for piece in part if kind in ("text", "reasoning") else [part]:
                at = text.index(piece, at)


@given(st.text(st.characters(exclude_characters="<["), max_size=40), parser_arguments())
def test_plain_text_is_unchanged(text: str, arguments: dict[str, Any]):
    result = parse(text, **arguments | {"tools": (), "in_reasoning": False})
    assert "".join(map(str, result)) == text


@given(answers, parser_arguments(), st.booleans())
def test_output_is_legal_for_state_machine(text: str, arguments: dict[str, Any], whole: bool):
    machine = new_machine()
    machine.start()
    for output in parse([text] if whole else text, **arguments):
        machine.feed(output)
    machine.close(1_750_000_000.0)
    for item in machine.response["output"]:
        assert item["type"] != "function_call" or item["name"] in arguments["tools"]


@given(st.dictionaries(st.text(max_size=5), st.recursive(st.text(max_size=5) | st.integers(), st.lists), max_size=3))
def test_arguments_are_unchanged(arguments: dict[str, Any]):
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=1)):
        for call_format in CALL_FORMATS:
            answer = (
                call_format.before_calls
                + call_format.before_name
                + "add"
                + call_format.before_arguments
                + text
                + call_format.after_arguments
                + call_format.after_calls
            )
            assert pairs(parse(answer, call_format)) == [*call("add", text)]


def count_steps(pieces: Iterable[str]) -> int:
    """Return the number of lines of Python that run while the pieces are parsed."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        parse(pieces)
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
def test_parsing_is_linear(head: str, body: str, size: int):
    counts = []
    for length in (2_000, 4_000):
        text = head + body * (length // len(body))
        counts.append(count_steps([text[start : start + size] for start in range(0, len(text), size)]))
    assert counts[1] <= 2.2 * counts[0] + 200


@pytest.mark.parametrize(("head", "body"), LONG)
def test_buffered_text_is_not_copied_repeatedly(head: str, body: str):
    """The steps do not include the length of copies, but the buffer shows it."""
    parser = Parser(HERMES, tools=TOOLS)
    scanner = parser._scanner
    copied = 0
    for piece in head + body * (4_000 // len(body)):
        parser.feed(piece)
        copied += len(scanner.buffer)
    assert copied < 30 * 4_000


def test_parser_buffers_little_of_long_text():
    parser = Parser(HERMES, tools=TOOLS)
    for _ in range(16):
        parser.feed("word <b> [1] " * 5_000)
        assert len(parser._scanner.buffer) <= 65_000
        assert not parser._scanner._saved


def test_parser_buffers_little_of_long_arguments():
    parser = Parser(HERMES, tools=TOOLS)
    parser.feed('<tool_call>{"name": "add", "arguments": {"a": "')
    for _ in range(16):
        assert parser.feed("word {b} [1] " * 5_000)
        assert len(parser._scanner.buffer) <= 65_000
        assert not parser._scanner._saved


def test_old_mistral_format_has_single_list():
    check("[TOOL_CALLS][" + ADD + "]Done", *call("add", '{"a": 1}'), ("text", "Done"), call_format=MISTRAL_LIST)
