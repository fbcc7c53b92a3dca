"""Tests of the synthesis of an event stream from a final response."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import errors, outputs
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.state_machine import StateMachine
from responses_kit.protocol.synthesis import synthesize_events

from ..support.conformance import check_stream
from ..support.strategies import legal_outputs
from .test_state_machine import NOW, fresh_response

ENDINGS = {
    "end": lambda machine: machine.close(NOW) + machine.end(),
    "fail": lambda machine: machine.fail(errors.ModelError("The model failed.")),
    "cancel": lambda machine: machine.cancel(),
    "close, fail": lambda machine: machine.close(NOW) + machine.fail(errors.StoreError("The store failed.")),
    "close, cancel": lambda machine: machine.close(NOW) + machine.cancel(),
}
"""All ways to end a response."""


def encrypted(text: str) -> str:
    return f"encrypted<{len(text)}>"


def final_response(script: list[Any], ending: str, **settings: Any) -> dict[str, Any]:
    """Return the final object as a store returns it."""
    machine = StateMachine(fresh_response(), new_id=new_id, **settings)
    machine.start()
    for output in script:
        try:
            machine.feed(output)
        except errors.IllegalOutput:
            continue
    ENDINGS[ending](machine)
    response: dict[str, Any] = json.loads(json.dumps(machine.response))
    return response


def check(response: dict[str, Any]) -> None:
    before = copy.deepcopy(response)
    events = json.loads(json.dumps(synthesize_events(response)))
    assert check_stream(events) == before
    assert response == before, "the stored object was changed"


@given(
    script=st.lists(legal_outputs, max_size=12),
    ending=st.sampled_from(list(ENDINGS)),
    finish=st.sampled_from([None, "max_output_tokens", "content_filter"]),
    encrypt=st.sampled_from([None, encrypted]),
    stream_reasoning=st.booleans(),
)
def test_any_final_response_replays_to_exactly_itself(
    script: list[Any], ending: str, finish: str | None, encrypt: Any, stream_reasoning: bool
) -> None:
    last = [] if finish is None else [outputs.Finish(finish)]  # type: ignore[arg-type]  # one of its literals
    check(final_response([*script, *last], ending, encrypt=encrypt, stream_reasoning=stream_reasoning))


SCRIPTS: dict[str, list[Any]] = {
    "nothing": [],
    "a text": ["Hello, ", "world."],
    "an empty text": [""],
    "a phase": [outputs.Message("commentary"), "Let me see.", outputs.Message("final_answer"), "Yes."],
    "an empty message": [outputs.Message()],
    "text and refusal in turns": ["a", outputs.Refusal("b"), "c", outputs.Refusal("d")],
    "notes and likelihoods": [
        outputs.Text("me", [outputs.LogProb("me", -0.25, b"me", [outputs.LogProb("it", float("-inf"), b"it")])]),
        outputs.Annotation("https://example.org", "Example", 0, 2),
        outputs.Annotation("https://example.com", "Other", 1, 2),
        " see",
    ],
    "raw reasoning": [outputs.Reasoning("Hm."), "Yes."],
    "reasoning alone": [outputs.Reasoning("Hm.")],
    "summaries": [
        outputs.ReasoningSummary("First."),
        outputs.ReasoningSummary("Second.", new_part=True),
        outputs.ReasoningSummary("", new_part=True),
    ],
    "reasoning and summaries in turns": [
        outputs.Reasoning("one"),
        outputs.ReasoningSummary("two"),
        outputs.Reasoning("three"),
        outputs.ReasoningSummary("four"),
    ],
    "reasoning twice": [outputs.Reasoning("one"), "a", outputs.ReasoningSummary("two"), outputs.Reasoning("three")],
    "calls side by side": [
        outputs.ToolCall("f", '{"x"', "a"),
        outputs.ToolCall("g"),
        outputs.ToolArguments(": 1}", "a"),
    ],
    "calls that were cut": [outputs.ToolCall("f", '{"x"', "a"), outputs.ToolCall("g", "[", "b")],
    "calls in rounds": [outputs.ToolCall("f"), "a", outputs.ToolCall("g"), outputs.ToolCall("h", "{}")],
    "extensions": [
        outputs.Item("acme:note", {"n": [1, None], "encrypted_content": "theirs"}),
        outputs.Item("acme:note", {}, "failed"),
        outputs.Item("acme:open", {"a": 1}, "in_progress", key="k"),
        outputs.Item("acme:open", {"a": 2}, "in_progress", key="l"),
        outputs.Item("acme:open", {"a": 3}, "done", key="k"),
    ],
    "an extension that was cut": [outputs.Item("acme:open", {"a": 1}, "in_progress", key="k")],
    "usage": ["a", outputs.Usage(3, 2, 1, 1)],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("encrypt", [None, encrypted], ids=["plain", "encrypted"])
def test_every_response_content_is_synthesized(script: list[Any], encrypt: Any) -> None:
    for ending in ENDINGS:
        check(final_response(script, ending, encrypt=encrypt))
    for ending in ("end", "close, fail"):
        check(final_response([*script, outputs.Finish("max_output_tokens")], ending, encrypt=encrypt))


def test_queued_response_is_synthesized_without_queued_event() -> None:
    machine = StateMachine(fresh_response() | {"background": True}, new_id=new_id)
    machine.queue()
    machine.start()
    machine.feed("Hi")
    machine.close(NOW)
    machine.end()
    check(json.loads(json.dumps(machine.response)))
