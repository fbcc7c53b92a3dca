"""From bytes to a request: whatever comes in, what goes out is a request or a short error that repeats nothing."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from responses_kit import errors
from responses_kit.protocol.validation import parse_compact_request, parse_json, parse_request
from responses_kit.schema.request import CompactRequest, CreateRequest

from ..support.strategies import garbage, json_values, texts

MARK = "s3cr3t-payload"


def refusal(body: Any) -> errors.InvalidRequest:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_request(body)
    return caught.value


def outcome(judge: Callable[[Any], Any], given_value: Any) -> Any:
    """What it is taken for, or the error that refuses it; any other exception is a failure."""
    try:
        return judge(given_value)
    except errors.InvalidRequest as error:
        return error


def check_refusal(error: errors.InvalidRequest) -> None:
    """Short, silent about the payload, and free of our own class names."""
    told = json.dumps(error.payload())
    assert len(error.message) <= 300
    assert MARK not in told
    assert not re.search(r"[~\[{]\w*(Model|Message|Param)\b|pydantic|validat|<class|Traceback", told), told
    assert error.status == 400
    assert error.param is None or len(error.param) <= 200


VALID: dict[str, Any] = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "item_reference", "id": "msg_1"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"k": "v"},
    "include": ["message.output_text.logprobs"],
    "temperature": 1,
    "max_output_tokens": 100,
    "stream_options": {"include_obfuscation": False},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        found += [place for key, member in value.items() for place in places(member, (*path, key))]
    elif isinstance(value, list):
        found += [place for index, member in enumerate(value) for place in places(member, (*path, index))]
    return found


PLACES = places(VALID)


def spoil(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(VALID)
    target: Any = body
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    return body


marked = st.one_of(json_values, garbage).map(
    lambda value: (
        MARK + value if isinstance(value, str) else [value, MARK, {MARK: MARK}] if isinstance(value, list) else value
    )
) | st.sampled_from([MARK, [MARK], {MARK: MARK}, {"type": MARK}, {"type": "message", "role": MARK}, MARK * 500])


def test_the_request_to_be_spoiled_is_valid() -> None:
    assert isinstance(parse_request(VALID), CreateRequest)


@given(place=st.sampled_from(PLACES), value=marked)
@example(("metadata",), {MARK * 10: "v"})
@example(("metadata",), {MARK: "v" * 600})
@example(("metadata",), {"k": {MARK: MARK}})
@example(("text", "format", "schema"), MARK)
@example(("input", 0, "content", 0, "type"), MARK)
@example(("input", 0, "content", 0, "type"), [MARK])
@example(("input", 2, "name"), MARK + " ")
@example(("tools", 0, "name"), MARK + "!")
@example(("tool_choice",), MARK)
@example(("include", 0), MARK)
@example(("include", 0), "\ud83d")
@example(("input", 0, "content", 0, "text"), "\ud83d")
@example(("metadata",), {"\ud83d": "v"})
@example(("model",), "\ud83d")
def test_one_spoiled_place_is_accepted_or_refused_in_few_words_that_repeat_nothing(
    place: tuple[Any, ...], value: Any
) -> None:
    result = outcome(parse_request, spoil(place, value))
    if isinstance(result, errors.InvalidRequest):
        check_refusal(result)
        # It may complain of the object around the place, or of something in it, but of nothing elsewhere.
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)[1:]
        assert result.param is not None
        assert result.param.startswith(path) or path.startswith(result.param)


@given(
    body=st.one_of(json_values, garbage, st.dictionaries(st.sampled_from([*CreateRequest.model_fields]), json_values))
)
def test_anything_at_all_is_a_request_or_an_invalid_one(body: Any) -> None:
    result = outcome(parse_request, body)
    if isinstance(result, errors.InvalidRequest):
        check_refusal(result)
    else:
        assert isinstance(result, CreateRequest)


@given(
    body=st.one_of(json_values, garbage, st.dictionaries(st.sampled_from([*CompactRequest.model_fields]), json_values))
)
def test_anything_at_all_is_a_request_for_a_compaction_or_an_invalid_one(body: Any) -> None:
    result = outcome(parse_compact_request, body)
    if isinstance(result, errors.InvalidRequest):
        check_refusal(result)
    else:
        assert isinstance(result, CompactRequest)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": "Hi"}, "model", "required"),
        ({"input": "Hi", "model": None}, "model", "required"),
        ({"model": 1}, "model", "string"),
        ({"model": "m", "input": 1}, "input", "list of items"),
        ({"model": "m", "input": [{"role": MARK}]}, "input[0]", "item"),
        ({"model": "m", "instructions": [MARK]}, "instructions", "string"),
        ({"model": "m", "previous_response_id": 1}, "previous_response_id", "string"),
        ({"model": "m", "prompt_cache_key": "k" * 65}, "prompt_cache_key", "64"),
        ([], None, "object"),
    ],
)
def test_a_request_for_a_compaction_is_refused_in_the_same_words(body: Any, param: str | None, told: str) -> None:
    error = outcome(parse_compact_request, body)
    check_refusal(error)
    assert error.param == param
    assert told in error.message


def test_a_request_for_a_compaction_takes_the_same_input_and_ignores_what_it_does_not_know() -> None:
    request = parse_compact_request(VALID | {"previous_response_id": None, "client_metadata": {}})
    assert request.input == parse_request(VALID).input
    assert request == parse_compact_request({"model": "m", "input": VALID["input"]})


@pytest.mark.parametrize(
    ("place", "value", "param"),
    [
        (("temperature",), 3, "temperature"),
        (("input",), [1], "input[0]"),
        (("input", 0, "role"), MARK, "input[0]"),
        (("input", 0, "content"), [{"type": "input_text"}], "input[0].content[0].text"),
        (("input", 1, "content", 0, "text"), 1, "input[1].content[0].text"),
        (("input", 2, "call_id"), "", "input[2].call_id"),
        (("input", 3, "output"), [{"type": "input_text", "text": 1}], "input[3].output[0].text"),
        (("input", 3, "output"), 1, "input[3].output"),
        (("input", 4, "summary", 0, "text"), None, "input[4].summary[0].text"),
        (("input", 6, "id"), "", "input[6].id"),
        (("tools", 0, "name"), "a b", "tools[0].name"),
        (("tools", 0, "parameters"), [], "tools[0].parameters"),
        (("tool_choice", "tools"), [], "tool_choice.tools"),
        (("tool_choice", "tools", 0, "name"), "", "tool_choice.tools[0].name"),
        (("tool_choice",), "sometimes", "tool_choice"),
        (("text", "format", "schema"), 1, "text.format.schema"),
        (("text", "format", "type"), "yaml", "text.format"),
        (("text", "verbosity"), "loud", "text.verbosity"),
        (("reasoning", "effort"), "vast", "reasoning.effort"),
        (("metadata",), {MARK: 1}, "metadata"),
        (("metadata",), {1: "v"}, "metadata"),
        (("include", 0), "more", "include[0]"),
        (("stream_options", "include_obfuscation"), 1, "stream_options.include_obfuscation"),
    ],
)
def test_param_is_the_path_of_the_field_at_fault(place: tuple[Any, ...], value: Any, param: str) -> None:
    error = refusal(spoil(place, value))
    assert error.param == param
    assert error.message.startswith(param)
    check_refusal(error)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"temperature": 3}, "2"),
        ({"temperature": "hot"}, "number"),
        ({"max_output_tokens": 5}, "16"),
        ({"metadata": {"k": "v" * 513}}, "512"),
        ({"stream": "yes"}, "true or false"),
        ({"input": [{"role": "user"}]}, "required"),
        ({"tool_choice": "always"}, "'auto'"),
        ({"tools": [{"name": "f"}]}, "required"),
        ([], "object"),
        (None, "object"),
        ("Hi", "object"),
    ],
)
def test_a_refusal_says_what_would_be_right(body: Any, told: str) -> None:
    assert told in refusal(body).message


def test_a_body_that_is_no_object_has_no_param() -> None:
    assert refusal([1, 2]).param is None


# JSON.


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"a": }',
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": 1} {"b": 2}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud83d"}',
        b'{"a": "\\ude00"}',
        b'{"\\ud83d": 1}',
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\xbd"}',
        b'{"a": "\n"}',
        b"\xef\xbb\xbf[",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        '{"a": 1}'.encode("utf-16"),
        b"\x00",
    ],
)
def test_what_is_no_json_is_refused_and_not_repeated(body: bytes) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_json(body)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 200
    caught.value.message.encode()


@given(text=texts, cut=st.integers(0, 40))
def test_a_torn_body_is_refused_without_a_word_of_it(text: str, cut: int) -> None:
    body = json.dumps({"input": MARK + text})[: len(MARK) + 11 + cut].encode()
    result = outcome(parse_json, body)
    if isinstance(result, errors.InvalidRequest):
        assert MARK not in result.message
        assert len(result.message) < 200
    else:
        assert result == {"input": MARK + json.loads(json.dumps(text))}


@given(value=json_values)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(body=st.binary(max_size=60))
def test_any_bytes_are_json_or_an_invalid_request(body: bytes) -> None:
    result = outcome(parse_json, body)
    if isinstance(result, errors.InvalidRequest):
        assert result.code == "invalid_json"
    else:
        assert json.loads(body) == result


def test_numbers_without_measure_do_no_harm() -> None:
    for body in (b'{"temperature": ' + b"9" * 10_000 + b"}", b'{"temperature": 1e999}', b'{"max_output_tokens": 1e5}'):
        with pytest.raises(errors.InvalidRequest) as caught:
            parse_request(parse_json(body))
        assert len(caught.value.message) < 200


def test_when_a_key_comes_twice_the_last_one_counts() -> None:
    assert parse_request(parse_json(b'{"model": "a", "model": "b"}')).model == "b"
