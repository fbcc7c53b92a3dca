"""Tests of the state machine: all streams are legal and replay to exactly the final object."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import errors, outputs
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.sse import encode_sse
from responses_kit.protocol.state_machine import OUTPUT_TARGETS, TRANSITIONS, Event, StateMachine

from ..support.conformance import check_event, check_response, check_stream, replay
from ..support.strategies import any_run, keys, legal_outputs

NOW = 1_750_000_000.9

STATES = ("new", "queued", "in_progress", "closed", "ended")
ACTIONS = ("queue", "start", "feed", "close", "end", "fail", "cancel")


def fresh_response() -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_750_000_000,
        "completed_at": None,
        "status": "in_progress",
        "incomplete_details": None,
        "model": "scripted",
        "previous_response_id": None,
        "instructions": None,
        "output": [],
        "error": None,
        "tools": [],
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


def new_machine(**settings: bool) -> StateMachine:
    return StateMachine(fresh_response(), new_id=new_id, **settings)


def snapshot(value: Any) -> Any:
    """Return a comparable deep copy of a machine's state."""
    if isinstance(value, dict):
        return [(key, snapshot(member)) for key, member in value.items()]
    if isinstance(value, list | tuple):
        return [snapshot(member) for member in value]
    if isinstance(value, set):
        return set(value)
    if type(value).__module__ == "responses_kit.protocol.builders":
        return type(value).__name__, {slot: snapshot(getattr(value, slot)) for slot in type(value).__slots__}
    return value


def act(machine: StateMachine, action: str) -> list[Event]:
    arguments: dict[str, tuple[Any, ...]] = {
        "feed": ("more",),
        "close": (NOW,),
        "fail": (errors.ModelError("It broke."),),
    }
    emitted: list[Event] = getattr(machine, action)(*arguments.get(action, ()))
    return emitted


def settle(machine: StateMachine, ending: str) -> list[Event]:
    return [event for action in ending.split() for event in act(machine, action)]


def play(script: Iterable[outputs.Output], ending: str = "close end", **settings: bool) -> list[Event]:
    machine = new_machine(**settings)
    emitted = machine.start()
    for output in script:
        emitted += machine.feed(output)
    return emitted + settle(machine, ending)


def final(script: Iterable[outputs.Output], ending: str = "close end") -> dict[str, Any]:
    return check_stream(play(script, ending))


