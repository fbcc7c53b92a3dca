"""Tests of request validation: any input yields a request or a short error without echo."""

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

PAYLOAD = "s3cr3t-payload"


def refusal(body: Any) -> errors.InvalidRequest:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_request(body)
    return caught.value


def outcome(parse: Callable[[Any], Any], given_value: Any) -> Any:
    """Return the parsed value or the InvalidRequest; any other exception fails the test."""
    try:
        return parse(given_value)
    except errors.InvalidRequest as error:
        return error


def check_refusal(error: errors.InvalidRequest) -> None:
    """Check that the error is short and contains neither the payload nor internal class names."""
    expected = json.dumps(error.payload())
    assert len(error.message) <= 300
    assert PAYLOAD not in expected
    assert not re.search(r"[~\[{]\w*(Model|Message|Param)\b|pydantic|validat|<class|Traceback", expected), expected
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


def field_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        found += [place for key, member in value.items() for place in field_paths(member, (*path, key))]
    elif isinstance(value, list):
        found += [place for index, member in enumerate(value) for place in field_paths(member, (*path, index))]
    return found


FIELD_PATHS = field_paths(VALID)


def corrupt(path_to_field: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(VALID)
    target: Any = body
    for step in path_to_field[:-1]:
        target = target[step]
    target[path_to_field[-1]] = value
    return body


payload_values = st.one_of(json_values, garbage).map(
    lambda value: (
        PAYLOAD + value
        if isinstance(value, str)
        else [value, PAYLOAD, {PAYLOAD: PAYLOAD}]
        if isinstance(value, list)
        else value
    )
) | st.sampled_from(
    [PAYLOAD, [PAYLOAD], {PAYLOAD: PAYLOAD}, {"type": PAYLOAD}, {"type": "message", "role": PAYLOAD}, PAYLOAD * 500]
)


def test_base_request_is_valid() -> None:
    assert isinstance(parse_request(VALID), CreateRequest)


@given(path_to_field=st.sampled_from(FIELD_PATHS), value=payload_values)
@example(("metadata",), {PAYLOAD * 10: "v"})
@example(("metadata",), {PAYLOAD: "v" * 600})
@example(("metadata",), {"k": {PAYLOAD: PAYLOAD}})
@example(("text", "format", "schema"), PAYLOAD)
@example(("input", 0, "content", 0, "type"), PAYLOAD)
@example(("input", 0, "content", 0, "type"), [PAYLOAD])
@example(("input", 2, "name"), PAYLOAD + " ")
@example(("tools", 0, "name"), PAYLOAD + "!")
@example(("tool_choice",), PAYLOAD)
@example(("include", 0), PAYLOAD)
@example(("include", 0), "\ud83d")
@example(("input", 0, "content", 0, "text"), "\ud83d")
@example(("metadata",), {"\ud83d": "v"})
@example(("model",), "\ud83d")
def test_corrupted_field_is_accepted_or_refused_without_echo(path_to_field: tuple[Any, ...], value: Any) -> None:
    result = outcome(parse_request, corrupt(path_to_field, value))
    if isinstance(result, errors.InvalidRequest):
        check_refusal(result)
        # The parameter may be the corrupted field, an enclosing object or a member, but no other field.
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path_to_field)[1:]
        assert result.param is not None
        assert result.param.startswith(path) or path.startswith(result.param)


@given(
    body=st.one_of(json_values, garbage, st.dictionaries(st.sampled_from([*CreateRequest.model_fields]), json_values))
)
def test_any_value_is_valid_or_invalid_request(body: Any) -> None:
    result = outcome(parse_request, body)
    if isinstance(result, errors.InvalidRequest):
        check_refusal(result)
    else:
        assert isinstance(result, CreateRequest)


