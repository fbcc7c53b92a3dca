"""Tests of JSON and server-sent events as bytes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from responses_kit import errors, outputs
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.sse import _DELTA_ENCODERS, DONE, KEEP_ALIVE, SSE_HEADERS, encode_json, encode_sse
from responses_kit.protocol.state_machine import Event, StateMachine

from ..support.strategies import any_outputs, json_values, logprobs, texts
from .test_state_machine import fresh_response

FRAME = re.compile(rb"event: ([!-~]+)\ndata: ([ -\x7f]+)\n\n")
"""An event: two lines of printable ASCII and a blank line."""


def delta_event(kind: str, text: str, **more: Any) -> Event:
    event: Event = {"type": kind, "sequence_number": 7, "item_id": "msg_" + "0" * 32, "output_index": 3}
    if "summary" in kind:
        event["summary_index"] = 2
    elif "arguments" not in kind:
        event["content_index"] = 2
    event["delta"] = text
    if kind == "response.output_text.delta":
        event["logprobs"] = []
    return event | more


def read_frames(stream: bytes) -> list[tuple[str, str]]:
    """Return the events as a client parses them (HTML standard): lines end at LF, CR or CRLF."""
    events, kind, data = [], "", []
    for line in re.split(r"\r\n|\n|\r", stream.decode("utf-8-sig")):
        if not line:
            if data:
                events.append((kind, "\n".join(data)))
            kind, data = "", []
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                kind = value
            elif name == "data":
                data.append(value)
    return events


def test_every_delta_type_has_fast_encoder() -> None:
    assert {kind.removeprefix("response.") for kind in _DELTA_ENCODERS} == {
        "output_text.delta",
        "refusal.delta",
        "reasoning.delta",
        "reasoning_summary_text.delta",
        "function_call_arguments.delta",
    }


@pytest.mark.parametrize("kind", _DELTA_ENCODERS)
@given(text=texts)
@example("\u2028\u2029\x85\r\n\n\r\x00\x0b\x0c\x1c\x1d\x1e\x7f\ufeff")
@example("data: [DONE]\n\nevent: error\ndata: {}\n\n")
@example("".join(map(chr, range(0x800))))
def test_fast_encoding_equals_plain_encoding(kind: str, text: str) -> None:
    event = delta_event(kind, text)
    match = FRAME.fullmatch(encode_sse(event))
    assert match
    assert match[1].decode() == kind
    assert json.loads(match[2]) == json.loads(json.dumps(event))
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    generic = encode_json(delta_event(kind, clean))
    quick = FRAME.fullmatch(encode_sse(delta_event(kind, clean)))
    assert quick
    assert json.loads(generic) == json.loads(quick[2])
    assert list(json.loads(generic)) == list(json.loads(quick[2])), "members come in the same order"


@given(text=texts, entries=logprobs)
def test_delta_with_logprobs_keeps_numbers(text: str, entries: list[outputs.LogProb]) -> None:
    machine = StateMachine(fresh_response(), new_id=new_id)
    machine.start()
    for event in machine.feed(outputs.Text(text, entries)):
        match = FRAME.fullmatch(encode_sse(event))
        assert match
        assert json.loads(match[2], parse_constant=pytest.fail) == event


@given(script=st.lists(any_outputs, max_size=8))
def test_stream_decodes_to_its_events(script: list[Any]) -> None:
    machine = StateMachine(fresh_response(), new_id=new_id, stream_reasoning=True, stream_extensions=True)
    events = machine.start()
    for output in script:
        try:
            events += machine.feed(output)
        except errors.IllegalOutput:
            continue
    events += [*machine.close(1), *machine.end()]
    stream = KEEP_ALIVE.join(map(encode_sse, events)) + DONE
    stream.decode("ascii")
    assert b"\r" not in stream
    *read, last = read_frames(stream)
    assert last == ("", "[DONE]")
    assert [json.loads(data, parse_constant=pytest.fail) for _, data in read] == events
    assert [kind for kind, _ in read] == [event["type"] for event in events]


@given(value=json_values)
def test_any_json_value_is_encoded_as_one_ascii_line(value: Any) -> None:
    data = encode_json(value)
    assert re.fullmatch(rb"[ -\x7f]*", data)
    assert json.loads(data) == value


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_become_null(number: float) -> None:
    assert encode_json({"x": [number]}) == b'{"x":[null]}'


def test_done_and_comment_are_complete_blocks() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert KEEP_ALIVE.startswith(b":")
    assert read_frames(KEEP_ALIVE + DONE) == [("", "[DONE]")]


def test_headers_prevent_caching_and_buffering() -> None:
    headers = {name.lower(): value for name, value in SSE_HEADERS.items()}
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers
