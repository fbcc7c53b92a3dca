"""The conformance checks accept legal streams and reject every kind of illegal one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from responses_kit import outputs
from responses_kit.errors import ModelError
from responses_kit.protocol.state_machine import StateMachine
from tests.support import conformance

RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "completed_at": None,
    "status": "in_progress",
    "incomplete_details": None,
    "model": "m",
    "previous_response_id": None,
    "instructions": None,
    "output": [],
    "error": None,
    "tools": [{"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}],
    "tool_choice": "auto",
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "temperature": 1.0,
    "reasoning": None,
    "usage": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "store": True,
    "background": False,
    "service_tier": "default",
    "metadata": {},
    "safety_identifier": None,
    "prompt_cache_key": None,
}

PLAYED = [
    outputs.ReasoningSummary("first"),
    outputs.ReasoningSummary("second", new_part=True),
    outputs.Reasoning("raw"),
    "some ",
    outputs.Text("text", [outputs.LogProb("text", -1.0, [116])]),
    outputs.Annotation("https://example.org", "Example", 0, 4),
    outputs.Refusal("no"),
    outputs.ToolCall("f", '{"a": ', "call_a"),
    outputs.ToolCall("f", "{", "call_b"),
    outputs.ToolArguments("1}", "call_a"),
    outputs.ToolArguments("}", "call_b"),
    outputs.Item("acme:thing", {"a": [1, None]}),
    outputs.Item("acme:slow", {"b": 1}, "in_progress", "slow"),
    outputs.Item("acme:quick", {}, "in_progress", "quick"),
    outputs.Item("acme:quick", {"c": 2}, "failed", "quick"),
    outputs.Item("acme:slow", {"b": 2}, "completed", "slow"),
    outputs.Event("acme:trace", {"b": 1}),
    outputs.Message("final_answer"),
    "the end",
    outputs.Usage(3, 2),
]


def legal(ending: str = "completed") -> list[dict[str, Any]]:
    """Return a legal stream with every kind of event."""
    count = itertools.count()
    machine = StateMachine(
        copy.deepcopy(RESPONSE),
        new_id=lambda prefix: f"{prefix}_{next(count)}",
        stream_reasoning=True,
        stream_extensions=True,
    )
    events = machine.start()
    for output in PLAYED:
        events += machine.feed(output)
    if ending == "failed":
        events += machine.fail(ModelError("It broke."))
    else:
        if ending == "incomplete":
            machine.feed(outputs.Finish("max_output_tokens"))
        events += machine.close(2.0) + machine.end()
    return copy.deepcopy(events)


ENDINGS = ["completed", "incomplete", "failed"]
STREAMS = {ending: legal(ending) for ending in ENDINGS}


@pytest.mark.parametrize("ending", ENDINGS)
def test_legal_stream_passes_and_replays_to_final_object(ending: str) -> None:
    events = STREAMS[ending]
    assert conformance.check_stream(events) == events[-1]["response"] == conformance.replay(events)


def renumbered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events renumbered, so that no check fails because of sequence numbers alone."""
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def refused(events: list[dict[str, Any]]) -> bool:
    try:
        conformance.check_stream(events)
    except AssertionError:
        return True
    return False


def disordered(events: list[dict[str, Any]]) -> bool:
    """Return whether the order of the events alone makes the stream illegal."""
    try:
        return conformance.replay(events) != events[-1]["response"]
    except AssertionError:
        return True


@pytest.mark.parametrize("ending", ENDINGS)
def test_stream_with_missing_event_is_refused(ending: str) -> None:
    events = STREAMS[ending]
    for place, event in enumerate(events):
        without = events[:place] + events[place + 1 :]
        assert disordered(without), f"passes without {event['type']} at {place}"
        # Extension events are optional.
        assert event["type"] == "acme:trace" or disordered(renumbered(without)), (
            f"passes without {event['type']} at {place}"
        )