def kinds(events: Iterable[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


# Arbitrary outputs.


@given(**any_run)
def test_any_outputs_make_legal_stream_that_replays_to_final_object(
    script: list[Any], ending: str, queued: bool, stream_reasoning: bool, stream_extensions: bool, error_events: bool
) -> None:
    check_script(
        script,
        ending,
        queued=queued,
        stream_reasoning=stream_reasoning,
        stream_extensions=stream_extensions,
        error_events=error_events,
    )


@pytest.mark.parametrize(
    "script",
    [
        [outputs.ToolCall("f", "[" * 200_000), outputs.ToolCall("g"), outputs.Finish("max_output_tokens")],
        [outputs.ToolCall("f", "{", "\ud83d"), outputs.ToolArguments("}", "\ud83d")],
        [outputs.ToolCall("f"), outputs.ToolArguments("}", []), outputs.ToolArguments("}", {})],
        [outputs.ToolCall("f", '{"x', "a"), outputs.ToolCall("g", '{"y', "b"), outputs.Finish("max_output_tokens")],
        [outputs.Item("acme:x", {b"id": "mine"})],
        [outputs.Item("acme:x", None), outputs.Event("acme:x", []), outputs.Event("acme:x", "abc")],
        [outputs.Item("acme:x", {"x": [10**5000]})],
        [outputs.Text("x", [outputs.LogProb("x", -1.0, 10**13)])],
        [outputs.Text("x", [outputs.LogProb("x", -1.0, 4)])],
        [outputs.Text("x", [outputs.LogProb("x", 10**400)])],
        [outputs.Text("x", [outputs.LogProb("x", -1.0, (), None)])],
        [outputs.Text("x", 7)],
        [outputs.Usage(1, 1, cached_tokens=2)],
        [outputs.Usage(10**5000, 1)],
        [outputs.Item("acme:x", {}, "incomplete"), "more"],
        [outputs.Item("acme:x", {}, "in_progress", "k"), outputs.Item("acme:x", {}, "completed", "\ud83d")],
        [outputs.Item("acme:x", {}, "in_progress", "\ud83d"), outputs.Item("acme:x", {}, "done", "\ud83d"), "more"],
        [outputs.Item("acme:x", {}, "in_progress", []), outputs.Item("acme:x", {}, "in_progress", "")],
    ],
    ids=lambda script: " ".join(type(output).__name__ for output in script),
)
def test_regression_outputs_are_refused_or_legal(script: list[Any]) -> None:
    check_script(script, "close end")


def check_script(script: list[Any], ending: str, *, queued: bool = False, **settings: bool) -> None:
    """Feed a script and check all guarantees about the stream."""
    machine = new_machine(**settings)
    emitted = machine.queue() if queued else []
    emitted += machine.start()
    encoded = [encode_sse(event) for event in emitted]
    for output in script:
        before = snapshot(machine)
        try:
            events = machine.feed(output)
        except errors.IllegalOutput:
            assert snapshot(machine) == before, "a refused output has changed the state"
            continue
        emitted += events
        encoded += map(encode_sse, events)
    rest = settle(machine, ending)
    emitted += rest
    encoded += map(encode_sse, rest)

    read = [json.loads(data.split(b"\ndata: ")[1]) for data in encoded]
    assert read == emitted, "an event has changed after it was emitted, or differs from its encoding"
    assert check_stream(read, error_events=settings.get("error_events", True)) == machine.response
    assert machine.state == "ended"
    if not settings.get("stream_reasoning"):
        assert not any(kind.startswith("reasoning.") for kind in kinds(emitted))
    if not settings.get("stream_extensions"):
        assert not any(":" in kind for kind in kinds(emitted))


@given(
    script=st.lists(legal_outputs, min_size=1, max_size=8),
    cut=st.integers(0, 8),
    ending=st.sampled_from(["fail", "cancel"]),
)
def test_stream_ended_early_is_legal_and_retains_emitted_output(script: list[Any], cut: int, ending: str) -> None:
    machine = new_machine(stream_reasoning=True)
    emitted = machine.start()
    for output in script[:cut]:
        try:
            emitted += machine.feed(output)
        except errors.IllegalOutput:
            continue
    stream = "".join(event["delta"] for event in emitted if event["type"] == "response.output_text.delta")
    response = check_stream(emitted + settle(machine, ending))
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    assert "".join(part["text"] for part in parts if part["type"] == "output_text") == stream


@given(pieces=st.lists(st.text(max_size=6), min_size=1, max_size=8))
def test_text_does_not_depend_on_its_pieces(pieces: list[str]) -> None:
    joined, cut = final(["".join(pieces)]), final(pieces)
    assert cut["output"][0]["content"][0]["text"] == joined["output"][0]["content"][0]["text"] == "".join(pieces)


def test_every_delta_output_has_target() -> None:
    assert {kind.__name__ for kind in OUTPUT_TARGETS} == {
        "Text",
        "Annotation",
        "Refusal",
        "Reasoning",
        "ReasoningSummary",
    }


# States and actions.


def machine_in(state: str) -> tuple[StateMachine, list[Event]]:
    machine = new_machine()
    path = {
        "new": "",
        "queued": "queue",
        "in_progress": "start feed",
        "closed": "start feed close",
        "ended": "start feed close end",
    }[state]
    return machine, settle(machine, path) if path else []


def test_transition_table_is_complete() -> None:
    assert {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values()) == set(STATES)
    assert {action for _, action in TRANSITIONS} == set(ACTIONS)


@pytest.mark.parametrize(("state", "action"), [*itertools.product(STATES, ACTIONS)])
def test_action_follows_transition_table(state: str, action: str) -> None:
    machine, stream = machine_in(state)
    assert machine.state == state
    if (state, action) in TRANSITIONS:
        stream += act(machine, action)
        assert machine.state == TRANSITIONS[state, action]
        if machine.state == "ended":
            check_stream(stream)
        else:
            for event in stream:
                check_event(event)
    else:
        before = snapshot(machine)
        with pytest.raises(errors.IllegalOutput, match=state):
            act(machine, action)
        assert snapshot(machine) == before


@pytest.mark.parametrize("ending", ["fail", "cancel"])
@pytest.mark.parametrize("state", ["new", "queued", "in_progress", "closed"])
def test_early_end_has_no_members_of_other_outcomes(state: str, ending: str) -> None:
    machine, stream = machine_in(state)
    response = check_stream(stream + act(machine, ending))
    assert response["status"] == {"fail": "failed", "cancel": "cancelled"}[ending]
    assert response["completed_at"] is None
    assert kinds(stream)[:1] == ([] if state == "new" else ["created"])


def test_queued_response_emits_created_queued_in_progress() -> None:
    machine = new_machine()
    assert kinds(machine.queue()) == ["created", "queued"]
    assert machine.response["status"] == "queued"
    assert kinds(machine.start()) == ["in_progress"]
    assert machine.response["status"] == "in_progress"


@pytest.mark.parametrize("ending", ["fail", "cancel"])
def test_queued_response_emits_in_progress_before_end(ending: str) -> None:
    machine = new_machine()
    events = machine.queue() + act(machine, ending)
    assert kinds(events)[:3] == ["created", "queued", "in_progress"]
    assert check_stream(events)["output"] == []


@pytest.mark.parametrize("script", [["All of it."], ["Half", outputs.Finish("max_output_tokens")], []])
def test_preview_end_returns_terminal_event_without_change(script: list[outputs.Output]) -> None:
    machine = new_machine()
    events = [*machine.start(), *(event for output in script for event in machine.feed(output)), *machine.close(NOW)]
    before = snapshot(machine)
    ending = machine.preview_end()
    assert snapshot(machine) == before
    assert machine.preview_end() == ending
    assert machine.end() == ending
    assert check_stream(events + ending) == machine.response


@pytest.mark.parametrize("state", ["new", "queued", "in_progress", "ended"])
def test_preview_end_is_refused_unless_closed(state: str) -> None:
    machine, _ = machine_in(state)
    before = snapshot(machine)
    with pytest.raises(errors.IllegalOutput, match=state):
        machine.preview_end()
    assert snapshot(machine) == before


@pytest.mark.parametrize("instead", ["fail", "cancel"])
def test_closed_response_can_still_fail(instead: str) -> None:
    machine, events = machine_in("closed")
    ending = machine.preview_end()
    encoded = encode_sse(ending[0])
    response = check_stream(events + act(machine, instead))
    assert response["status"] != "completed"
    assert encode_sse(ending[0]) == encoded
    assert check_stream(events + ending)["status"] == "completed"


# The effect of each output.


def test_plain_text_is_one_message_with_one_part() -> None:
    events = play(["Hello, ", "world."])
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    response = check_stream(events)
    assert response["status"] == "completed"
    assert response["completed_at"] == 1_750_000_000
    assert response["usage"] is None
    part = {"type": "output_text", "text": "Hello, world.", "annotations": [], "logprobs": []}
    item_id = response["output"][0]["id"]
    assert item_id.startswith("msg_")
    assert response["output"] == [
        {"type": "message", "id": item_id, "status": "completed", "role": "assistant", "content": [part]}
    ]


def test_response_without_outputs_is_completed_and_empty() -> None:
    assert final([])["output"] == []


def test_empty_text_opens_message_without_delta() -> None:
    events = play([""])
    assert "output_text.delta" not in kinds(events)
    assert check_stream(events)["output"][0]["content"][0]["text"] == ""


def test_empty_message_has_no_content() -> None:
    assert final([outputs.Message("commentary")])["output"][0]["content"] == []


def test_message_phase_is_emitted_from_start_or_omitted() -> None:
    events = play(
        [outputs.Message("commentary"), "Let me see.", outputs.Message("final_answer"), "42", outputs.Message()]
    )
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("phase", "none") for item in added] == ["commentary", "final_answer", "none"]
    assert [item.get("phase", "none") for item in check_stream(events)["output"]] == [
        "commentary",
        "final_answer",
        "none",
    ]


def test_text_and_refusal_are_parts_of_same_message() -> None:
    (message,) = final(["I would, but ", outputs.Refusal("I "), outputs.Refusal("can't."), "Sorry."])["output"]
    assert [(part["type"], part.get("text", part.get("refusal"))) for part in message["content"]] == [
        ("output_text", "I would, but "),
        ("refusal", "I can't."),
        ("output_text", "Sorry."),
    ]


def test_output_of_other_kind_closes_item_and_opens_next() -> None:
    script = [outputs.Reasoning("Hm."), "Yes.", outputs.ToolCall("add"), "Done.", outputs.Reasoning("Hm?")]
    response = final(script)
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "message",
        "reasoning",
    ]
    assert all(item["status"] == "completed" for item in response["output"])


