"""The events of a response of which only the final object is known: the shortest stream that builds it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

from .. import outputs
from ..errors import error_from_code
from .state_machine import Event, StateMachine

__all__ = ["synthesize_events"]

_UNBEGUN: Final = {
    "status": "in_progress",
    "completed_at": None,
    "incomplete_details": None,
    "error": None,
    "usage": None,
}


def synthesize_events(response: dict[str, Any]) -> list[Event]:
    """A legal stream whose terminal event carries exactly this response.

    Args:
        response: A final response object that a machine has made.
    """
    items = response["output"]
    ids = iter([item["id"] for item in items])
    thoughts = (item for item in items if item["type"] == "reasoning")
    sealed = [item["encrypted_content"] for item in thoughts if "encrypted_content" in item]
    seals = iter(sealed)
    machine = StateMachine(
        response | _UNBEGUN | {"output": []},
        new_id=lambda prefix: next(ids),
        encrypt=(lambda text: next(seals)) if sealed else None,
    )
    events = machine.start()
    for item in items:
        for output in _outputs(item):
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


def _outputs(item: dict[str, Any]) -> Iterator[outputs.Output]:
    """What a backend would have to yield for an item."""
    if item["type"] == "message":
        yield outputs.Message(item.get("phase"))
        for part in item["content"]:
            yield from _text(part)
    elif item["type"] == "reasoning":
        # In turns, for only what lies between them keeps parts of one kind apart.
        for thought, summary in zip_longest(item["content"], item["summary"]):
            if thought is not None:
                yield outputs.Reasoning(thought["text"])
            if summary is not None:
                yield outputs.ReasoningSummary(summary["text"], new_part=True)
    elif item["type"] == "function_call":
        yield outputs.ToolCall(item["name"], item["arguments"], item["call_id"])
    else:
        fields = {name: value for name, value in item.items() if name not in ("id", "type", "status")}
        cut = item["status"] == "incomplete"
        yield outputs.Item(item["type"], fields, "in_progress" if cut else item["status"], key=item["id"])


def _text(part: dict[str, Any]) -> Iterator[outputs.Output]:
    if part["type"] == "refusal":
        yield outputs.Refusal(part["refusal"])
        return
    yield outputs.Text(part["text"], [_logprob(entry) for entry in part["logprobs"]])
    for note in part["annotations"]:
        yield outputs.Annotation(
            url=note["url"], title=note["title"], start_index=note["start_index"], end_index=note["end_index"]
        )


def _logprob(entry: dict[str, Any]) -> outputs.LogProb:
    top = [_logprob(rival) for rival in entry.get("top_logprobs", ())]
    return outputs.LogProb(entry["token"], entry["logprob"], bytes(entry["bytes"]), top)
