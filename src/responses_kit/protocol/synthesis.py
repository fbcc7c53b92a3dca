"""Synthesis of the shortest event stream that builds a given final response."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

from .. import outputs
from ..errors import error_from_code
from .state_machine import Event, StateMachine

__all__ = ["synthesize_events"]

_UNFINISHED_MEMBERS: Final = {
    "status": "in_progress",
    "completed_at": None,
    "incomplete_details": None,
    "error": None,
    "usage": None,
}


def synthesize_events(response: dict[str, Any]) -> list[Event]:
    """Return a legal stream with exactly this response in its terminal event.

    Args:
        response: A final response object that a state machine has built.
    """
    items = response["output"]
    ids = iter([item["id"] for item in items])
    reasoning_items = (item for item in items if item["type"] == "reasoning")
    encrypted = [item["encrypted_content"] for item in reasoning_items if "encrypted_content" in item]
    payloads = iter(encrypted)
    machine = StateMachine(
        response | _UNFINISHED_MEMBERS | {"output": []},
        new_id=lambda prefix: next(ids),
        encrypt=(lambda text: next(payloads)) if encrypted else None,
    )
    events = machine.start()
    for item in items:
        for output in _outputs_of_item(item):
            events += machine.feed(output)
    machine.response["usage"] = response["usage"]
    status = response["status"]
    if status == "incomplete":
        events += machine.feed(outputs.Finish(response["incomplete_details"]["reason"]))
    if status in ("completed", "incomplete") or (items and items[-1]["status"] != "incomplete"):
        events += machine.close(response["completed_at"] or 0)
    if status == "failed":
        return [*events, *machine.fail(error_from_code(**response["error"]))]
    return [*events, *(machine.cancel() if status == "cancelled" else machine.end())]


def _outputs_of_item(item: dict[str, Any]) -> Iterator[outputs.Output]:
    """Yield the outputs from which the state machine builds the item."""
    if item["type"] == "message":
        yield outputs.Message(item.get("phase"))
        for part in item["content"]:
            yield from _outputs_of_part(part)
    elif item["type"] == "reasoning":
        # The lists alternate, because consecutive outputs of one type would extend the same part.
        for content, summary in zip_longest(item["content"], item["summary"]):
            if content is not None:
                yield outputs.Reasoning(content["text"])
            if summary is not None:
                yield outputs.ReasoningSummary(summary["text"], new_part=True)
    elif item["type"] == "function_call":
        yield outputs.ToolCall(item["name"], item["arguments"], item["call_id"])
    else:
        fields = {name: value for name, value in item.items() if name not in ("id", "type", "status")}
        is_incomplete = item["status"] == "incomplete"
        yield outputs.Item(item["type"], fields, "in_progress" if is_incomplete else item["status"], key=item["id"])


def _outputs_of_part(part: dict[str, Any]) -> Iterator[outputs.Output]:
    if part["type"] == "refusal":
        yield outputs.Refusal(part["refusal"])
        return
    yield outputs.Text(part["text"], [_logprob(entry) for entry in part["logprobs"]])
    for annotation in part["annotations"]:
        yield outputs.Annotation(
            url=annotation["url"],
            title=annotation["title"],
            start_index=annotation["start_index"],
            end_index=annotation["end_index"],
        )


def _logprob(entry: dict[str, Any]) -> outputs.LogProb:
    top = [_logprob(alternative) for alternative in entry.get("top_logprobs", ())]
    return outputs.LogProb(entry["token"], entry["logprob"], bytes(entry["bytes"]), top)