@pytest.mark.parametrize("stream", [True, False])
def test_raw_reasoning_is_in_item_with_or_without_deltas(stream: bool) -> None:
    events = play([outputs.Reasoning("one "), outputs.Reasoning("two")], stream_reasoning=stream)
    assert ("reasoning.delta" in kinds(events)) is stream
    (item,) = check_stream(events)["output"]
    assert item["content"] == [{"type": "reasoning_text", "text": "one two"}]
    assert item["summary"] == []


def test_summaries_have_own_parts_and_always_stream() -> None:
    events = play(
        [
            outputs.ReasoningSummary("First. "),
            outputs.ReasoningSummary("Still first."),
            outputs.ReasoningSummary("Second.", new_part=True),
            "Answer.",
        ]
    )
    item = check_stream(events)["output"][0]
    assert [part["text"] for part in item["summary"]] == ["First. Still first.", "Second."]
    deltas = [event for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    assert [event["summary_index"] for event in deltas] == [0, 0, 1]


def test_annotation_is_emitted_immediately_and_added_to_part() -> None:
    note = outputs.Annotation("https://example.org", "Example", 0, 5)
    events = play(["Hello", note, note, " there"])
    stream = [event for event in events if event["type"] == "response.output_text.annotation.added"]
    assert [event["annotation_index"] for event in stream] == [0, 1]
    (message,) = check_stream(events)["output"]
    assert message["content"][0]["text"] == "Hello there"
    assert len(message["content"][0]["annotations"]) == 2


def test_log_probabilities_are_finite_in_delta_and_part() -> None:
    token = outputs.LogProb("a", float("-inf"), b"a", [outputs.LogProb("b", float("nan")), outputs.LogProb("c", -2)])
    response = final([outputs.Text("a", [token]), "b", outputs.Text("c", [outputs.LogProb("c", -0.5, [99])])])
    first, second = response["output"][0]["content"][0]["logprobs"]
    assert (first["logprob"], first["bytes"]) == (-9999.0, [97])
    assert [rival["logprob"] for rival in first["top_logprobs"]] == [-9999.0, -2.0]
    assert second == {"token": "c", "logprob": -0.5, "bytes": [99], "top_logprobs": []}


def test_whole_extension_item_is_added_and_done() -> None:
    events = play(["Look:", outputs.Item("acme:chart", {"points": [1, 2]}), "There."])
    at = kinds(events).index("output_item.added", 3)
    assert kinds(events)[at : at + 2] == ["output_item.added", "output_item.done"]
    item = check_stream(events)["output"][1]
    assert item == {"type": "acme:chart", "id": item["id"], "status": "completed", "points": [1, 2]}


def test_extension_item_is_copied() -> None:
    fields = {"points": [1]}
    machine = new_machine()
    machine.start()
    machine.feed(outputs.Item("acme:chart", fields))
    fields["points"].append(2)
    assert machine.response["output"][0]["points"] == [1]


def test_extension_event_takes_sequence_number_only_if_emitted() -> None:
    event = outputs.Event("acme:progress", {"percent": 50})
    loud = play(["a", event, "b"], stream_extensions=True)
    assert {"type": "acme:progress", "sequence_number": 5, "percent": 50} in loud
    check_stream(loud)
    assert kinds(play(["a", event, "b"])) == kinds(play(["a", "b"]))


@pytest.mark.parametrize("name", ["id", "type", "status", b"id"])
def test_extension_item_cannot_set_reserved_members(name: Any) -> None:
    with pytest.raises(errors.IllegalOutput):
        play([outputs.Item("acme:chart", {name: "mine"})])


@pytest.mark.parametrize("kind", ["chart", "response.completed", ":x", "x:", "a b:c", "acme:a\n", "", "error"])
def test_extension_type_must_be_slug_and_name(kind: str) -> None:
    for extension in (outputs.Item(kind), outputs.Event(kind)):
        with pytest.raises(errors.IllegalOutput, match="slug:name"):
            play([extension])


# Extension items in progress.


def started(key: str, kind: str = "acme:call", **fields: Any) -> outputs.Item:
    return outputs.Item(kind, fields, "in_progress", key)


def finished(key: str, kind: str = "acme:call", status: str = "completed", **fields: Any) -> outputs.Item:
    return outputs.Item(kind, fields, status, key)


def item_events(events: Iterable[Event]) -> list[tuple[str, int, str]]:
    """Return the action (added or done), the index and the status of each item event."""
    return [
        (event["type"].rsplit(".", 1)[1], event["output_index"], event["item"]["status"])
        for event in events
        if "item" in event
    ]


def test_extension_item_can_start_and_end_separately() -> None:
    events = play(["Let me see.", started("k", asked=1), finished("k", status="failed", asked=1, stream="no"), "Hm."])
    assert item_events(events)[2:4] == [("added", 1, "in_progress"), ("done", 1, "failed")]
    added, done = [event["item"] for event in events if event.get("output_index") == 1 and "item" in event]
    assert added == {"type": "acme:call", "id": added["id"], "status": "in_progress", "asked": 1}
    assert done == added | {"status": "failed", "stream": "no"}
    assert check_stream(events)["output"][1] == done
    assert "key" not in done


@pytest.mark.parametrize("order", [*itertools.permutations("klm")])
def test_several_extension_items_end_in_any_order_and_are_closed_by_index(order: tuple[str, ...]) -> None:
    machine = new_machine()
    events = [*machine.start()]
    for key in "klm":
        events += machine.feed(started(key, name=key))
    assert item_events(events) == [("added", index, "in_progress") for index in range(3)]
    ended: set[str] = set()
    for key in order:
        closed = machine.feed(finished(key, name=key))
        ended.add(key)
        events += closed
        finished_count = next((index for index, other in enumerate("klm") if other not in ended), 3)
        assert len(machine.response["output"]) == finished_count, "closed as soon as all before it are, and no sooner"
    assert [event["output_index"] for event in events if event["type"].endswith("done")] == [0, 1, 2]
    response = check_stream(events + settle(machine, "close end"))
    assert [item["name"] for item in response["output"]] == ["k", "l", "m"]


def test_whole_extension_item_keeps_index_among_open_ones() -> None:
    machine = new_machine()
    events = [*machine.start(), *machine.feed(started("k"))]
    beside = machine.feed(outputs.Item("acme:note", {"n": 1}))
    assert item_events(beside) == [("added", 1, "in_progress")]
    last = machine.feed(finished("k"))
    assert item_events(last) == [("done", 0, "completed"), ("done", 1, "completed")]
    response = check_stream(events + beside + last + settle(machine, "close end"))
    assert [item["type"] for item in response["output"]] == ["acme:call", "acme:note"]


def test_extension_end_without_start_is_whole_item() -> None:
    events = play([finished("k", n=1), started("k", n=2), finished("k", n=3), finished("k", n=4)])
    assert [item["n"] for item in check_stream(events)["output"]] == [1, 3, 4]


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(started("k"), id="started twice"),
        pytest.param(finished("k"), id="finished twice"),
        pytest.param(finished("l", kind="acme:other"), id="finished as another type"),
        pytest.param(started("l"), id="started while it is open"),
        pytest.param(outputs.Item("acme:call", {}, "in_progress"), id="started without a key"),
        pytest.param(outputs.Item("acme:call", {}, "in_progress", 7), id="a key that is no string"),  # type: ignore[arg-type]
        pytest.param(outputs.Item("acme:call", {}, ""), id="no status"),
        pytest.param(outputs.Item("acme:call", {"status": "completed"}, "completed", "l"), id="a status of its own"),
        pytest.param("text", id="str"),
        pytest.param("", id="empty str"),
        pytest.param(outputs.Text("text"), id="Text"),
        pytest.param(outputs.Refusal("no"), id="Refusal"),
        pytest.param(outputs.Annotation("https://example.org"), id="Annotation"),
        pytest.param(outputs.Message(), id="Message"),
        pytest.param(outputs.Reasoning("Hm."), id="Reasoning"),
        pytest.param(outputs.ReasoningSummary("Hm."), id="ReasoningSummary"),
        pytest.param(outputs.ToolCall("f"), id="ToolCall"),
        pytest.param(outputs.ToolArguments("{}"), id="ToolArguments"),
    ],
)
def test_other_outputs_are_refused_while_extension_items_are_open(output: Any) -> None:
    machine = new_machine()
    events = [*machine.start(), *machine.feed("Wait.")]
    # The second item is finished, but cannot be closed before the first one.
    for opened in (started("l"), started("k"), finished("k")):
        events += machine.feed(opened)
    before = snapshot(machine)
    with pytest.raises(errors.IllegalOutput):
        machine.feed(output)
    assert snapshot(machine) == before
    events += machine.feed(finished("l"))
    assert len(check_stream(events + settle(machine, "close end"))["output"]) == 3


