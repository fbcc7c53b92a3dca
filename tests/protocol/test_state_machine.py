"""The state machine: whatever is fed to it, what comes out is legal, and replays to exactly its final object."""

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
from responses_kit.protocol.state_machine import PLACES, TRANSITIONS, Event, StateMachine

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
    """A deep copy of a whole state, comparable."""
    if isinstance(value, dict):
        return [(key, snapshot(member)) for key, member in value.items()]
    if isinstance(value, list | tuple):
        return [snapshot(member) for member in value]
    if isinstance(value, set):
        return set(value)
    if type(value).__module__ == "responses_kit.protocol.state_machine":
        return type(value).__name__, {slot: snapshot(getattr(value, slot)) for slot in type(value).__slots__}
    return value


def act(machine: StateMachine, action: str) -> list[Event]:
    arguments: dict[str, tuple[Any, ...]] = {
        "feed": ("more",),
        "close": (NOW,),
        "fail": (errors.ModelError("It broke."),),
    }
    made: list[Event] = getattr(machine, action)(*arguments.get(action, ()))
    return made


def settle(machine: StateMachine, ending: str) -> list[Event]:
    return [event for action in ending.split() for event in act(machine, action)]


def play(script: Iterable[outputs.Output], ending: str = "close end", **settings: bool) -> list[Event]:
    machine = new_machine(**settings)
    made = machine.start()
    for output in script:
        made += machine.feed(output)
    return made + settle(machine, ending)


def final(script: Iterable[outputs.Output], ending: str = "close end") -> dict[str, Any]:
    return check_stream(play(script, ending))