@given(
    body=st.one_of(json_values, garbage, st.dictionaries(st.sampled_from([*CompactRequest.model_fields]), json_values))
)
def test_any_value_is_valid_or_invalid_compact_request(body: Any) -> None:
    result = outcome(parse_compact_request, body)
    if isinstance(result, errors.InvalidRequest):
        check_refusal(result)
    else:
        assert isinstance(result, CompactRequest)


@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        ({"input": "Hi"}, "model", "required"),
        ({"input": "Hi", "model": None}, "model", "required"),
        ({"model": 1}, "model", "string"),
        ({"model": "m", "input": 1}, "input", "list of items"),
        ({"model": "m", "input": [{"role": PAYLOAD}]}, "input[0]", "item"),
        ({"model": "m", "instructions": [PAYLOAD]}, "instructions", "string"),
        ({"model": "m", "previous_response_id": 1}, "previous_response_id", "string"),
        ({"model": "m", "prompt_cache_key": "k" * 65}, "prompt_cache_key", "64"),
        ([], None, "object"),
    ],
)
def test_compact_request_has_same_messages(body: Any, param: str | None, expected: str) -> None:
    error = outcome(parse_compact_request, body)
    check_refusal(error)
    assert error.param == param
    assert expected in error.message


def test_compact_request_accepts_same_input_and_ignores_unknown_fields() -> None:
    request = parse_compact_request(VALID | {"previous_response_id": None, "client_metadata": {}})
    assert request.input == parse_request(VALID).input
    assert request == parse_compact_request({"model": "m", "input": VALID["input"]})


@pytest.mark.parametrize(
    ("path_to_field", "value", "param"),
    [
        (("temperature",), 3, "temperature"),
        (("input",), [1], "input[0]"),
        (("input", 0, "role"), PAYLOAD, "input[0]"),
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
        (("metadata",), {PAYLOAD: 1}, "metadata"),
        (("metadata",), {1: "v"}, "metadata"),
        (("include", 0), "more", "include[0]"),
        (("stream_options", "include_obfuscation"), 1, "stream_options.include_obfuscation"),
    ],
)
def test_param_is_path_of_invalid_field(path_to_field: tuple[Any, ...], value: Any, param: str) -> None:
    error = refusal(corrupt(path_to_field, value))
    assert error.param == param
    assert error.message.startswith(f"'{param}' ")
    check_refusal(error)


@pytest.mark.parametrize(
    ("body", "expected"),
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
def test_message_lists_valid_values(body: Any, expected: str) -> None:
    assert expected in refusal(body).message


def test_body_other_than_object_has_no_param() -> None:
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
def test_invalid_json_is_refused_without_echo(body: bytes) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_json(body)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 200
    caught.value.message.encode()


@given(text=texts, cut=st.integers(0, 40))
def test_truncated_body_is_refused_without_echo(text: str, cut: int) -> None:
    body = json.dumps({"input": PAYLOAD + text})[: len(PAYLOAD) + 11 + cut].encode()
    result = outcome(parse_json, body)
    if isinstance(result, errors.InvalidRequest):
        assert PAYLOAD not in result.message
        assert len(result.message) < 200
    else:
        assert result == {"input": PAYLOAD + json.loads(json.dumps(text))}


@given(value=json_values)
def test_json_round_trips(value: Any) -> None:
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(body=st.binary(max_size=60))
def test_any_bytes_are_json_or_invalid_request(body: bytes) -> None:
    result = outcome(parse_json, body)
    if isinstance(result, errors.InvalidRequest):
        assert result.code == "invalid_json"
    else:
        assert json.loads(body) == result


def test_huge_numbers_are_accepted_or_refused() -> None:
    for body in (b'{"temperature": ' + b"9" * 10_000 + b"}", b'{"temperature": 1e999}', b'{"max_output_tokens": 1e5}'):
        with pytest.raises(errors.InvalidRequest) as caught:
            parse_request(parse_json(body))
        assert len(caught.value.message) < 200


def test_last_duplicate_key_applies() -> None:
    assert parse_request(parse_json(b'{"model": "a", "model": "b"}')).model == "b"