def test_events_and_usage_are_accepted_while_extension_items_are_open() -> None:
    script = [started("k"), outputs.Event("acme:progress", {"percent": 5}), outputs.Usage(3, 4), finished("k"), "Done."]
    events = play(script, stream_extensions=True)
    assert "acme:progress" in kinds(events)
    assert check_stream(events)["usage"]["total_tokens"] == 7


@given(
    script=st.lists(
        st.builds(
            outputs.Item,
            st.sampled_from(["acme:call", "acme:other"]),
            st.dictionaries(st.sampled_from("xy"), st.integers(), max_size=1),
            st.sampled_from(["in_progress", "in_progress", "completed", "failed", "incomplete"]),
            st.none() | keys,
        ),
        max_size=12,
    ),
    ending=st.sampled_from(["close end", "close fail", "fail", "cancel", "Finish close end"]),
)
def test_any_extension_items_make_legal_stream(script: list[outputs.Item], ending: str) -> None:
    cut = [outputs.Finish("max_output_tokens")] if ending.startswith("Finish") else []
    check_script([*script, *cut], ending.removeprefix("Finish "))


def test_extension_item_closes_open_item() -> None:
    events = play([outputs.ToolCall("f", "{}", "a"), started("k"), finished("k"), outputs.ToolCall("g", "{}", "b")])
    assert item_events(events) == [
        (action, index, status)
        for index in range(3)
        for action, status in (("added", "in_progress"), ("done", "completed"))
    ]