@pytest.mark.parametrize("ending", ENDINGS)
def test_stream_with_repeated_event_is_refused(ending: str) -> None:
    events = STREAMS[ending]
    for place, event in enumerate(events):
        assert event["type"] == "acme:trace" or disordered(renumbered([*events[: place + 1], *events[place:]])), event[
            "type"
        ]


@pytest.mark.parametrize("ending", ENDINGS)
def test_stream_with_swapped_events_is_refused(ending: str) -> None:
    events = STREAMS[ending]
    for place in range(len(events) - 1):
        first, second = events[place], events[place + 1]
        if "acme:trace" in (first["type"], second["type"]):
            continue
        whole = "item" in first and "item" in second
        if first.get("output_index") != second.get("output_index") and not whole:
            continue  # events of parallel calls may interleave
        extensions = whole and all(":" in event["item"]["type"] for event in (first, second))
        if extensions and first["type"] != second["type"] and first["output_index"] != second["output_index"]:
            continue  # parallel calls may start before or after another call finishes
        if "annotation.added" in second["type"] or "annotation.added" in first["type"]:
            continue  # an annotation may come at any place among the text deltas
        swapped = renumbered([*events[:place], second, first, *events[place + 2 :]])
        assert disordered(swapped), f"passes with {second['type']} before {first['type']}"


def test_truncated_stream_is_refused() -> None:
    events = STREAMS["completed"]
    assert all(disordered(events[:length]) for length in range(len(events)))


