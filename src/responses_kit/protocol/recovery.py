"""A machine as it stands after events that another one has told: a response whose process died can still end.

How it works
------------
Every event is read back as the output, or the closing, that it came of. The restored machine takes that, and has to
make the very same event again: so it stands where the other one stood, and a log that no machine could have told is
found out. A closing makes several events at once. Where the log ends between them, the rest is owed: it is told
before anything else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from .. import outputs
from ..errors import APIError, IllegalOutput
from ..schema.items import EXTENSION_TYPE
from .state_machine import Event, StateMachine

__all__ = ["RecoveredStateMachine", "recover"]

_OUTPUTS: Final[dict[str, type]] = {
    "output_text": outputs.Text,
    "refusal": outputs.Refusal,
    "reasoning_text": outputs.Reasoning,
    "summary_text": outputs.ReasoningSummary,
}
_ADDED: Final = ("response.content_part.added", "response.reasoning_summary_part.added")
_DELTAS: Final[dict[str, type]] = {
    "response.output_text.delta": outputs.Text,
    "response.refusal.delta": outputs.Refusal,
    "response.reasoning.delta": outputs.Reasoning,
    "response.reasoning_summary_text.delta": outputs.ReasoningSummary,
}
_DONE: Final = tuple(kind.removesuffix("delta") + "done" for kind in _DELTAS)
_ITEM_DONE: Final = "response.output_item.done"


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
    """The machine that told these events, as it stood after the last of them.

    It can always `fail` and `cancel`; where the log ends between two outputs, it can be fed on too. What was never
    told is lost: raw reasoning without events of its own, token counts, a reason to finish, and the keys of extension
    items, so that none can end them. If the last event is an `error`, the response has failed with that error, and
    nothing else can come of it.

    Args:
        response: The response object as it began, `output` empty; kept current from now on.
        events: The stream up to any of its events but the last one, from `sequence_number` 0 on; or none of it.
        new_id: As for `StateMachine`.
        stream_reasoning: As for `StateMachine`, for what is still to come.
        stream_extensions: As for `StateMachine`, for what is still to come.
        encrypt: As for `StateMachine`.
        error_events: As for `StateMachine`.

    Raises:
        ValueError: No machine could have told these events of this response; `response` is of no use any more.
    """
    settings = {"stream_extensions": stream_extensions, "encrypt": encrypt, "error_events": error_events}
    return RecoveredStateMachine(response, events, new_id=new_id, stream_reasoning=stream_reasoning, **settings)


class RecoveredStateMachine(StateMachine):
    """A machine that takes in what was told; see `restored`."""

    __slots__ = ("_failure", "_owed", "_told")

    def __init__(
        self, response: dict[str, Any], events: Iterable[Event], *, stream_reasoning: bool, **settings: Any
    ) -> None:
        super().__init__(response, stream_reasoning=stream_reasoning, **settings)
        self._failure: APIError | None = None
        self._owed: list[Event] = []
        self._told = 0
        if response["output"]:
            raise ValueError("a response begins with no output")
        self.replay(events)

    def replay(self, events: Iterable[Event]) -> None:
        """Takes in what else was told.

        Raises:
            ValueError: No machine could have told these events of this response; this one is of no use any more.
        """
        # What was told was told, whatever is to be told from now on.
        configured, self._stream_reasoning = self._stream_reasoning, True
        for event in events:
            try:
                self._recall(event)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, IllegalOutput) as error:
                raise ValueError(f"event {self._told} is none that this response could have had there") from error
            self._told += 1
        self._stream_reasoning = configured

    # What is owed comes first.

    def feed(self, output: outputs.Output) -> list[Event]:
        """As `StateMachine.feed`, behind what is owed."""
        return self._after_owed(super().feed(output))

    def close(self, now: float) -> list[Event]:
        """As `StateMachine.close`, behind what is owed."""
        return self._after_owed(super().close(now))

    def fail(self, error: APIError) -> list[Event]:
        """As `StateMachine.fail`, behind what is owed."""
        return super().fail(self._failure or error)

    def cancel(self) -> list[Event]:
        """As `StateMachine.cancel`, behind what is owed."""
        return super().cancel() if self._failure is None else super().fail(self._failure)

    def _abort(self, action: str) -> list[Event]:
        return self._after_owed(super()._abort(action))

    def _after_owed(self, events: list[Event]) -> list[Event]:
        owed, self._owed = self._owed, []
        return [*owed, *events]

    # From an event to what it came of.

    def _recall(self, event: Event) -> None:
        kind = event["type"]
        if self._owed and kind == _ITEM_DONE:
            self._owed[0]["item"]["status"] = _standard_status(event["item"])  # until now a guess; see _arguments_done
        made = self._owed or self._remade(kind, event)
        if made[0] != event:
            raise ValueError("the machine makes another event of it")
        self._owed = made[1:]

    def _remade(self, kind: str, event: Event) -> list[Event]:
        if kind in ("response.created", "response.queued", "response.in_progress"):
            return self._begun(kind, event)
        if self.state != "in_progress":
            raise ValueError("the response is not in progress")
        if kind == "response.output_item.added":
            return self._item_added(event["item"])
        if kind == _ITEM_DONE:
            return self._item_done(event["item"])
        if kind in _ADDED:
            return self._delta(_OUTPUTS[event["part"]["type"]], "")
        if kind in _DELTAS:
            return self._delta(_DELTAS[kind], event["delta"], list(event.get("logprobs", ())))
        if kind in _DONE:
            return self._part_done()
        if kind == "response.output_text.annotation.added":
            note = event["annotation"]
            return self.feed(outputs.Annotation(note["url"], note["title"], note["start_index"], note["end_index"]))
        if kind == "response.function_call_arguments.delta":
            call = next((call for call in self._calls.values() if call.id == event["item_id"]), None)
            return self.feed(outputs.ToolArguments(event["delta"], "" if call is None else call.call_id))
        if kind == "response.function_call_arguments.done":
            return self._arguments_done()
        if kind == "error":
            return self._failed(event)
        if EXTENSION_TYPE.fullmatch(kind):
            return [event | {"sequence_number": self._next()}]
        raise ValueError("an event of no known type, or one that ends a stream")

    def _begun(self, kind: str, event: Event) -> list[Event]:
        shown = event["response"]
        if shown["id"] != self.response["id"]:
            raise ValueError("another response")
        if kind == "response.in_progress":
            (made,) = self.start()
            return [made | {"response": shown}]
        if self._sequence != (kind == "response.queued"):
            raise ValueError("a response begins once")
        # What was created goes on as what was queued does: with response.in_progress.
        self.state = self.response["status"] = "queued"
        return [self._response_event(kind, shown)]

    def _item_added(self, item: dict[str, Any]) -> list[Event]:
        kind, item_id, new_id = item["type"], str(item["id"]), self._new_id
        self._new_id = lambda prefix: item_id
        try:
            if kind == "message":
                return self.feed(outputs.Message(item.get("phase")))
            if kind == "function_call":
                return self.feed(outputs.ToolCall(item["name"], "", item["call_id"]))
            if kind != "reasoning":
                return self.feed(outputs.Item(kind, _members(item), "in_progress", item_id))
            # Reasoning is not opened by itself, but with its first part, and that may be a silent one.
            if self._extensions:
                raise ValueError("an extension item is open")
            events = self._close_all("completed")
            self._open_item(kind, events)
            return events
        finally:
            self._new_id = new_id

    def _part_done(self) -> list[Event]:
        events: list[Event] = []
        if self._open is not None:
            self._close_part(self._open, events)
        return events

    def _arguments_done(self) -> list[Event]:
        events: list[Event] = []
        call = self._calls.pop(next(iter(self._calls), ""))
        self._close_call(call, "completed" if call.is_json() else "incomplete", events)
        return events

    def _item_done(self, item: dict[str, Any]) -> list[Event]:
        if self._extensions:
            begun = self._extensions[item["id"]]
            if item["status"] == "in_progress":
                raise ValueError("an item that is done is not in progress")
            begun.fields, begun.ending = _members(item), str(item["status"])
            return self._close_extensions()
        events, made = self._part_done(), self._open
        if made is None:
            raise ValueError("no such item is open")
        if made.kind == "reasoning":
            # Silent reasoning is told here or never; and no seal is the same twice.
            made.parts["content"] = made.parts["content"] or list(item["content"])
            if "encrypted_content" in item:
                made.fields["encrypted_content"] = str(item["encrypted_content"])
        self._close_item(made, _standard_status(item), events)
        self._open = None
        return events

    def _failed(self, event: Event) -> list[Event]:
        if self._open or self._calls or self._extensions:
            raise ValueError("an error comes when all is closed")
        error = event["error"]
        self._failure = APIError(str(error["message"]), code=str(error["code"]))
        self._error_events = False
        self.state = "closed"
        self.response |= {"status": "failed", "error": {"code": self._failure.code, "message": self._failure.message}}
        return [event | {"sequence_number": self._next()}]


def _members(item: dict[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in item.items() if name not in ("id", "type", "status")}


def _standard_status(item: dict[str, Any]) -> str:
    if item["status"] not in ("completed", "incomplete"):
        raise ValueError("an item is done when it is completed or incomplete")
    return str(item["status"])