BREAKS = [
    pytest.param([], "fail", id="fails"),
    pytest.param([], "cancel", id="is cancelled"),
    pytest.param([outputs.Finish("max_output_tokens")], "close end", id="is too long"),
    pytest.param([outputs.Finish("content_filter"), outputs.Usage(1, 1)], "close end", id="is filtered"),
]


@pytest.mark.parametrize(("cut", "ending"), BREAKS)
def test_only_last_open_extension_item_is_incomplete_after_abort(cut: list[outputs.Output], ending: str) -> None:
    script = ["Wait.", started("k", n=1), started("l", n=2), started("m", n=3), finished("l", n=4)]
    response = final([*script, *cut], ending)
    assert [(item["status"], item["n"]) for item in response["output"][1:]] == [
        ("failed", 1),
        ("completed", 4),
        ("incomplete", 3),
    ]


@pytest.mark.parametrize("last", [[], [outputs.Finish()]])
def test_unfinished_extension_item_fails_in_completed_response(
    last: list[outputs.Output],
) -> None:
    response = final([started("k", n=1), started("l", n=2), *last])
    assert [(item["status"], item["n"]) for item in response["output"]] == [("failed", 1), ("failed", 2)]


@pytest.mark.parametrize("key", [None, "k"])
def test_extension_item_cannot_declare_itself_incomplete(key: str | None) -> None:
    for script in ([], [started("k")]):
        with pytest.raises(errors.IllegalOutput):
            play([*script, outputs.Item("acme:call", {}, "incomplete", key)])