def change(kind: str, path: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Set a member of the first event of a type, or remove it if the value is `...`."""

    def apply(events: list[dict[str, Any]]) -> None:
        *steps, last = path.split(".")
        target: Any = next(event for event in events if event["type"] == kind)
        for step in steps:
            target = target[int(step) if step.isdigit() else step]
        key = int(last) if last.isdigit() else last
        if value is ...:
            del target[key]
        else:
            target[key] = value

    return apply


CHANGES = [
    change("response.created", "type", "response.begun"),
    change("response.created", "sequence_number", "0"),
    change("response.created", "response.status", "completed"),
    change("response.created", "response.tools.0.description", ...),
    change("response.created", "response.text.verbosity", None),
    change("response.created", "response.temperature", "1.0"),
    change("response.created", "response.output", None),
    change("response.in_progress", "response.id", "resp_2"),
    change("response.output_item.added", "item.id", ""),
    change("response.output_item.added", "item.status", "completed"),
    change("response.output_item.added", "output_index", 1),
    change("response.output_item.added", "item.type", "thought"),
    change("response.content_part.added", "content_index", 1),
    change("response.content_part.added", "part.text", "early"),
    change("response.content_part.added", "item_id", "rs_other"),
    change("response.output_text.delta", "delta", "other"),
    change("response.output_text.delta", "logprobs", None),
    change("response.output_text.delta", "content_index", 9),
    change("response.output_text.done", "text", "other"),
    change("response.output_text.done", "logprobs", []),
    change("response.output_text.annotation.added", "annotation_index", 1),
    change("response.output_text.annotation.added", "annotation.title", ...),
    change("response.content_part.done", "part.text", "other"),
    change("response.reasoning_summary_part.added", "summary_index", 1),
    change("response.reasoning_summary_text.delta", "delta", "other"),
    change("response.reasoning.delta", "delta", "other"),
    change("response.refusal.delta", "delta", "other"),
    change("response.function_call_arguments.delta", "delta", "other"),
    change("response.function_call_arguments.done", "arguments", "other"),
    change("response.output_item.done", "item.status", "in_progress"),
    change("response.output_item.done", "item.summary", []),
    change("acme:trace", "type", "trace"),
    change("response.completed", "response.status", "failed"),
    change("response.completed", "response.completed_at", None),
    change("response.completed", "response.error", {"code": "a", "message": "b"}),
    change("response.completed", "response.incomplete_details", {"reason": "max_output_tokens"}),
    change("response.completed", "response.metadata", {"new": "value"}),
    change("response.completed", "response.usage.total_tokens", 6),
    change("response.completed", "response.usage.input_tokens_details", ...),
    change("response.completed", "response.output.1.content.0.text", "other"),
    change("response.completed", "response.output.1.status", ...),
    change("response.completed", "response.output.2.call_id", "call_b"),
    change("response.completed", "response.output.5.status", "incomplete"),
    change("response.completed", "response.output.6.id", ""),
    change("response.completed", "response.output.7.phase", None),
    change("response.completed", "response.prompt_cache_key", ...),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_stream_with_wrong_member_is_refused(number: int) -> None:
    events = copy.deepcopy(STREAMS["completed"])
    CHANGES[number](events)
    assert refused(events)


@pytest.mark.parametrize(
    ("choice", "legal"),
    [
        ("auto", True),
        ({"type": "acme:search"}, True),
        ({"type": "acme:other"}, False),
        ({"type": "acme:search", "name": "search"}, True),
        ({"type": "acme:search", "mode": "auto"}, False),
        ({"type": "search"}, False),
        ({"type": "function", "name": "f"}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "acme:search"}]}, True),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, {"type": "acme:x"}]},
            False,
        ),
        ({"type": "allowed_tools", "mode": "some", "tools": [{"type": "acme:search"}]}, False),
    ],
)
def test_implementor_tools_are_accepted_by_name_only(choice: Any, legal: bool) -> None:
    own = {"type": "acme:search", "documents": [1, None]}
    response = STREAMS["completed"][-1]["response"]
    response = {**response, "tools": [*response["tools"], own], "tool_choice": choice}
    event = STREAMS["completed"][-1] | {"response": response}
    if legal:
        conformance.check_response(response)
        conformance.check_event(event)
        return
    with pytest.raises(AssertionError):
        conformance.check_response(response)
    with pytest.raises(AssertionError):
        conformance.check_event(event)


@pytest.mark.parametrize("tool", [{"type": "search"}, {"type": ":search"}, {"name": "f"}, {"type": "function"}])
def test_unknown_tool_type_is_refused(tool: Any) -> None:
    response = STREAMS["completed"][-1]["response"]
    with pytest.raises(AssertionError):
        conformance.check_response({**response, "tools": [tool]})


def test_incomplete_item_must_be_last_of_incomplete_response() -> None:
    response = STREAMS["incomplete"][-1]["response"]
    cut = {"type": "acme:slow", "id": "item_cut", "status": "incomplete"}
    call = {"type": "function_call", "id": "fc_cut", "call_id": "cut", "name": "f", "arguments": "{", "status": ""}
    for tail in ([cut], [call | {"status": "incomplete"}, cut]):
        conformance.check_response({**response, "output": [*response["output"][:-1], *tail]})
        completed = STREAMS["completed"][-1]["response"]
        with pytest.raises(AssertionError):
            conformance.check_response({**completed, "output": [*completed["output"], *tail]})
    for output in ([cut, *response["output"]], [cut | {"id": "item_2"}, cut]):
        with pytest.raises(AssertionError):
            conformance.check_response({**response, "output": output})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"error": None},
        {"error": "no"},
        {"error": {"type": "invalid_request", "code": "a", "message": "b"}},
        {"error": {"type": "invalid_request_error", "code": "a", "message": "b", "param": None}},
        {"error": {"type": "invalid_request", "code": None, "message": "b", "param": None}},
        {"error": {"type": "invalid_request", "code": "a", "message": "", "param": None}},
        {"error": {"type": "invalid_request", "code": "a", "message": "b" * 1000, "param": None}},
        {"error": {"type": "invalid_request", "code": "a", "message": "b", "param": ""}},
        {"error": {"type": "invalid_request", "code": "a", "message": "b", "param": None}, "detail": "x"},
        {"detail": "Not Found"},
    ],
)
def test_malformed_error_body_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, TypeError, AttributeError)):
        conformance.check_error(body)


def test_types_validate_without_official_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "_validator", lambda schema: None)
    conformance.check_stream(STREAMS["completed"])
    for number in range(len(CHANGES)):
        events = copy.deepcopy(STREAMS["completed"])
        CHANGES[number](events)
        assert refused(events), number