def kinds(events: Iterable[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


# Any outputs at all.


@given(**any_run)
def test_any_outputs_make_a_legal_stream_that_replays_to_its_final_object(
    script: list[Any], ending: str, queued: bool, stream_reasoning: bool, stream_extensions: bool, error_events: bool
) -> None:
    judge(
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
def test_what_has_once_broken_the_machine_is_refused_or_legal(script: list[Any]) -> None:
    judge(script, "close end")


def judge(script: list[Any], ending: str, *, queued: bool = False, **settings: bool) -> None:
    """Feeds a script, whatever it holds, and checks all that is ever promised of a stream."""
    machine = new_machine(**settings)
    made = machine.queue() if queued else []
    made += machine.start()
    shown = [encode_sse(event) for event in made]
    for output in script:
        before = snapshot(machine)
        try:
            events = machine.feed(output)
        except errors.IllegalOutput:
            assert snapshot(machine) == before, "a refused output has left a trace"
            continue
        made += events
        shown += map(encode_sse, events)
    rest = settle(machine, ending)
    made += rest
    shown += map(encode_sse, rest)

    read = [json.loads(data.split(b"\ndata: ")[1]) for data in shown]
    assert read == made, "an event has changed after it was told, or is not what its bytes say"
    assert check_stream(read, error_events=settings.get("error_events", True)) == machine.response
    assert machine.state == "ended"
    if not settings.get("stream_reasoning"):
        assert not any(kind.startswith("reasoning.") for kind in kinds(made))
    if not settings.get("stream_extensions"):
        assert not any(":" in kind for kind in kinds(made))


@given(
    script=st.lists(legal_outputs, min_size=1, max_size=8),
    cut=st.integers(0, 8),
    ending=st.sampled_from(["fail", "cancel"]),
)
def test_a_stream_that_breaks_off_anywhere_is_legal_and_keeps_what_was_told(
    script: list[Any], cut: int, ending: str
) -> None:
    machine = new_machine(stream_reasoning=True)
    made = machine.start()
    for output in script[:cut]:
        try:
            made += machine.feed(output)
        except errors.IllegalOutput:
            continue
    told = "".join(event["delta"] for event in made if event["type"] == "response.output_text.delta")
    response = check_stream(made + settle(machine, ending))
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    assert "".join(part["text"] for part in parts if part["type"] == "output_text") == told


@given(pieces=st.lists(st.text(max_size=6), min_size=1, max_size=8))
def test_text_is_the_same_however_it_is_cut(pieces: list[str]) -> None:
    whole, cut = final(["".join(pieces)]), final(pieces)
    assert cut["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"] == "".join(pieces)


def test_all_outputs_that_go_on_with_something_have_a_place() -> None:
    assert {kind.__name__ for kind in PLACES} == {"Text", "Annotation", "Refusal", "Reasoning", "ReasoningSummary"}


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


def test_the_table_names_these_states_and_actions_and_no_others() -> None:
    assert {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values()) == set(STATES)
    assert {action for _, action in TRANSITIONS} == set(ACTIONS)


@pytest.mark.parametrize(("state", "action"), [*itertools.product(STATES, ACTIONS)])
def test_each_action_is_taken_in_each_state_as_the_table_says(state: str, action: str) -> None:
    machine, told = machine_in(state)
    assert machine.state == state
    if (state, action) in TRANSITIONS:
        told += act(machine, action)
        assert machine.state == TRANSITIONS[state, action]
        if machine.state == "ended":
            check_stream(told)
        else:
            for event in told:
                check_event(event)
    else:
        before = snapshot(machine)
        with pytest.raises(errors.IllegalOutput, match=state):
            act(machine, action)
        assert snapshot(machine) == before


@pytest.mark.parametrize("ending", ["fail", "cancel"])
@pytest.mark.parametrize("state", ["new", "queued", "in_progress", "closed"])
def test_a_response_that_ends_early_never_shows_marks_of_another_ending(state: str, ending: str) -> None:
    machine, told = machine_in(state)
    response = check_stream(told + act(machine, ending))
    assert response["status"] == {"fail": "failed", "cancel": "cancelled"}[ending]
    assert response["completed_at"] is None
    assert kinds(told)[:1] == ([] if state == "new" else ["created"])


def test_a_queued_response_is_created_queued_and_then_in_progress() -> None:
    machine = new_machine()
    assert kinds(machine.queue()) == ["created", "queued"]
    assert machine.response["status"] == "queued"
    assert kinds(machine.start()) == ["in_progress"]
    assert machine.response["status"] == "in_progress"


@pytest.mark.parametrize("ending", ["fail", "cancel"])
def test_a_response_that_ends_while_it_is_queued_was_in_progress_for_a_moment(ending: str) -> None:
    machine = new_machine()
    events = machine.queue() + act(machine, ending)
    assert kinds(events)[:3] == ["created", "queued", "in_progress"]
    assert check_stream(events)["output"] == []


@pytest.mark.parametrize("script", [["All of it."], ["Half", outputs.Finish("max_output_tokens")], []])
def test_the_ending_is_what_the_end_will_tell_and_changes_nothing(script: list[outputs.Output]) -> None:
    machine = new_machine()
    events = [*machine.start(), *(event for output in script for event in machine.feed(output)), *machine.close(NOW)]
    before = snapshot(machine)
    ending = machine.ending()
    assert snapshot(machine) == before
    assert machine.ending() == ending
    assert machine.end() == ending
    assert check_stream(events + ending) == machine.response


@pytest.mark.parametrize("state", ["new", "queued", "in_progress", "ended"])
def test_only_a_closed_response_has_an_ending(state: str) -> None:
    machine, _ = machine_in(state)
    before = snapshot(machine)
    with pytest.raises(errors.IllegalOutput, match=state):
        machine.ending()
    assert snapshot(machine) == before


@pytest.mark.parametrize("instead", ["fail", "cancel"])
def test_an_ending_that_could_not_be_stored_is_followed_by_another_one_and_stays_what_it_was(instead: str) -> None:
    machine, events = machine_in("closed")
    ending = machine.ending()
    shown = encode_sse(ending[0])
    response = check_stream(events + act(machine, instead))
    assert response["status"] != "completed"
    assert encode_sse(ending[0]) == shown
    assert check_stream(events + ending)["status"] == "completed"


# What each output does.


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


def test_nothing_at_all_is_a_completed_response_without_output() -> None:
    assert final([])["output"] == []


def test_empty_text_opens_a_message_and_adds_no_delta() -> None:
    events = play([""])
    assert "output_text.delta" not in kinds(events)
    assert check_stream(events)["output"][0]["content"][0]["text"] == ""


def test_a_message_without_text_is_told_with_no_content() -> None:
    assert final([outputs.Message("commentary")])["output"][0]["content"] == []


def test_the_phase_of_a_message_is_told_from_its_beginning_and_left_out_where_there_is_none() -> None:
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


def test_text_and_refusal_are_two_parts_of_the_same_message() -> None:
    (message,) = final(["I would, but ", outputs.Refusal("I "), outputs.Refusal("can't."), "Sorry."])["output"]
    assert [(part["type"], part.get("text", part.get("refusal"))) for part in message["content"]] == [
        ("output_text", "I would, but "),
        ("refusal", "I can't."),
        ("output_text", "Sorry."),
    ]


def test_an_output_of_another_kind_closes_one_item_and_opens_the_next() -> None:
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


@pytest.mark.parametrize("told", [True, False])
def test_raw_reasoning_stands_in_its_item_whether_its_deltas_are_told_or_not(told: bool) -> None:
    events = play([outputs.Reasoning("one "), outputs.Reasoning("two")], stream_reasoning=told)
    assert ("reasoning.delta" in kinds(events)) is told
    (item,) = check_stream(events)["output"]
    assert item["content"] == [{"type": "reasoning_text", "text": "one two"}]
    assert item["summary"] == []


def test_summaries_have_parts_of_their_own_and_are_always_told() -> None:
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


def test_an_annotation_is_told_at_once_and_stands_in_its_part() -> None:
    note = outputs.Annotation("https://example.org", "Example", 0, 5)
    events = play(["Hello", note, note, " there"])
    told = [event for event in events if event["type"] == "response.output_text.annotation.added"]
    assert [event["annotation_index"] for event in told] == [0, 1]
    (message,) = check_stream(events)["output"]
    assert message["content"][0]["text"] == "Hello there"
    assert len(message["content"][0]["annotations"]) == 2


def test_log_probabilities_stand_in_the_delta_and_in_the_part_and_are_always_finite() -> None:
    token = outputs.LogProb("a", float("-inf"), b"a", [outputs.LogProb("b", float("nan")), outputs.LogProb("c", -2)])
    response = final([outputs.Text("a", [token]), "b", outputs.Text("c", [outputs.LogProb("c", -0.5, [99])])])
    first, second = response["output"][0]["content"][0]["logprobs"]
    assert (first["logprob"], first["bytes"]) == (-9999.0, [97])
    assert [rival["logprob"] for rival in first["top_logprobs"]] == [-9999.0, -2.0]
    assert second == {"token": "c", "logprob": -0.5, "bytes": [99], "top_logprobs": []}


def test_an_extension_item_is_added_and_done_in_one_go() -> None:
    events = play(["Look:", outputs.Item("acme:chart", {"points": [1, 2]}), "There."])
    at = kinds(events).index("output_item.added", 3)
    assert kinds(events)[at : at + 2] == ["output_item.added", "output_item.done"]
    item = check_stream(events)["output"][1]
    assert item == {"type": "acme:chart", "id": item["id"], "status": "completed", "points": [1, 2]}


def test_an_extension_item_is_kept_as_it_was_even_if_the_backend_changes_it_later() -> None:
    fields = {"points": [1]}
    machine = new_machine()
    machine.start()
    machine.feed(outputs.Item("acme:chart", fields))
    fields["points"].append(2)
    assert machine.response["output"][0]["points"] == [1]


def test_an_extension_event_takes_a_number_only_where_it_is_told() -> None:
    event = outputs.Event("acme:progress", {"percent": 50})
    loud = play(["a", event, "b"], stream_extensions=True)
    assert {"type": "acme:progress", "sequence_number": 5, "percent": 50} in loud
    check_stream(loud)
    assert kinds(play(["a", event, "b"])) == kinds(play(["a", "b"]))


@pytest.mark.parametrize("name", ["id", "type", "status", b"id"])
def test_an_extension_item_cannot_choose_what_is_the_machines(name: Any) -> None:
    with pytest.raises(errors.IllegalOutput):
        play([outputs.Item("acme:chart", {name: "mine"})])


@pytest.mark.parametrize("kind", ["chart", "response.completed", ":x", "x:", "a b:c", "acme:a\n", "", "error"])
def test_an_extension_needs_a_type_of_slug_and_name(kind: str) -> None:
    for extension in (outputs.Item(kind), outputs.Event(kind)):
        with pytest.raises(errors.IllegalOutput, match="slug:name"):
            play([extension])


# Extension items that begin now and end later.


def begins(key: str, kind: str = "acme:call", **fields: Any) -> outputs.Item:
    return outputs.Item(kind, fields, "in_progress", key)


def ends(key: str, kind: str = "acme:call", status: str = "completed", **fields: Any) -> outputs.Item:
    return outputs.Item(kind, fields, status, key)


def told_of_items(events: Iterable[Event]) -> list[tuple[str, int, str]]:
    """What is told of items: added or done, their index, their status."""
    return [
        (event["type"].rsplit(".", 1)[1], event["output_index"], event["item"]["status"])
        for event in events
        if "item" in event
    ]


def test_an_extension_item_can_begin_now_and_end_later_with_other_members() -> None:
    events = play(["Let me see.", begins("k", asked=1), ends("k", status="failed", asked=1, told="no"), "Hm."])
    assert told_of_items(events)[2:4] == [("added", 1, "in_progress"), ("done", 1, "failed")]
    added, done = [event["item"] for event in events if event.get("output_index") == 1 and "item" in event]
    assert added == {"type": "acme:call", "id": added["id"], "status": "in_progress", "asked": 1}
    assert done == added | {"status": "failed", "told": "no"}
    assert check_stream(events)["output"][1] == done
    assert "key" not in done


@pytest.mark.parametrize("order", [*itertools.permutations("klm")])
def test_several_extension_items_end_in_any_order_and_are_closed_by_index(order: tuple[str, ...]) -> None:
    machine = new_machine()
    events = [*machine.start()]
    for key in "klm":
        events += machine.feed(begins(key, name=key))
    assert told_of_items(events) == [("added", index, "in_progress") for index in range(3)]
    ended: set[str] = set()
    for key in order:
        closed = machine.feed(ends(key, name=key))
        ended.add(key)
        events += closed
        whole = next((index for index, other in enumerate("klm") if other not in ended), 3)
        assert len(machine.response["output"]) == whole, "closed as soon as all before it are, and no sooner"
    assert [event["output_index"] for event in events if event["type"].endswith("done")] == [0, 1, 2]
    response = check_stream(events + settle(machine, "close end"))
    assert [item["name"] for item in response["output"]] == ["k", "l", "m"]


def test_a_whole_extension_item_stands_beside_open_ones_and_waits_for_its_place() -> None:
    machine = new_machine()
    events = [*machine.start(), *machine.feed(begins("k"))]
    beside = machine.feed(outputs.Item("acme:note", {"n": 1}))
    assert told_of_items(beside) == [("added", 1, "in_progress")]
    last = machine.feed(ends("k"))
    assert told_of_items(last) == [("done", 0, "completed"), ("done", 1, "completed")]
    response = check_stream(events + beside + last + settle(machine, "close end"))
    assert [item["type"] for item in response["output"]] == ["acme:call", "acme:note"]


def test_an_end_without_a_beginning_is_a_whole_item_and_its_key_is_free_again() -> None:
    events = play([ends("k", n=1), begins("k", n=2), ends("k", n=3), ends("k", n=4)])
    assert [item["n"] for item in check_stream(events)["output"]] == [1, 3, 4]


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(begins("k"), id="begins twice"),
        pytest.param(ends("k"), id="ends twice"),
        pytest.param(ends("l", kind="acme:other"), id="ends as another type"),
        pytest.param(begins("l"), id="begins while it is open"),
        pytest.param(outputs.Item("acme:call", {}, "in_progress"), id="begins without a key"),
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
def test_what_has_no_place_while_extension_items_are_open_is_refused_and_changes_nothing(output: Any) -> None:
    machine = new_machine()
    events = [*machine.start(), *machine.feed("Wait.")]
    # The second one has ended; it waits for the first one to be closed.
    for opened in (begins("l"), begins("k"), ends("k")):
        events += machine.feed(opened)
    before = snapshot(machine)
    with pytest.raises(errors.IllegalOutput):
        machine.feed(output)
    assert snapshot(machine) == before
    events += machine.feed(ends("l"))
    assert len(check_stream(events + settle(machine, "close end"))["output"]) == 3


def test_events_and_usage_may_come_while_extension_items_are_open() -> None:
    script = [begins("k"), outputs.Event("acme:progress", {"percent": 5}), outputs.Usage(3, 4), ends("k"), "Done."]
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
def test_any_beginnings_and_ends_of_extension_items_make_a_legal_stream(
    script: list[outputs.Item], ending: str
) -> None:
    cut = [outputs.Finish("max_output_tokens")] if ending.startswith("Finish") else []
    judge([*script, *cut], ending.removeprefix("Finish "))


def test_an_extension_item_closes_what_was_open_before_it() -> None:
    events = play([outputs.ToolCall("f", "{}", "a"), begins("k"), ends("k"), outputs.ToolCall("g", "{}", "b")])
    assert told_of_items(events) == [
        (what, index, status)
        for index in range(3)
        for what, status in (("added", "in_progress"), ("done", "completed"))
    ]


BREAKS = [
    pytest.param([], "fail", id="fails"),
    pytest.param([], "cancel", id="is cancelled"),
    pytest.param([outputs.Finish("max_output_tokens")], "close end", id="is too long"),
    pytest.param([outputs.Finish("content_filter"), outputs.Usage(1, 1)], "close end", id="is filtered"),
]


@pytest.mark.parametrize(("cut", "ending"), BREAKS)
def test_of_the_extension_items_that_are_open_when_a_response_breaks_off_only_the_last_is_incomplete(
    cut: list[outputs.Output], ending: str
) -> None:
    script = ["Wait.", begins("k", n=1), begins("l", n=2), begins("m", n=3), ends("l", n=4)]
    response = final([*script, *cut], ending)
    assert [(item["status"], item["n"]) for item in response["output"][1:]] == [
        ("failed", 1),
        ("completed", 4),
        ("incomplete", 3),
    ]


@pytest.mark.parametrize("last", [[], [outputs.Finish()]])
def test_an_extension_item_that_never_ended_has_failed_where_its_response_is_complete(
    last: list[outputs.Output],
) -> None:
    response = final([begins("k", n=1), begins("l", n=2), *last])
    assert [(item["status"], item["n"]) for item in response["output"]] == [("failed", 1), ("failed", 2)]


@pytest.mark.parametrize("key", [None, "k"])
def test_an_extension_item_cannot_say_of_itself_that_it_is_incomplete(key: str | None) -> None:
    for script in ([], [begins("k")]):
        with pytest.raises(errors.IllegalOutput):
            play([*script, outputs.Item("acme:call", {}, "incomplete", key)])


# Sealed reasoning.


def sealing(script: Iterable[outputs.Output], ending: str = "close end", **settings: bool) -> list[Event]:
    machine = StateMachine(fresh_response(), new_id=new_id, encrypt=lambda text: f"sealed<{text}>", **settings)
    events = machine.start()
    for output in script:
        events += machine.feed(output)
    return events + settle(machine, ending)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("ending", ["close end", "fail", "cancel"])
def test_raw_reasoning_is_sealed_whole_when_its_item_is_done(ending: str, told: bool) -> None:
    script = [outputs.Reasoning("one "), outputs.ReasoningSummary("Sum."), outputs.Reasoning("two")]
    events = sealing(script, ending, stream_reasoning=told)
    added, done = [event["item"] for event in events if "item" in event]
    assert "encrypted_content" not in added
    assert done["encrypted_content"] == "sealed<one two>"
    assert check_stream(events)["output"] == [done]


def test_each_reasoning_item_is_sealed_by_itself_and_nothing_else_is() -> None:
    script = [outputs.Reasoning("a"), "text", outputs.Reasoning("b"), outputs.ToolCall("f"), outputs.Item("acme:x")]
    items = check_stream(sealing(script))["output"]
    assert [item.get("encrypted_content") for item in items] == ["sealed<a>", None, "sealed<b>", None, None]


def test_a_summary_alone_has_nothing_to_seal() -> None:
    (item,) = check_stream(sealing([outputs.ReasoningSummary("Sum.")]))["output"]
    assert "encrypted_content" not in item


def test_without_a_seal_there_is_no_encrypted_content() -> None:
    assert "encrypted_content" not in final([outputs.Reasoning("Hm.")])["output"][0]


# Usage.


def test_usage_is_whole_and_adds_up_and_the_last_one_counts() -> None:
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


def test_usage_survives_a_failure_and_a_cancellation() -> None:
    for ending in ("fail", "cancel"):
        assert final(["text", outputs.Usage(3, 4)], ending)["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("counts", [(-1, 0), (0, 1.5), (True, 0), ("1", 0), (0, 0, 1), (0, 0, 0, 1), (1, 1, -1)])
def test_usage_that_cannot_be_true_is_refused(counts: tuple[Any, ...]) -> None:
    with pytest.raises(errors.IllegalOutput):
        play([outputs.Usage(*counts)])


# Calls.


def test_a_call_has_all_but_its_arguments_when_it_is_added() -> None:
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


def test_call_ids_are_made_where_left_out_and_differ() -> None:
    made = [item["call_id"] for item in final([outputs.ToolCall("f") for _ in range(50)])["output"]]
    assert len(set(made)) == 50
    assert all(1 <= len(call_id) <= 64 for call_id in made)


@pytest.mark.parametrize("arguments", [[], [""], [" ", "\n"]])
def test_arguments_that_were_never_written_are_an_empty_object(arguments: list[str]) -> None:
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


def test_arguments_for_a_call_that_is_closed_or_was_never_opened_are_refused() -> None:
    call = outputs.ToolCall("f", "{}", "a")
    late: list[list[outputs.Output]] = [
        [outputs.ToolArguments("{}")],
        [call, outputs.ToolArguments("{}", "b")],
        [call, "text", outputs.ToolArguments("", "a")],
    ]
    for script in late:
        with pytest.raises(errors.IllegalOutput):
            play(script)


def test_a_call_id_stands_for_one_call_only() -> None:
    for between in ([], ["text"]):
        with pytest.raises(errors.IllegalOutput, match="call_id"):
            play([outputs.ToolCall("f", "", "a"), *between, outputs.ToolCall("g", "", "a")])


@pytest.mark.parametrize("call_id", ["", "x" * 65])
def test_a_call_id_has_1_to_64_characters(call_id: str) -> None:
    with pytest.raises(errors.IllegalOutput, match="call_id"):
        play([outputs.ToolCall("f", "", call_id)])


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a.b", "größe", "f\n"])
def test_a_tools_name_is_what_the_specification_allows(name: str) -> None:
    with pytest.raises(errors.IllegalOutput, match="name"):
        play([outputs.ToolCall(name)])


# Ends that come too early.


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
def test_a_stop_in_the_middle_makes_the_response_and_its_last_item_incomplete(
    script: list[outputs.Output], reason: Any
) -> None:
    events = play([*script, outputs.Finish(reason)])
    response = check_stream(events)
    assert kinds(events)[-1] == "incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert response["completed_at"] is None
    assert [item["status"] for item in response["output"]][:-1] == ["completed"] * (len(response["output"]) - 1)
    assert response["output"][-1]["status"] == "incomplete"


def test_arguments_that_were_cut_stay_as_the_model_left_them() -> None:
    script = [outputs.ToolCall("f", '{"city": "Par'), outputs.Finish("max_output_tokens")]
    assert final(script)["output"][0]["arguments"] == '{"city": "Par'
    assert final([outputs.ToolCall("f"), outputs.Finish("max_output_tokens")])["output"][0]["arguments"] == ""


def test_a_stop_that_is_no_early_one_completes_the_response() -> None:
    assert final(["text", outputs.Finish("stop")])["status"] == "completed"


def test_only_usage_may_follow_finish() -> None:
    for output in ["more", outputs.Text(""), outputs.Finish(), outputs.ToolCall("f"), outputs.Message()]:
        with pytest.raises(errors.IllegalOutput, match="Finish"):
            play(["text", outputs.Finish(), output])
    assert final(["text", outputs.Finish("stop"), outputs.Usage(1, 2)])["usage"]["total_tokens"] == 3


def test_a_failure_is_told_as_an_error_and_then_as_a_failed_response() -> None:
    machine = new_machine()
    events = [*machine.start(), *machine.feed("half an ans"), *machine.fail(errors.ModelError("It broke.", code="oom"))]
    response = check_stream(events)
    assert kinds(events)[-2:] == ["error", "failed"]
    assert events[-2]["error"] == {"type": "model_error", "code": "oom", "message": "It broke.", "param": None}
    assert response["error"] == {"code": "oom", "message": "It broke."}
    assert response["output"][0]["content"][0]["text"] == "half an ans"
    assert response["output"][0]["status"] == "incomplete"


def test_without_error_events_a_failure_is_told_by_the_terminal_event_alone() -> None:
    machine = new_machine(error_events=False)
    events = [*machine.start(), *machine.feed("half an ans"), *machine.fail(errors.ModelError("It broke.", code="oom"))]
    assert kinds(events)[-2:] == ["output_item.done", "failed"]
    assert check_stream(events, error_events=False)["error"] == {"code": "oom", "message": "It broke."}


@pytest.mark.parametrize("told", [True, False])
def test_a_stream_with_error_events_is_not_legal_where_there_are_none_and_the_other_way_round(told: bool) -> None:
    events = play(["half an ans"], "fail", error_events=told)
    with pytest.raises(AssertionError, match=r"response\.failed with error event"):
        check_stream(events, error_events=not told)


def test_an_error_with_lone_surrogates_in_it_can_still_be_told() -> None:
    machine = new_machine()
    events = machine.fail(errors.InvalidRequest("bad \ud83d", param="x\ud83d", code="c\ud83d"))
    assert check_stream([json.loads(encode_sse(event).split(b"\ndata: ")[1]) for event in events])["status"] == "failed"


# Odds and ends.


@pytest.mark.parametrize(
    ("given_text", "kept"),
    [("\ud83d\ude00", "\U0001f600"), ("a\ud83d", "a\ufffd"), ("\ude00b", "\ufffdb"), ("\ufeff\x00", "\ufeff\x00")],
)
def test_surrogate_pairs_become_characters_and_lone_ones_a_replacement(given_text: str, kept: str) -> None:
    for output in (given_text, outputs.Text(given_text), outputs.Refusal(given_text)):
        part = final([output])["output"][0]["content"][0]
        assert part.get("text", part.get("refusal")) == kept


def test_subclasses_of_outputs_and_of_str_do_what_their_parents_do() -> None:
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


def test_all_ids_of_a_response_differ_and_are_the_servers_own() -> None:
    made: list[str] = []

    def counted(prefix: str) -> str:
        made.append(f"{prefix}_{len(made)}")
        return made[-1]

    machine = StateMachine(fresh_response(), new_id=counted)
    machine.start()
    for output in (outputs.Reasoning("a"), "b", outputs.ToolCall("f"), outputs.ToolCall("g"), outputs.Item("x:y"), "c"):
        machine.feed(output)
    machine.close(NOW)
    ids = [item["id"] for item in machine.response["output"]]
    assert len(set(ids)) == len(ids) == 6
    assert set(ids) <= set(made)


def test_sequence_numbers_count_from_nought_without_a_gap() -> None:
    events = play(["a", outputs.Reasoning("b"), outputs.ToolCall("f"), "c"], "fail", stream_extensions=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_the_machine_keeps_the_response_current() -> None:
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


def test_an_error_after_the_final_object_was_settled_is_told_as_a_failure_of_the_same_response() -> None:
    machine = new_machine()
    events = [*machine.start(), *machine.feed("All of it."), *machine.close(NOW)]
    events += machine.fail(errors.StoreError("The server could not keep the response."))
    assert replay(events)["output"][0]["status"] == "completed"
    assert check_stream(events)["status"] == "failed"