# Encrypted reasoning.


def play_encrypted(script: Iterable[outputs.Output], ending: str = "close end", **settings: bool) -> list[Event]:
    machine = StateMachine(fresh_response(), new_id=new_id, encrypt=lambda text: f"encrypted<{text}>", **settings)
    events = machine.start()
    for output in script:
        events += machine.feed(output)
    return events + settle(machine, ending)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ending", ["close end", "fail", "cancel"])
def test_raw_reasoning_is_encrypted_when_item_is_done(ending: str, stream: bool) -> None:
    script = [outputs.Reasoning("one "), outputs.ReasoningSummary("Sum."), outputs.Reasoning("two")]
    events = play_encrypted(script, ending, stream_reasoning=stream)
    added, done = [event["item"] for event in events if "item" in event]
    assert "encrypted_content" not in added
    assert done["encrypted_content"] == "encrypted<one two>"
    assert check_stream(events)["output"] == [done]


def test_each_reasoning_item_is_encrypted_separately() -> None:
    script = [outputs.Reasoning("a"), "text", outputs.Reasoning("b"), outputs.ToolCall("f"), outputs.Item("acme:x")]
    items = check_stream(play_encrypted(script))["output"]
    assert [item.get("encrypted_content") for item in items] == ["encrypted<a>", None, "encrypted<b>", None, None]


def test_summary_without_reasoning_is_not_encrypted() -> None:
    (item,) = check_stream(play_encrypted([outputs.ReasoningSummary("Sum.")]))["output"]
    assert "encrypted_content" not in item


def test_item_without_encryption_has_no_encrypted_content() -> None:
    assert "encrypted_content" not in final([outputs.Reasoning("Hm.")])["output"][0]


# Usage.


def test_last_usage_applies_and_adds_up() -> None:
    response = final(
        [outputs.Usage(1, 1), "text", outputs.Finish(), outputs.Usage(10, 5, 4, 3), outputs.Usage(11, 6, 4, 3)]
    )
    assert response["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 17,
    }


