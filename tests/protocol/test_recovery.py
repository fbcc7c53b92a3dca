"""Tests of the recovery of a state machine from its event log."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import errors, outputs
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.recovery import recover
from responses_kit.protocol.state_machine import TERMINAL_EVENT_TYPES, Event, StateMachine

from ..support.conformance import check_stream
from ..support.strategies import garbage, legal_outputs
from .test_state_machine import NOW, act, fresh_response, kinds, new_machine, settle, snapshot

ALL_OUTPUTS: list[outputs.Output] = [
    outputs.ReasoningSummary("First. "),
    outputs.ReasoningSummary("Second.", new_part=True),
    outputs.Reasoning("Hm, "),
    outputs.Reasoning("yes."),
    outputs.Message("commentary"),
    "Let ",
    outputs.Text("me see.", [outputs.LogProb("me", -0.25, b"me", [outputs.LogProb("it", float("-inf"), b"it")])]),
    outputs.Annotation("https://example.org", "Example", 0, 3),
    outputs.Refusal("No "),
    outputs.Refusal("more."),
    "",
    "\U0001f600",
    outputs.ToolCall("f", '{"x"', "a"),
    outputs.ToolCall("g"),
    outputs.ToolCall("h", '{"z": 3}'),
    outputs.ToolArguments(": 1}", "a"),
    outputs.Item("acme:note", {"n": [1, None]}),
    outputs.Event("acme:progress", {"response": 5, "item": None}),
    "Bye",
]
"""A script with all types of outputs, except extension items in progress."""

EARLY_ENDS = ["fail", "cancel"]


def log_of(script: list[outputs.Output], *, queued: bool = False, ending: str = "", **settings: Any) -> list[Event]:
    """Return the logged events of a stream, which lack the terminal event."""
    machine = StateMachine(fresh_response(), new_id=new_id, **settings)
    logged = machine.queue() if queued else []
    logged += machine.start()
    for output in script:
        try:
            logged += machine.feed(output)
        except errors.IllegalOutput:
            continue
    logged += settle(machine, ending) if ending else []
    assert json.loads(json.dumps(logged)) == logged
    return [event for event in json.loads(json.dumps(logged)) if event["type"] not in TERMINAL_EVENT_TYPES]


def recovered(events: list[Event], **settings: Any) -> StateMachine:
    return recover(fresh_response(), events, new_id=new_id, **settings)


def check_early_end(logged: list[Event], action: str, **settings: Any) -> tuple[list[Event], dict[str, Any]]:
    """Recover, end early and check the complete stream; return the last events and the final object."""
    before = copy.deepcopy(logged)
    machine = recovered(logged, **settings)
    rest = act(machine, action)
    response = check_stream(before + json.loads(json.dumps(rest)))
    assert response == machine.response
    assert machine.state == "ended"
    assert logged == before
    return rest, response


# Streams that end at any event.


@given(
    script=st.lists(legal_outputs, max_size=12),
    place=st.floats(0, 1),
    queued=st.booleans(),
    ending=st.sampled_from(["", "close end", "close fail", "fail", "cancel"]),
    action=st.sampled_from(EARLY_ENDS),
    logged_reasoning=st.booleans(),
    streams_reasoning=st.booleans(),
    stream_extensions=st.booleans(),
    encrypted=st.booleans(),
)
def test_stream_cut_anywhere_ends_legally_and_replays_to_final_object(
    script: list[Any],
    place: float,
    queued: bool,
    ending: str,
    action: str,
    logged_reasoning: bool,
    streams_reasoning: bool,
    stream_extensions: bool,
    encrypted: bool,
) -> None:
    encrypt = (lambda text: f"encrypted<{len(text)}>") if encrypted else None
    logged = log_of(
        script,
        queued=queued,
        ending=ending,
        stream_reasoning=logged_reasoning,
        stream_extensions=stream_extensions,
        encrypt=encrypt,
    )
    cut = round(place * len(logged))
    check_early_end(logged[:cut], action, stream_reasoning=streams_reasoning, encrypt=encrypt)


CUTS = list(
    range(len(log_of(ALL_OUTPUTS, queued=True, ending="fail", stream_reasoning=True, stream_extensions=True)) + 1)
)


@pytest.mark.parametrize("cut", CUTS)
def test_stream_with_every_event_can_be_cut_at_each_event(cut: int) -> None:
    logged = log_of(ALL_OUTPUTS, queued=True, ending="fail", stream_reasoning=True, stream_extensions=True)
    for action in EARLY_ENDS:
        _, response = check_early_end(logged[:cut], action)
        assert response["status"] == ("failed" if cut == CUTS[-1] or action == "fail" else "cancelled")


@pytest.mark.parametrize("action", EARLY_ENDS)
def test_recovered_response_without_error_events_emits_terminal_event_only(action: str) -> None:
    logged = log_of(["half an ans"])
    machine = recovered(logged, error_events=False)
    rest = act(machine, action)
    assert "error" not in kinds(rest)
    assert check_stream(logged + rest, error_events=False) == machine.response


@pytest.mark.parametrize(
    ("logged", "rest"),
    [
        ([], ["created", "in_progress"]),
        (["created"], ["in_progress"]),
        (["created", "queued"], ["in_progress"]),
        (["created", "queued", "in_progress"], []),
    ],
)
def test_queued_response_is_created_once(logged: list[str], rest: list[str]) -> None:
    log = log_of([], queued=True)[: len(logged)]
    assert kinds(log) == logged
    for action, last in (("fail", ["error", "failed"]), ("cancel", ["incomplete"])):
        assert kinds(check_early_end(log, action)[0]) == rest + last
    machine = recovered(log)
    assert machine.response["status"] == ("queued" if machine.state == "queued" else "in_progress")
    started = machine.start() if rest else []
    assert kinds(started) == rest
    events = log + started + machine.feed("Here I am.") + settle(machine, "close end")
    assert check_stream(events) == machine.response


@pytest.mark.parametrize("action", EARLY_ENDS)
def test_logged_error_determines_end(action: str) -> None:
    logged = log_of(["half an ans"], ending="fail")
    assert kinds(logged)[-1] == "error"
    machine = recovered(logged)
    with pytest.raises(errors.IllegalOutput):
        machine.feed("more")
    assert kinds(machine.preview_end()) == ["failed"]
    rest = machine.fail(errors.ServerError("Another one.")) if action == "fail" else machine.cancel()
    assert kinds(rest) == ["failed"]
    response = check_stream(logged + rest)
    assert response == machine.response
    assert response["error"] == {"code": "model_error", "message": "It broke."}


# The recovered state.


def counted(count: Iterator[int]) -> Callable[[str], str]:
    return lambda prefix: f"{prefix}_{next(count)}"


def state_of(machine: StateMachine) -> dict[str, Any]:
    return {slot: snapshot(getattr(machine, slot)) for slot in StateMachine.__slots__ if slot != "_new_id"}


def test_recovered_machine_has_same_state_as_original() -> None:
    other = new_machine(stream_reasoning=True, stream_extensions=True)
    logged = other.start()
    for output in ALL_OUTPUTS:
        logged += other.feed(output)
        machine = recovered(logged, stream_reasoning=True, stream_extensions=True)
        assert state_of(machine) == state_of(other)
        assert machine.response is not other.response


@given(
    script=st.lists(legal_outputs, max_size=10),
    more=st.lists(legal_outputs, max_size=4),
    ending=st.sampled_from(["close end", "fail", "cancel"]),
)
def test_recovered_machine_accepts_further_outputs(script: list[Any], more: list[Any], ending: str) -> None:
    # State without events is excluded: keys, token counts and the finish reason.
    recoverable = [
        outputs.Item(output.type, output.fields) if isinstance(output, outputs.Item) else output
        for output in script
        if not isinstance(output, outputs.Usage | outputs.Finish)
    ]
    first, second = itertools.tee(itertools.count(1_000))
    other = StateMachine(fresh_response(), new_id=new_id, stream_reasoning=True)
    logged = other.start()
    for output in recoverable:
        try:
            logged += other.feed(output)
        except errors.IllegalOutput:
            continue
    machine = recover(fresh_response(), logged, new_id=counted(first), stream_reasoning=True)
    other._new_id = counted(second)
    for output in more:
        try:
            events = other.feed(output)
        except errors.IllegalOutput:
            with pytest.raises(errors.IllegalOutput):
                machine.feed(output)
            continue
        assert machine.feed(output) == events
    assert settle(machine, ending) == settle(other, ending)
    assert machine.response == other.response


def test_pending_closing_events_are_emitted_first() -> None:
    logged = log_of(["Yes, ", outputs.Refusal("but no.")])
    cut = kinds(logged).index("output_text.done") + 1
    machine = recovered(logged[:cut])
    with pytest.raises(errors.IllegalOutput):
        machine.feed(outputs.ToolArguments("{}"))
    events = machine.feed("Well.")
    assert kinds(events) == ["content_part.done", "content_part.added", "output_text.delta"]
    events += settle(machine, "close end")
    assert check_stream(logged[:cut] + events) == machine.response
    machine = recovered(logged[:cut])
    assert kinds(machine.close(NOW)) == ["content_part.done", "output_item.done"]


@pytest.mark.parametrize(("arguments", "status"), [('{"x": 1}', "completed"), ('{"x', "incomplete")])
@pytest.mark.parametrize("action", EARLY_ENDS)
def test_call_with_finished_arguments_is_completed(arguments: str, status: str, action: str) -> None:
    logged = log_of([outputs.ToolCall("f", arguments, "a"), outputs.ToolCall("g", "{", "b"), "text"])
    cut = kinds(logged).index("function_call_arguments.done") + 1
    rest, response = check_early_end(logged[:cut], action)
    assert kinds(rest)[:3] == ["output_item.done", "function_call_arguments.done", "output_item.done"]
    assert [item["status"] for item in response["output"]] == [status, "incomplete"]


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_only_last_open_extension_item_is_incomplete(cut: int) -> None:
    items = [outputs.Item("acme:call", {"n": n}, "in_progress", key) for n, key in enumerate("klm")]
    logged = log_of([*items, outputs.Item("acme:call", {"n": 9}, "completed", "k")])
    assert kinds(logged)[2:] == ["output_item.added"] * 3 + ["output_item.done"]
    _, response = check_early_end(logged[: 2 + cut], "fail")
    last = {1: [("incomplete", 0)], 2: [("failed", 0), ("incomplete", 1)]}
    complete = [("failed", 0), ("failed", 1), ("incomplete", 2)]
    assert [(item["status"], item["n"]) for item in response["output"]] == last.get(
        cut, complete if cut == 3 else [("completed", 9), *complete[1:]]
    )


def test_unlogged_reasoning_is_lost_and_logged_reasoning_is_encrypted() -> None:
    def encrypted(text: str) -> str:
        return f"encrypted<{text}>"

    script: list[outputs.Output] = [outputs.Reasoning("Hm."), outputs.ReasoningSummary("Sum.")]
    logged = log_of(script, stream_reasoning=True)
    _, response = check_early_end(logged, "fail", encrypt=encrypted)
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert response["output"][0]["encrypted_content"] == "encrypted<Hm.>"

    silent = log_of(script, stream_reasoning=False)
    _, response = check_early_end(silent, "fail", encrypt=encrypted, stream_reasoning=True)
    assert response["output"][0]["content"] == []
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "Sum."}]
    assert "encrypted_content" not in response["output"][0]


@pytest.mark.parametrize("streamed_before", [True, False])
@pytest.mark.parametrize("streams_now", [True, False])
def test_logged_reasoning_does_not_change_stream_setting(streamed_before: bool, streams_now: bool) -> None:
    logged = log_of([outputs.Reasoning("Hm."), "Yes."], stream_reasoning=streamed_before)
    machine = recovered(logged, stream_reasoning=streams_now)
    events = machine.feed(outputs.Reasoning("Or no?"))
    assert ("reasoning.delta" in kinds(events)) is streams_now
    assert check_stream(logged + events + settle(machine, "close end")) == machine.response


def test_reasoning_logged_with_its_item_is_kept() -> None:
    logged = log_of([outputs.Reasoning("Hm."), "Yes."], encrypt=lambda text: f"encrypted<{text}>")
    _, response = check_early_end(logged, "cancel")
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert response["output"][0]["encrypted_content"] == "encrypted<Hm.>"


# Logs that no machine could have written.


def test_response_with_output_or_other_id_is_refused() -> None:
    logged = log_of(["text"])
    with pytest.raises(ValueError, match="output is not empty"):
        recover(fresh_response() | {"output": [{}]}, logged, new_id=new_id)
    with pytest.raises(ValueError, match="event 0"):
        recover(fresh_response() | {"id": "resp_2"}, logged, new_id=new_id)


def test_refused_log_names_event_without_content() -> None:
    logged = log_of(["sesame", outputs.Refusal("no")])
    logged[4]["delta"] = "open sesame"
    with pytest.raises(ValueError, match="event 5") as caught:
        recovered(logged)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda log: log.pop(0), id="missing start"),
        pytest.param(lambda log: log.pop(1), id="not in progress"),
        pytest.param(lambda log: log.pop(-2), id="missing event"),
        pytest.param(lambda log: log.append(log[-1]), id="repeated event"),
        pytest.param(lambda log: log.reverse(), id="reversed"),
        pytest.param(lambda log: log.append(None), id="null"),
        pytest.param(lambda log: log.append([]), id="list"),
        pytest.param(lambda log: log.append({}), id="empty object"),
        pytest.param(lambda log: log[-1].pop("delta"), id="missing member"),
        pytest.param(lambda log: log[-1].update(delta=7), id="delta of wrong type"),
        pytest.param(lambda log: log[-1].update(logprobs="abc"), id="logprobs of wrong type"),
        pytest.param(lambda log: log[-1].update(item_id="msg_other"), id="wrong item"),
        pytest.param(lambda log: log[-1].update(type="response.output_text.dalta"), id="unknown event type"),
        pytest.param(lambda log: log[-1].update(type=["response.output_text.delta"]), id="event type of wrong type"),
        pytest.param(lambda log: log[2]["item"].update(type="image"), id="unknown item type"),
        pytest.param(lambda log: log[2]["item"].update(id=7), id="item id of wrong type"),
        pytest.param(lambda log: log[3]["part"].update(type="image"), id="unknown part type"),
    ],
)
def test_corrupt_log_is_refused(spoil: Callable[[list[Any]], Any]) -> None:
    log: list[Any] = log_of(["a", "b"])
    spoil(log)
    with pytest.raises(ValueError, match=r"event \d+ is not legal"):
        recovered(log)


@pytest.mark.parametrize("script", [[], ["text"], [outputs.ToolCall("f", "{}")]])
@pytest.mark.parametrize("kind", sorted(TERMINAL_EVENT_TYPES))
def test_finished_stream_is_refused(kind: str, script: list[outputs.Output]) -> None:
    logged = log_of(script)
    last = {"type": kind, "sequence_number": len(logged), "response": fresh_response()}
    with pytest.raises(ValueError, match=f"event {len(logged)}"):
        recovered([*logged, last])


@pytest.mark.parametrize("event_count", [0, 1, 2])
def test_events_outside_in_progress_are_refused(event_count: int) -> None:
    log = log_of([], queued=True)[:event_count]
    for event in ({"type": "acme:progress"}, {"type": "error", "error": {"message": "It broke.", "code": "c"}}):
        with pytest.raises(ValueError, match=f"event {event_count}"):
            recovered([*log, event | {"sequence_number": event_count}])


REASONING = {"type": "reasoning", "id": "rs_9", "status": "in_progress", "summary": [], "content": []}
OPEN: list[outputs.Output] = ["text", outputs.ToolCall("f"), outputs.Item("acme:x", {}, "in_progress", "k")]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param({"type": "response.output_item.added", "output_index": 1, "item": REASONING}, id="reasoning"),
        pytest.param({"type": "error", "error": {"message": "It broke.", "code": "c"}}, id="error"),
    ],
)
@pytest.mark.parametrize("output", OPEN, ids=["message", "call", "extension item"])
def test_open_items_are_closed_before_reasoning_or_error(output: Any, event: Event) -> None:
    logged = log_of([output])
    with pytest.raises(ValueError, match=f"event {len(logged)}"):
        recovered([*logged, event | {"sequence_number": len(logged)}])


@pytest.mark.parametrize("item_id", [7, None, True, []])
def test_item_id_must_be_string(item_id: Any) -> None:
    for output in ("text", outputs.ToolCall("f"), outputs.Item("acme:x"), outputs.ReasoningSummary("Sum.")):
        logged = log_of([output])[:3]
        logged[2]["item"]["id"] = item_id
        with pytest.raises(ValueError, match="event 2"):
            recovered(logged)


def extension(index: int, action: str, status: str, item_id: str = "item_9") -> Event:
    kind = f"response.output_item.{action}"
    return {"type": kind, "output_index": index, "item": {"type": "acme:x", "id": item_id, "status": status}}


@pytest.mark.parametrize(
    ("script", "event"),
    [
        pytest.param(["text"], extension(1, "added", "in_progress"), id="beside an open message"),
        pytest.param([], extension(0, "added", "completed"), id="added as completed"),
        pytest.param([], extension(0, "done", "completed"), id="done and never added"),
        pytest.param([outputs.Item("acme:x", {}, "in_progress", "k")], extension(0, "done", "completed"), id="no such"),
        pytest.param([], {"type": "error", "error": {"message": "It broke."}}, id="an error without a code"),
        pytest.param([outputs.ToolCall("f")], {"type": "response.output_item.done"}, id="no item in it"),
        pytest.param(
            [],
            {"type": "response.function_call_arguments.done", "item_id": "fc_1", "output_index": 0, "arguments": ""},
            id="arguments of no call",
        ),
        pytest.param(
            [outputs.ToolCall("f")],
            {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "output_index": 0, "delta": "{}"},
            id="arguments of another call",
        ),
    ],
)
def test_illegal_event_is_refused(script: list[outputs.Output], event: Event) -> None:
    logged = log_of(script)
    with pytest.raises(ValueError, match=f"event {len(logged)}"):
        recovered([*logged, event | {"sequence_number": len(logged)}])


@pytest.mark.parametrize("status", ["in_progress", "", None, "incomplete", []])
def test_finished_extension_item_must_have_final_status(status: Any) -> None:
    logged = log_of([outputs.Item("acme:x", {}, "in_progress", key) for key in "kl"])
    done = extension(0, "done", status, logged[2]["item"]["id"])
    with pytest.raises(ValueError, match="event 4"):
        recovered([*logged, done | {"sequence_number": 4}])


@pytest.mark.parametrize("status", ["in_progress", "failed", None])
def test_finished_standard_item_is_completed_or_incomplete(status: Any) -> None:
    for script in (["a"], [outputs.ToolCall("f")], [outputs.Reasoning("a")]):
        logged = log_of([*script, outputs.Message()])
        at = kinds(logged).index("output_item.done")
        logged[at]["item"]["status"] = status
        with pytest.raises(ValueError, match=f"event {at}"):
            recovered(logged)


@given(script=st.lists(legal_outputs, max_size=8), data=st.data())
def test_log_with_lost_or_reordered_events_is_refused_or_ended_legally(script: list[Any], data: Any) -> None:
    log = log_of(script, stream_reasoning=True, ending=data.draw(st.sampled_from(["", "close end", "fail"])))
    at, to = data.draw(st.integers(0, len(log) - 1)), data.draw(st.integers(0, len(log) - 1))
    match data.draw(st.sampled_from(["lost", "twice", "moved", "swapped"])):
        case "lost":
            del log[at]
        case "twice":
            log.insert(to, copy.deepcopy(log[at]))
        case "moved":
            log.insert(to, log.pop(at))
        case "swapped":
            log[at], log[to] = log[to], log[at]
    log = [event | {"sequence_number": number} for number, event in enumerate(log)]
    try:
        recovered(log)
    except ValueError:
        return
    for action in EARLY_ENDS:
        check_early_end(log, action)


def members(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each object or list with each of its keys, recursively."""
    if isinstance(value, dict | list):
        for key, member in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from members(member)


@given(script=st.lists(legal_outputs, max_size=8), data=st.data())
def test_log_with_any_content_is_refused_or_ended(script: list[Any], data: Any) -> None:
    log = log_of(script, stream_reasoning=True, stream_extensions=True)
    holder, key = data.draw(st.sampled_from(list(members(log))))
    if data.draw(st.booleans()):
        holder[key] = data.draw(garbage)
    else:
        del holder[key]
    try:
        machine = recovered(log)
    except ValueError:
        return
    rest = act(machine, data.draw(st.sampled_from(EARLY_ENDS)))
    assert [event["sequence_number"] for event in rest] == list(range(len(log), len(log) + len(rest)))
    assert machine.state == "ended"
