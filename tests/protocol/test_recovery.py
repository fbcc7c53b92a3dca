"""A restored machine: it stands where the one stood that told the events, and ends what that one could not."""

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
from responses_kit.protocol.state_machine import TERMINAL, Event, StateMachine

from ..support.conformance import check_stream
from ..support.strategies import garbage, legal_outputs
from .test_state_machine import NOW, act, fresh_response, kinds, new_machine, settle, snapshot

EVERYTHING: list[outputs.Output] = [
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
"""All that can be told, but for extension items that end by a key."""

BREAKS = ["fail", "cancel"]


def tell(script: list[outputs.Output], *, queued: bool = False, ending: str = "", **settings: Any) -> list[Event]:
    """A stream as its log has it: up to, and without, its terminal event."""
    machine = StateMachine(fresh_response(), new_id=new_id, **settings)
    told = machine.queue() if queued else []
    told += machine.start()
    for output in script:
        try:
            told += machine.feed(output)
        except errors.IllegalOutput:
            continue
    told += settle(machine, ending) if ending else []
    assert json.loads(json.dumps(told)) == told
    return [event for event in json.loads(json.dumps(told)) if event["type"] not in TERMINAL]


def restore(events: list[Event], **settings: Any) -> StateMachine:
    return recover(fresh_response(), events, new_id=new_id, **settings)


def check_break(told: list[Event], action: str, **settings: Any) -> tuple[list[Event], dict[str, Any]]:
    """Restores, breaks off, and judges the whole stream; returns what was told last, and the final object."""
    before = copy.deepcopy(told)
    machine = restore(told, **settings)
    rest = act(machine, action)
    response = check_stream(before + json.loads(json.dumps(rest)))
    assert response == machine.response
    assert machine.state == "ended"
    assert told == before
    return rest, response


# Any stream, cut anywhere.


@given(
    script=st.lists(legal_outputs, max_size=12),
    place=st.floats(0, 1),
    queued=st.booleans(),
    ending=st.sampled_from(["", "close end", "close fail", "fail", "cancel"]),
    action=st.sampled_from(BREAKS),
    told_reasoning=st.booleans(),
    more_reasoning=st.booleans(),
    stream_extensions=st.booleans(),
    sealed=st.booleans(),
)
def test_a_stream_that_was_cut_anywhere_is_ended_legally_and_replays_to_the_final_object(
    script: list[Any],
    place: float,
    queued: bool,
    ending: str,
    action: str,
    told_reasoning: bool,
    more_reasoning: bool,
    stream_extensions: bool,
    sealed: bool,
) -> None:
    seal = (lambda text: f"sealed<{len(text)}>") if sealed else None
    told = tell(
        script,
        queued=queued,
        ending=ending,
        stream_reasoning=told_reasoning,
        stream_extensions=stream_extensions,
        encrypt=seal,
    )
    cut = round(place * len(told))
    check_break(told[:cut], action, stream_reasoning=more_reasoning, encrypt=seal)


CUTS = list(range(len(tell(EVERYTHING, queued=True, ending="fail", stream_reasoning=True, stream_extensions=True)) + 1))


@pytest.mark.parametrize("cut", CUTS)
def test_a_stream_with_everything_in_it_can_be_cut_at_each_event(cut: int) -> None:
    told = tell(EVERYTHING, queued=True, ending="fail", stream_reasoning=True, stream_extensions=True)
    for action in BREAKS:
        _, response = check_break(told[:cut], action)
        assert response["status"] == ("failed" if cut == CUTS[-1] or action == "fail" else "cancelled")


@pytest.mark.parametrize("action", BREAKS)
def test_without_error_events_a_restored_response_fails_by_its_terminal_event_alone(action: str) -> None:
    told = tell(["half an ans"])
    machine = restore(told, error_events=False)
    rest = act(machine, action)
    assert "error" not in kinds(rest)
    assert check_stream(told + rest, error_events=False) == machine.response


@pytest.mark.parametrize(
    ("told", "rest"),
    [
        ([], ["created", "in_progress"]),
        (["created"], ["in_progress"]),
        (["created", "queued"], ["in_progress"]),
        (["created", "queued", "in_progress"], []),
    ],
)
def test_a_response_that_waited_for_a_worker_begins_once(told: list[str], rest: list[str]) -> None:
    log = tell([], queued=True)[: len(told)]
    assert kinds(log) == told
    for action, last in (("fail", ["error", "failed"]), ("cancel", ["incomplete"])):
        assert kinds(check_break(log, action)[0]) == rest + last
    machine = restore(log)
    assert machine.response["status"] == ("queued" if machine.state == "queued" else "in_progress")
    begun = machine.start() if rest else []
    assert kinds(begun) == rest
    events = log + begun + machine.feed("Here I am.") + settle(machine, "close end")
    assert check_stream(events) == machine.response


@pytest.mark.parametrize("action", BREAKS)
def test_an_error_that_was_told_is_how_the_response_ends(action: str) -> None:
    told = tell(["half an ans"], ending="fail")
    assert kinds(told)[-1] == "error"
    machine = restore(told)
    with pytest.raises(errors.IllegalOutput):
        machine.feed("more")
    assert kinds(machine.ending()) == ["failed"]
    rest = machine.fail(errors.ServerError("Another one.")) if action == "fail" else machine.cancel()
    assert kinds(rest) == ["failed"]
    response = check_stream(told + rest)
    assert response == machine.response
    assert response["error"] == {"code": "model_error", "message": "It broke."}


# Where it stands.


def counted(count: Iterator[int]) -> Callable[[str], str]:
    return lambda prefix: f"{prefix}_{next(count)}"


def standing(machine: StateMachine) -> dict[str, Any]:
    return {slot: snapshot(getattr(machine, slot)) for slot in StateMachine.__slots__ if slot != "_new_id"}


def test_after_any_output_it_stands_where_the_other_one_stood() -> None:
    other = new_machine(stream_reasoning=True, stream_extensions=True)
    told = other.start()
    for output in EVERYTHING:
        told += other.feed(output)
        machine = restore(told, stream_reasoning=True, stream_extensions=True)
        assert standing(machine) == standing(other)
        assert machine.response is not other.response


@given(
    script=st.lists(legal_outputs, max_size=10),
    more=st.lists(legal_outputs, max_size=4),
    ending=st.sampled_from(["close end", "fail", "cancel"]),
)
def test_between_two_outputs_it_can_be_fed_on_as_the_other_one(script: list[Any], more: list[Any], ending: str) -> None:
    # What is never told is left out: keys, token counts and the reason to finish.
    known = [
        outputs.Item(output.type, output.fields) if isinstance(output, outputs.Item) else output
        for output in script
        if not isinstance(output, outputs.Usage | outputs.Finish)
    ]
    first, second = itertools.tee(itertools.count(1_000))
    other = StateMachine(fresh_response(), new_id=new_id, stream_reasoning=True)
    told = other.start()
    for output in known:
        try:
            told += other.feed(output)
        except errors.IllegalOutput:
            continue
    machine = recover(fresh_response(), told, new_id=counted(first), stream_reasoning=True)
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


def test_the_rest_of_a_closing_is_told_before_what_comes_next() -> None:
    told = tell(["Yes, ", outputs.Refusal("but no.")])
    cut = kinds(told).index("output_text.done") + 1
    machine = restore(told[:cut])
    with pytest.raises(errors.IllegalOutput):
        machine.feed(outputs.ToolArguments("{}"))
    events = machine.feed("Well.")
    assert kinds(events) == ["content_part.done", "content_part.added", "output_text.delta"]
    events += settle(machine, "close end")
    assert check_stream(told[:cut] + events) == machine.response
    machine = restore(told[:cut])
    assert kinds(machine.close(NOW)) == ["content_part.done", "output_item.done"]


@pytest.mark.parametrize(("arguments", "status"), [('{"x": 1}', "completed"), ('{"x', "incomplete")])
@pytest.mark.parametrize("action", BREAKS)
def test_a_call_whose_arguments_are_done_is_complete_where_they_are(arguments: str, status: str, action: str) -> None:
    told = tell([outputs.ToolCall("f", arguments, "a"), outputs.ToolCall("g", "{", "b"), "text"])
    cut = kinds(told).index("function_call_arguments.done") + 1
    rest, response = check_break(told[:cut], action)
    assert kinds(rest)[:3] == ["output_item.done", "function_call_arguments.done", "output_item.done"]
    assert [item["status"] for item in response["output"]] == [status, "incomplete"]


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_of_extension_items_that_were_open_only_the_last_is_incomplete(cut: int) -> None:
    items = [outputs.Item("acme:call", {"n": n}, "in_progress", key) for n, key in enumerate("klm")]
    told = tell([*items, outputs.Item("acme:call", {"n": 9}, "completed", "k")])
    assert kinds(told)[2:] == ["output_item.added"] * 3 + ["output_item.done"]
    _, response = check_break(told[: 2 + cut], "fail")
    last = {1: [("incomplete", 0)], 2: [("failed", 0), ("incomplete", 1)]}
    whole = [("failed", 0), ("failed", 1), ("incomplete", 2)]
    assert [(item["status"], item["n"]) for item in response["output"]] == last.get(
        cut, whole if cut == 3 else [("completed", 9), *whole[1:]]
    )


def test_reasoning_that_was_never_told_stays_away_and_what_was_told_is_sealed() -> None:
    def sealed(text: str) -> str:
        return f"sealed<{text}>"

    script: list[outputs.Output] = [outputs.Reasoning("Hm."), outputs.ReasoningSummary("Sum.")]
    told = tell(script, stream_reasoning=True)
    _, response = check_break(told, "fail", encrypt=sealed)
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert response["output"][0]["encrypted_content"] == "sealed<Hm.>"

    silent = tell(script, stream_reasoning=False)
    _, response = check_break(silent, "fail", encrypt=sealed, stream_reasoning=True)
    assert response["output"][0]["content"] == []
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "Sum."}]
    assert "encrypted_content" not in response["output"][0]