def test_usage_survives_failure_and_cancellation() -> None:
    for ending in ("fail", "cancel"):
        assert final(["text", outputs.Usage(3, 4)], ending)["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("counts", [(-1, 0), (0, 1.5), (True, 0), ("1", 0), (0, 0, 1), (0, 0, 0, 1), (1, 1, -1)])
def test_inconsistent_usage_is_refused(counts: tuple[Any, ...]) -> None:
    with pytest.raises(errors.IllegalOutput):
        play([outputs.Usage(*counts)])


# Calls.


def test_added_call_has_all_members_but_arguments() -> None:
    events = play([outputs.ToolCall("add", '{"a": 1}', "mine")])
    added = events[2]["item"]
    assert added == {
        "type": "function_call",
        "id": added["id"],
        "call_id": "mine",
        "name": "add",
        "arguments": "",
        "status": "in_progress",
    }
    assert check_stream(events)["output"] == [added | {"arguments": '{"a": 1}', "status": "completed"}]


def test_missing_call_ids_are_generated_and_distinct() -> None:
    emitted = [item["call_id"] for item in final([outputs.ToolCall("f") for _ in range(50)])["output"]]
    assert len(set(emitted)) == 50
    assert all(1 <= len(call_id) <= 64 for call_id in emitted)


@pytest.mark.parametrize("arguments", [[], [""], [" ", "\n"]])
def test_missing_arguments_are_empty_object(arguments: list[str]) -> None:
    script = [outputs.ToolCall("f"), *(outputs.ToolArguments(piece) for piece in arguments)]
    for more in ([], ["text"], [outputs.Reasoning("Hm.")]):
        assert json.loads(final([*script, *more])["output"][0]["arguments"]) == {}


def test_parallel_calls_interleave_without_mixing_and_close_by_index() -> None:
    events = play(
        [
            outputs.ToolCall("f", "", "a"),
            outputs.ToolCall("g", "", "b"),
            outputs.ToolArguments('{"x"', "a"),
            outputs.ToolArguments('{"y"', "b"),
            outputs.ToolArguments(": 2}"),
            outputs.ToolArguments(": 1}", "a"),
            outputs.ToolCall("h", "{}", "c"),
        ]
    )
    response = check_stream(events)
    assert [item["arguments"] for item in response["output"]] == ['{"x": 1}', '{"y": 2}', "{}"]
    done = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [0, 1, 2]


def test_arguments_for_unknown_call_are_refused() -> None:
    call = outputs.ToolCall("f", "{}", "a")
    late: list[list[outputs.Output]] = [
        [outputs.ToolArguments("{}")],
        [call, outputs.ToolArguments("{}", "b")],
        [call, "text", outputs.ToolArguments("", "a")],
    ]
    for script in late:
        with pytest.raises(errors.IllegalOutput):
            play(script)


def test_duplicate_call_id_is_refused() -> None:
    for between in ([], ["text"]):
        with pytest.raises(errors.IllegalOutput, match="call_id"):
            play([outputs.ToolCall("f", "", "a"), *between, outputs.ToolCall("g", "", "a")])


@pytest.mark.parametrize("call_id", ["", "x" * 65])
def test_call_id_has_1_to_64_characters(call_id: str) -> None:
    with pytest.raises(errors.IllegalOutput, match="call_id"):
        play([outputs.ToolCall("f", "", call_id)])


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a.b", "größe", "f\n"])
def test_tool_name_follows_specification(name: str) -> None:
    with pytest.raises(errors.IllegalOutput, match="name"):
        play([outputs.ToolCall(name)])


# Early ends.


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
@pytest.mark.parametrize(
    "script",
    [
        ["Once upon a"],
        [""],
        [outputs.Message("final_answer")],
        [outputs.Reasoning("Hm, let me")],
        [outputs.ReasoningSummary("The user")],
        [outputs.ToolCall("f", '{"city": "Par')],
        [outputs.ToolCall("f")],
        [outputs.ToolCall("f", "{}")],
        ["text", outputs.ToolCall("f", "{}", "a"), outputs.ToolCall("g", '{"x"', "b")],
    ],
)
def test_early_finish_makes_response_and_last_item_incomplete(script: list[outputs.Output], reason: Any) -> None:
    events = play([*script, outputs.Finish(reason)])
    response = check_stream(events)
    assert kinds(events)[-1] == "incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert response["completed_at"] is None
    assert [item["status"] for item in response["output"]][:-1] == ["completed"] * (len(response["output"]) - 1)
    assert response["output"][-1]["status"] == "incomplete"


def test_truncated_arguments_are_unchanged() -> None:
    script = [outputs.ToolCall("f", '{"city": "Par'), outputs.Finish("max_output_tokens")]
    assert final(script)["output"][0]["arguments"] == '{"city": "Par'
    assert final([outputs.ToolCall("f"), outputs.Finish("max_output_tokens")])["output"][0]["arguments"] == ""


def test_finish_stop_completes_response() -> None:
    assert final(["text", outputs.Finish("stop")])["status"] == "completed"


def test_only_usage_may_follow_finish() -> None:
    for output in ["more", outputs.Text(""), outputs.Finish(), outputs.ToolCall("f"), outputs.Message()]:
        with pytest.raises(errors.IllegalOutput, match="Finish"):
            play(["text", outputs.Finish(), output])
    assert final(["text", outputs.Finish("stop"), outputs.Usage(1, 2)])["usage"]["total_tokens"] == 3


def test_failure_emits_error_then_response_failed() -> None:
    machine = new_machine()
    events = [*machine.start(), *machine.feed("half an ans"), *machine.fail(errors.ModelError("It broke.", code="oom"))]
    response = check_stream(events)
    assert kinds(events)[-2:] == ["error", "failed"]
    assert events[-2]["error"] == {"type": "model_error", "code": "oom", "message": "It broke.", "param": None}
    assert response["error"] == {"code": "oom", "message": "It broke."}
    assert response["output"][0]["content"][0]["text"] == "half an ans"
    assert response["output"][0]["status"] == "incomplete"


def test_without_error_events_failure_emits_response_failed_only() -> None:
    machine = new_machine(error_events=False)
    events = [*machine.start(), *machine.feed("half an ans"), *machine.fail(errors.ModelError("It broke.", code="oom"))]
    assert kinds(events)[-2:] == ["output_item.done", "failed"]
    assert check_stream(events, error_events=False)["error"] == {"code": "oom", "message": "It broke."}


@pytest.mark.parametrize("stream", [True, False])
def test_error_events_setting_is_enforced_by_conformance_check(stream: bool) -> None:
    events = play(["half an ans"], "fail", error_events=stream)
    with pytest.raises(AssertionError, match=r"response\.failed with error event"):
        check_stream(events, error_events=not stream)


def test_error_with_lone_surrogates_is_emitted() -> None:
    machine = new_machine()
    events = machine.fail(errors.InvalidRequest("bad \ud83d", param="x\ud83d", code="c\ud83d"))
    assert check_stream([json.loads(encode_sse(event).split(b"\ndata: ")[1]) for event in events])["status"] == "failed"


# Other guarantees.


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [("\ud83d\ude00", "\U0001f600"), ("a\ud83d", "a\ufffd"), ("\ude00b", "\ufffdb"), ("\ufeff\x00", "\ufeff\x00")],
)
def test_surrogate_pairs_are_joined_and_lone_ones_replaced(given_text: str, expected: str) -> None:
    for output in (given_text, outputs.Text(given_text), outputs.Refusal(given_text)):
        part = final([output])["output"][0]["content"][0]
        assert part.get("text", part.get("refusal")) == expected


