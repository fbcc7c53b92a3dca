"""Recovery of a state machine from its event log, so that an orphaned response can still end.

Theory of operation
-------------------
Each logged event is traced back to the action that caused it: an output, or the closing of a part or item. The new
machine performs that action and must produce the same event. It therefore reaches the state of the original machine,
and a log that no machine could have written is detected. Closing an item emits several events; if the log ends
between them, the missing ones are pending and are emitted before any other event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from .. import outputs
from ..errors import APIError, IllegalOutput
from ..schema.items import EXTENSION_TYPE
from .state_machine import Event, StateMachine

__all__ = ["RecoveredStateMachine", "recover"]

_PART_OUTPUTS: Final[dict[str, type]] = {
    "output_text": outputs.Text,
    "refusal": outputs.Refusal,
    "reasoning_text": outputs.Reasoning,
    "summary_text": outputs.ReasoningSummary,
}
_PART_ADDED_TYPES: Final = ("response.content_part.added", "response.reasoning_summary_part.added")
_DELTA_OUTPUTS: Final[dict[str, type]] = {
    "response.output_text.delta": outputs.Text,
    "response.refusal.delta": outputs.Refusal,
    "response.reasoning.delta": outputs.Reasoning,
    "response.reasoning_summary_text.delta": outputs.ReasoningSummary,
}
_TEXT_DONE_TYPES: Final = tuple(kind.removesuffix("delta") + "done" for kind in _DELTA_OUTPUTS)
_ITEM_DONE_TYPE: Final = "response.output_item.done"


def recover(
    response: dict[str, Any],
    events: Iterable[Event],
    *,
    new_id: Callable[[str], str],
    stream_reasoning: bool = False,
    stream_extensions: bool = False,
    encrypt: Callable[[str], str] | None = None,
    error_events: bool = True,
) -> RecoveredStateMachine:
    """Return a state machine in the state that it had after the last of these events.

    The machine can always `fail` and `cancel`. If the log ends between two outputs, it also accepts outputs. State
    without events is lost: raw reasoning that was not streamed, token counts, the finish reason, and the keys of
    extension items, which therefore cannot be finished. If the last event is an `error`, the response has failed with
    that error and can only end.

    Args:
        response: The initial response object with an empty `output`; updated in place.
        events: The first events of the stream, possibly none, without the terminal event.
        new_id: As for `StateMachine`.
        stream_reasoning: As for `StateMachine`, for later events.
        stream_extensions: As for `StateMachine`, for later events.
        encrypt: As for `StateMachine`.
        error_events: As for `StateMachine`.

    Raises:
        ValueError: No machine could have emitted these events for this response. `response` is then unusable.
    """
    settings = {"stream_extensions": stream_extensions, "encrypt": encrypt, "error_events": error_events}
    return RecoveredStateMachine(response, events, new_id=new_id, stream_reasoning=stream_reasoning, **settings)


class RecoveredStateMachine(StateMachine):
    """A state machine that replays logged events; see `recover`."""

    __slots__ = ("_failure", "_pending_events", "_replayed_count")

    def __init__(
        self, response: dict[str, Any], events: Iterable[Event], *, stream_reasoning: bool, **settings: Any
    ) -> None:
        super().__init__(response, stream_reasoning=stream_reasoning, **settings)
        self._failure: APIError | None = None
        self._pending_events: list[Event] = []
        self._replayed_count = 0
        if response["output"]:
            raise ValueError("the initial output is not empty")
        self.replay(events)

    def replay(self, events: Iterable[Event]) -> None:
        """Replay the next logged events.

        Raises:
            ValueError: No machine could have emitted these events for this response. This machine is then unusable.
        """
        # Logged reasoning events must be reproduced even if the settings have changed since.
        configured, self._stream_reasoning = self._stream_reasoning, True
        for event in events:
            try:
                self._replay_event(event)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, IllegalOutput) as error:
                raise ValueError(f"event {self._replayed_count} is not legal at this position") from error
            self._replayed_count += 1
        self._stream_reasoning = configured

    # Actions emit pending events first.

    def feed(self, output: outputs.Output) -> list[Event]:
        """Accept one output; see `StateMachine.feed`."""
        return self._after_pending(super().feed(output))

    def close(self, now: float) -> list[Event]:
        """Close all open items; see `StateMachine.close`."""
        return self._after_pending(super().close(now))

    def fail(self, error: APIError) -> list[Event]:
        """End the response as failed, with the logged error if there is one."""
        return super().fail(self._failure or error)

    def cancel(self) -> list[Event]:
        """End the response as cancelled, or as failed if the log ends with an error."""
        return super().cancel() if self._failure is None else super().fail(self._failure)

    def _terminate(self, action: str) -> list[Event]:
        return self._after_pending(super()._terminate(action))

    def _after_pending(self, events: list[Event]) -> list[Event]:
        pending, self._pending_events = self._pending_events, []
        return [*pending, *events]

    # From an event to the action that caused it.

    def _replay_event(self, event: Event) -> None:
        kind = event["type"]
        if self._pending_events and kind == _ITEM_DONE_TYPE:  # its status was a guess; see _reproduce_arguments_done
            self._pending_events[0]["item"]["status"] = _final_status(event["item"])
        reproduced = self._pending_events or self._reproduce(kind, event)
        if reproduced[0] != event:
            raise ValueError("the machine reproduces another event")
        self._pending_events = reproduced[1:]

    def _reproduce(self, kind: str, event: Event) -> list[Event]:
        if kind in ("response.created", "response.queued", "response.in_progress"):
            return self._reproduce_start(kind, event)
        if self.state != "in_progress":
            raise ValueError("the response is not in progress")
        if kind == "response.output_item.added":
            return self._reproduce_item_added(event["item"])
        if kind == _ITEM_DONE_TYPE:
            return self._reproduce_item_done(event["item"])
        if kind in _PART_ADDED_TYPES:
            return self._append_delta(_PART_OUTPUTS[event["part"]["type"]], "")
        if kind in _DELTA_OUTPUTS:
            return self._append_delta(_DELTA_OUTPUTS[kind], event["delta"], list(event.get("logprobs", ())))
        if kind in _TEXT_DONE_TYPES:
            return self._reproduce_part_done()
        if kind == "response.output_text.annotation.added":
            members = event["annotation"]
            span = members["start_index"], members["end_index"]
            return self.feed(outputs.Annotation(members["url"], members["title"], *span))
        if kind == "response.function_call_arguments.delta":
            call = next((call for call in self._open_calls.values() if call.id == event["item_id"]), None)
            return self.feed(outputs.ToolArguments(event["delta"], "" if call is None else call.call_id))
        if kind == "response.function_call_arguments.done":
            return self._reproduce_arguments_done()
        if kind == "error":
            return self._reproduce_error(event)
        if EXTENSION_TYPE.fullmatch(kind):
            return [event | {"sequence_number": self._next_number()}]
        raise ValueError("an unknown or terminal event")

    def _reproduce_start(self, kind: str, event: Event) -> list[Event]:
        logged = event["response"]
        if logged["id"] != self.response["id"]:
            raise ValueError("the event belongs to another response")
        if kind == "response.in_progress":
            (in_progress,) = self.start()
            return [in_progress | {"response": logged}]
        if self._sequence_number != (kind == "response.queued"):
            raise ValueError("the event is not at the start of the stream")
        # After response.created alone, too, the next event is response.in_progress.
        self.state = self.response["status"] = "queued"
        return [self._response_event(kind, logged)]

    def _reproduce_item_added(self, item: dict[str, Any]) -> list[Event]:
        kind, item_id, new_id = item["type"], str(item["id"]), self._new_id
        self._new_id = lambda prefix: item_id
        try:
            if kind == "message":
                return self.feed(outputs.Message(item.get("phase")))
            if kind == "function_call":
                return self.feed(outputs.ToolCall(item["name"], "", item["call_id"]))
            if kind != "reasoning":
                return self.feed(outputs.Item(kind, _extension_fields(item), "in_progress", item_id))
            # Reasoning outputs open an item and a part together, but the part may have no events.
            if self._open_extensions:
                raise ValueError("an extension item is open")
            events = self._close_all("completed")
            self._add_item(kind, events)
            return events
        finally:
            self._new_id = new_id

    def _reproduce_part_done(self) -> list[Event]:
        events: list[Event] = []
        if self._open_item is not None:
            self._close_part(self._open_item, events)
        return events

    def _reproduce_arguments_done(self) -> list[Event]:
        events: list[Event] = []
        call = self._open_calls.pop(next(iter(self._open_calls), ""))
        self._close_call(call, "completed" if call.has_valid_json() else "incomplete", events)
        return events

    def _reproduce_item_done(self, item: dict[str, Any]) -> list[Event]:
        if self._open_extensions:
            extension = self._open_extensions[item["id"]]
            if item["status"] == "in_progress":
                raise ValueError("a finished item has the status in_progress")
            extension.fields, extension.final_status = _extension_fields(item), str(item["status"])
            return self._close_extensions()
        events, open_item = self._reproduce_part_done(), self._open_item
        if open_item is None:
            raise ValueError("no such item is open")
        if open_item.type == "reasoning":
            # Reasoning that was not streamed is only in the finished item, and encryption is not reproducible.
            open_item.parts["content"] = open_item.parts["content"] or list(item["content"])
            if "encrypted_content" in item:
                open_item.fields["encrypted_content"] = str(item["encrypted_content"])
        self._close_item(open_item, _final_status(item), events)
        self._open_item = None
        return events

    def _reproduce_error(self, event: Event) -> list[Event]:
        if self._open_item or self._open_calls or self._open_extensions:
            raise ValueError("an error event while an item is open")
        error = event["error"]
        self._failure = APIError(str(error["message"]), code=str(error["code"]))
        self._error_events = False
        self.state = "closed"
        self.response |= {"status": "failed", "error": {"code": self._failure.code, "message": self._failure.message}}
        return [event | {"sequence_number": self._next_number()}]


def _extension_fields(item: dict[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in item.items() if name not in ("id", "type", "status")}


def _final_status(item: dict[str, Any]) -> str:
    if item["status"] not in ("completed", "incomplete"):
        raise ValueError("a finished item is neither completed nor incomplete")
    return str(item["status"])