@pytest.mark.parametrize("told_before", [True, False])
@pytest.mark.parametrize("told_from_now_on", [True, False])
def test_whether_reasoning_was_told_does_not_bind_what_comes(told_before: bool, told_from_now_on: bool) -> None:
    told = tell([outputs.Reasoning("Hm."), "Yes."], stream_reasoning=told_before)
    machine = restore(told, stream_reasoning=told_from_now_on)
    events = machine.feed(outputs.Reasoning("Or no?"))
    assert ("reasoning.delta" in kinds(events)) is told_from_now_on
    assert check_stream(told + events + settle(machine, "close end")) == machine.response


def test_silent_reasoning_that_was_told_with_its_item_is_kept() -> None:
    told = tell([outputs.Reasoning("Hm."), "Yes."], encrypt=lambda text: f"sealed<{text}>")
    _, response = check_break(told, "cancel")
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert response["output"][0]["encrypted_content"] == "sealed<Hm.>"


# Logs that no machine has told.


def test_a_response_that_has_output_already_or_is_another_one_is_refused() -> None:
    told = tell(["text"])
    with pytest.raises(ValueError, match="no output"):
        recover(fresh_response() | {"output": [{}]}, told, new_id=new_id)
    with pytest.raises(ValueError, match="event 0"):
        recover(fresh_response() | {"id": "resp_2"}, told, new_id=new_id)