def test_output_subclasses_behave_like_parents() -> None:
    class Words(str):
        pass

    class Note(outputs.Refusal):
        pass

    class Thought(outputs.Reasoning):
        pass

    class Call(outputs.ToolCall):
        pass

    items = final([Thought("Hm."), Words("Yes, "), Words("but "), Note("no."), Call("f", "{}")])["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert [part["type"] for part in items[1]["content"]] == ["output_text", "refusal"]
    assert items[1]["content"][0]["text"] == "Yes, but "


def test_ids_are_distinct_and_generated() -> None:
    emitted: list[str] = []

    def counted(prefix: str) -> str:
        emitted.append(f"{prefix}_{len(emitted)}")
        return emitted[-1]

    machine = StateMachine(fresh_response(), new_id=counted)
    machine.start()
    for output in (outputs.Reasoning("a"), "b", outputs.ToolCall("f"), outputs.ToolCall("g"), outputs.Item("x:y"), "c"):
        machine.feed(output)
    machine.close(NOW)
    ids = [item["id"] for item in machine.response["output"]]
    assert len(set(ids)) == len(ids) == 6
    assert set(ids) <= set(emitted)


def test_sequence_numbers_are_consecutive_from_zero() -> None:
    events = play(["a", outputs.Reasoning("b"), outputs.ToolCall("f"), "c"], "fail", stream_extensions=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_state_machine_keeps_response_current() -> None:
    machine = new_machine()
    machine.start()
    machine.feed(outputs.Reasoning("Hm."))
    assert machine.response["output"] == []
    machine.feed("Yes.")
    assert [item["type"] for item in machine.response["output"]] == ["reasoning"]
    machine.close(NOW)
    check_response(machine.response)
    terminal = machine.end()
    assert terminal[-1]["response"] == machine.response


def test_error_after_close_fails_same_response() -> None:
    machine = new_machine()
    events = [*machine.start(), *machine.feed("All of it."), *machine.close(NOW)]
    events += machine.fail(errors.StoreError("The server could not keep the response."))
    assert replay(events)["output"][0]["status"] == "completed"
    assert check_stream(events)["status"] == "failed"