def test_a_refused_log_is_named_by_its_event_and_not_by_what_it_holds() -> None:
    told = tell(["sesame", outputs.Refusal("no")])
    told[4]["delta"] = "open sesame"
    with pytest.raises(ValueError, match="event 5") as caught:
        restore(told)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda log: log.pop(0), id="no beginning"),
        pytest.param(lambda log: log.pop(1), id="not in progress"),
        pytest.param(lambda log: log.pop(-2), id="a gap"),
        pytest.param(lambda log: log.append(log[-1]), id="an event twice"),
        pytest.param(lambda log: log.reverse(), id="the wrong way round"),
        pytest.param(lambda log: log.append(None), id="no event"),
        pytest.param(lambda log: log.append([]), id="a list"),
        pytest.param(lambda log: log.append({}), id="nothing in it"),
        pytest.param(lambda log: log[-1].pop("delta"), id="a member missing"),
        pytest.param(lambda log: log[-1].update(delta=7), id="a delta that is no text"),
        pytest.param(lambda log: log[-1].update(logprobs="abc"), id="log probabilities that are none"),
        pytest.param(lambda log: log[-1].update(item_id="msg_other"), id="another item"),
        pytest.param(lambda log: log[-1].update(type="response.output_text.dalta"), id="an unknown type"),
        pytest.param(lambda log: log[-1].update(type=["response.output_text.delta"]), id="a type that is no text"),
        pytest.param(lambda log: log[2]["item"].update(type="image"), id="an unknown item"),
        pytest.param(lambda log: log[2]["item"].update(id=7), id="an id that is no text"),
        pytest.param(lambda log: log[3]["part"].update(type="image"), id="an unknown part"),
    ],
)
def test_a_log_that_is_spoilt_is_refused(spoil: Callable[[list[Any]], Any]) -> None:
    log: list[Any] = tell(["a", "b"])
    spoil(log)
    with pytest.raises(ValueError, match=r"event \d+ is none"):
        restore(log)


@pytest.mark.parametrize("script", [[], ["text"], [outputs.ToolCall("f", "{}")]])
@pytest.mark.parametrize("kind", sorted(TERMINAL))
def test_a_stream_that_has_its_terminal_event_is_refused(kind: str, script: list[outputs.Output]) -> None:
    told = tell(script)
    last = {"type": kind, "sequence_number": len(told), "response": fresh_response()}
    with pytest.raises(ValueError, match=f"event {len(told)}"):
        restore([*told, last])


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_nothing_but_its_beginning_is_told_of_a_response_that_is_not_in_progress(begun: int) -> None:
    log = tell([], queued=True)[:begun]
    for event in ({"type": "acme:progress"}, {"type": "error", "error": {"message": "It broke.", "code": "c"}}):
        with pytest.raises(ValueError, match=f"event {begun}"):
            restore([*log, event | {"sequence_number": begun}])


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
def test_what_is_open_is_closed_before_reasoning_begins_or_an_error_is_told(output: Any, event: Event) -> None:
    told = tell([output])
    with pytest.raises(ValueError, match=f"event {len(told)}"):
        restore([*told, event | {"sequence_number": len(told)}])


@pytest.mark.parametrize("item_id", [7, None, True, []])
def test_an_item_has_an_id_that_is_text(item_id: Any) -> None:
    for output in ("text", outputs.ToolCall("f"), outputs.Item("acme:x"), outputs.ReasoningSummary("Sum.")):
        told = tell([output])[:3]
        told[2]["item"]["id"] = item_id
        with pytest.raises(ValueError, match="event 2"):
            restore(told)


def extension(index: int, what: str, status: str, item_id: str = "item_9") -> Event:
    kind = f"response.output_item.{what}"
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
def test_an_event_that_has_no_place_is_refused(script: list[outputs.Output], event: Event) -> None:
    told = tell(script)
    with pytest.raises(ValueError, match=f"event {len(told)}"):
        restore([*told, event | {"sequence_number": len(told)}])


@pytest.mark.parametrize("status", ["in_progress", "", None, "incomplete", []])
def test_an_extension_item_is_done_with_a_status_of_its_end(status: Any) -> None:
    told = tell([outputs.Item("acme:x", {}, "in_progress", key) for key in "kl"])
    done = extension(0, "done", status, told[2]["item"]["id"])
    with pytest.raises(ValueError, match="event 4"):
        restore([*told, done | {"sequence_number": 4}])


@pytest.mark.parametrize("status", ["in_progress", "failed", None])
def test_a_standard_item_is_done_as_completed_or_incomplete(status: Any) -> None:
    for script in (["a"], [outputs.ToolCall("f")], [outputs.Reasoning("a")]):
        told = tell([*script, outputs.Message()])
        at = kinds(told).index("output_item.done")
        told[at]["item"]["status"] = status
        with pytest.raises(ValueError, match=f"event {at}"):
            restore(told)


@given(script=st.lists(legal_outputs, max_size=8), data=st.data())
def test_a_log_whose_events_were_lost_or_mixed_up_is_refused_or_ended_legally(script: list[Any], data: Any) -> None:
    log = tell(script, stream_reasoning=True, ending=data.draw(st.sampled_from(["", "close end", "fail"])))
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
        restore(log)
    except ValueError:
        return
    for action in BREAKS:
        check_break(log, action)


def members(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every member of every object and list within."""
    if isinstance(value, dict | list):
        for key, member in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from members(member)


@given(script=st.lists(legal_outputs, max_size=8), data=st.data())
def test_a_log_with_anything_in_it_is_refused_or_ended(script: list[Any], data: Any) -> None:
    log = tell(script, stream_reasoning=True, stream_extensions=True)
    holder, key = data.draw(st.sampled_from(list(members(log))))
    if data.draw(st.booleans()):
        holder[key] = data.draw(garbage)
    else:
        del holder[key]
    try:
        machine = restore(log)
    except ValueError:
        return
    rest = act(machine, data.draw(st.sampled_from(BREAKS)))
    assert [event["sequence_number"] for event in rest] == list(range(len(log), len(log) + len(rest)))
    assert machine.state == "ended"
