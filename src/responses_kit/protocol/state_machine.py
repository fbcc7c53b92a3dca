"""The response state machine: outputs in, events out. Pure: no I/O, no clock and no ids of its own.

Theory of operation
-------------------
A response passes through the states of `TRANSITIONS`::

    new → [queued →] in_progress → closed → ended

`fail` and `cancel` end it from any state but the last. While it is in progress, `feed` accepts one output at a time.

Text-like outputs extend a part of an item; `OUTPUT_TARGETS` maps each to the types of both. If an item and a part of
these types are open, the output becomes a delta event. If not, the open part and items are closed in order of index,
and a new item or part is opened. Events therefore nest correctly, whatever the order and size of outputs.

Several function calls may be open at once with interleaved argument deltas; the next text, reasoning, message or
extension item closes them all. Several extension items may be open at once, too. The backend finishes each by its
`key`, and until all are finished, the machine refuses outputs of other items. Calls and extension items are closed in
order of index.

A response ends in two steps, so that the final object can be saved before the terminal event is sent. `close` closes
the open items and fixes the final object, `end` returns the terminal event, and `preview_end` shows that event before.
If saving fails, `fail` is still possible.

An output that is malformed or not legal in the current state raises `IllegalOutput` and changes nothing. Events are
plain mappings of the shapes in `schema.events`. Replaying the stream builds exactly the response object of the
terminal event (specification, "Items are streamable").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic_core import PydanticSerializationError, from_json, to_json

from .. import outputs
from ..errors import APIError, IllegalOutput
from ..schema.base import MAX_TEXT, replace_surrogates
from ..schema.items import EXTENSION_TYPE, TOOL_NAME
from .builders import PART_NAMES, CallBuilder, ExtensionBuilder, ItemBuilder, PartBuilder

__all__ = ["OUTPUT_TARGETS", "TERMINAL_EVENT_TYPES", "TRANSITIONS", "Event", "StateMachine"]

Event = dict[str, Any]
"""One event in wire shape; see `schema.events`."""

TRANSITIONS: Final[Mapping[tuple[str, str], str]] = {
    ("new", "queue"): "queued",
    ("new", "start"): "in_progress",
    ("queued", "start"): "in_progress",
    ("in_progress", "feed"): "in_progress",
    ("in_progress", "close"): "closed",
    ("closed", "end"): "ended",
    ("new", "fail"): "ended",
    ("queued", "fail"): "ended",
    ("in_progress", "fail"): "ended",
    ("closed", "fail"): "ended",
    ("new", "cancel"): "ended",
    ("queued", "cancel"): "ended",
    ("in_progress", "cancel"): "ended",
    ("closed", "cancel"): "ended",
}
"""The next state for each legal (state, action); every other pair raises `IllegalOutput`."""

TERMINAL_EVENT_TYPES: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""The types of the events that end a stream."""

OUTPUT_TARGETS: Final[Mapping[type, tuple[str, str]]] = {
    outputs.Text: ("message", "output_text"),
    outputs.Annotation: ("message", "output_text"),
    outputs.Refusal: ("message", "refusal"),
    outputs.Reasoning: ("reasoning", "reasoning_text"),
    outputs.ReasoningSummary: ("reasoning", "summary_text"),
}
"""The types of the item and the part that an output extends."""

_ID_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_MIN_LOGPROB: Final = -9999.0
"""Replaces log probabilities that are not finite, which JSON cannot represent."""
_TEXT_TOO_LONG: Final = f"a text part must have at most {MAX_TEXT} characters, as clients cannot send a longer one back"
_RESERVED_DEPTH: Final = 64
"""Levels of nesting left for the objects and lists that surround an extension's fields in a response."""
_MAX_TOKEN_COUNT: Final = 2**53
"""Exclusive bound on token counts: JSON readers that use doubles represent all smaller integers exactly."""


class StateMachine:
    """One response from its creation to its terminal event.

    Args:
        response: The initial response object, with all members and an empty `output`. The machine updates it in place.
        new_id: Returns an unguessable id with the given prefix, such as "msg".
        stream_reasoning: Whether raw reasoning emits events. If not, it is only in its finished item.
        stream_extensions: Whether `outputs.Event` emits an event. If not, it is discarded.
        encrypt: Returns the `encrypted_content` of raw reasoning; without it items have none.
        error_events: Whether a failure emits `error` before `response.failed`.

    Attributes:
        response: The current response object. Items are added to `output` when they are closed.
        state: A state of `TRANSITIONS`.
    """

    __slots__ = (
        "_call_ids",
        "_encrypt",
        "_error_events",
        "_finish_reason",
        "_new_id",
        "_open_calls",
        "_open_extensions",
        "_open_item",
        "_output_index",
        "_sequence_number",
        "_stream_extensions",
        "_stream_reasoning",
        "response",
        "state",
    )

    def __init__(
        self,
        response: dict[str, Any],
        *,
        new_id: Callable[[str], str],
        stream_reasoning: bool = False,
        stream_extensions: bool = False,
        encrypt: Callable[[str], str] | None = None,
        error_events: bool = True,
    ) -> None:
        self.response = response
        self.state = "new"
        self._new_id = new_id
        self._stream_reasoning = stream_reasoning
        self._stream_extensions = stream_extensions
        self._encrypt = encrypt
        self._error_events = error_events
        self._sequence_number = 0
        self._output_index = 0
        self._open_item: ItemBuilder | None = None
        self._open_calls: dict[str, CallBuilder] = {}
        self._call_ids: set[str] = set()
        self._open_extensions: dict[str, ExtensionBuilder] = {}
        self._finish_reason: str | None = None

    @property
    def next_sequence_number(self) -> int:
        """The `sequence_number` of the next event."""
        return self._sequence_number

    # Actions of `TRANSITIONS`.

    def queue(self) -> list[Event]:
        """Queue the response for a worker: `response.created`, `response.queued`.

        Raises:
            IllegalOutput: The response is not new.
        """
        self._transition("queue")
        self.response["status"] = "queued"
        snapshot = self.response | {"output": []}
        return [self._response_event("response.created", snapshot), self._response_event("response.queued", snapshot)]

    def start(self) -> list[Event]:
        """Start generation: `response.created` unless the response was queued, then `response.in_progress`.

        Raises:
            IllegalOutput: The response has already started.
        """
        is_new = self.state == "new"
        self._transition("start")
        self.response["status"] = "in_progress"
        snapshot = self.response | {"output": []}  # later changes to the response must not reach emitted events
        created = [self._response_event("response.created", snapshot)] if is_new else []
        return [*created, self._response_event("response.in_progress", snapshot)]

    def feed(self, output: outputs.Output) -> list[Event]:
        """Accept one output and return its events, possibly none.

        Raises:
            IllegalOutput: The output is not legal now; nothing has changed.
        """
        if self.state != "in_progress":
            raise IllegalOutput(f"a response in the state {self.state!r} does not accept outputs")
        kind = type(output)
        if kind is str and self._finish_reason is None and not self._open_extensions:
            return self._append_text(output)  # type: ignore[arg-type]  # mypy does not narrow on type()
        method = _FEED_METHODS.get(kind)
        if method is None:
            method, output = self._resolve_subclass(output)
        if self._finish_reason is not None and not isinstance(output, outputs.Usage):
            raise IllegalOutput(f"{kind.__name__} after Finish; only Usage may follow it")
        if self._open_extensions and not isinstance(
            output, outputs.Item | outputs.Event | outputs.Usage | outputs.Finish
        ):
            raise IllegalOutput(f"{kind.__name__} while an extension item is in progress")
        events: list[Event] = method(self, output)
        return events

    def close(self, now: float) -> list[Event]:
        """Close all open items and fix the final object, without the terminal event.

        Args:
            now: Seconds since the epoch, for `completed_at`.

        Raises:
            IllegalOutput: The response is not in progress.
        """
        self._transition("close")
        incomplete = self._finish_reason not in (None, "stop")
        events = self._close_all("incomplete" if incomplete else "completed")
        events += self._close_extensions("incomplete" if incomplete else "failed")
        if incomplete:
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": self._finish_reason}}
        else:
            self.response |= {"status": "completed", "completed_at": int(now)}
        return events

    def end(self) -> list[Event]:
        """End a closed response and return its terminal event, `response.completed` or `response.incomplete`.

        Raises:
            IllegalOutput: The response is not closed.
        """
        events = self.preview_end()
        self._transition("end")
        return events

    def preview_end(self) -> list[Event]:
        """Return the event that `end` will return, so that it can be saved first. Changes nothing.

        Raises:
            IllegalOutput: The response is not closed.
        """
        if self.state != "closed":
            raise IllegalOutput(f"a response in the state {self.state!r} cannot end")
        response = dict(self.response)  # `fail` may still change the response, but must not change this event
        kind = f"response.{response['status']}"
        return [{"type": kind, "sequence_number": self._sequence_number, "response": response}]

    def fail(self, error: APIError) -> list[Event]:
        """End the response as failed: close all open items, and return the events up to `response.failed`.

        If enabled, `error` comes before `response.failed`.

        Raises:
            IllegalOutput: The response has already ended.
        """
        events = self._terminate("fail")
        payload = error.payload()
        self.response |= {
            "status": "failed",
            "completed_at": None,
            "incomplete_details": None,
            "error": {"code": payload["code"], "message": payload["message"]},
        }
        if self._error_events:
            events.append({"type": "error", "sequence_number": self._next_number(), "error": payload})
        return [*events, self._response_event("response.failed", self.response)]

    def cancel(self) -> list[Event]:
        """End the response as cancelled: close all open items, and return the events up to `response.incomplete`.

        The specification defines the status `cancelled` but no event for it. The terminal event is therefore
        `response.incomplete` with the reason "cancelled" and a response object with the status `cancelled`.

        Raises:
            IllegalOutput: The response has already ended.
        """
        events = self._terminate("cancel")
        self.response |= {
            "status": "cancelled",
            "completed_at": None,
            "incomplete_details": {"reason": "cancelled"},
        }
        return [*events, self._response_event("response.incomplete", self.response)]

    def _terminate(self, action: str) -> list[Event]:
        # A legal stream starts with response.created, even if the response ends before generation.
        events = self.start() if self.state in ("new", "queued") else []
        self._transition(action)
        return [*events, *self._close_all("incomplete"), *self._close_extensions("incomplete")]

    def _transition(self, action: str) -> None:
        state = TRANSITIONS.get((self.state, action))
        if state is None:
            raise IllegalOutput(f"a response in the state {self.state!r} cannot {action}")
        self.state = state

    # Outputs.

    def _append_text(self, text: str) -> list[Event]:
        # The hot path: nearly all outputs are text for the open part, so this event is built inline.
        item = self._open_item
        if item is not None and (part := item.part) is not None and part.type == "output_text":
            if not text.isascii():
                text = replace_surrogates(text)
            if text:
                if len(text) > part.remaining:
                    raise IllegalOutput(_TEXT_TOO_LONG)
                part.remaining -= len(text)
                part.pieces.append(text)
                self._sequence_number = (number := self._sequence_number) + 1
                return [
                    {
                        "type": "response.output_text.delta",
                        "sequence_number": number,
                        "item_id": item.id,
                        "output_index": item.index,
                        "content_index": part.index,
                        "delta": text,
                        "logprobs": [],
                    }
                ]
            return []
        return self._append_delta(outputs.Text, text)

    def _feed_text(self, output: outputs.Text) -> list[Event]:
        if not output.logprobs:
            return self._append_text(_check_string(output.text))
        return self._append_delta(outputs.Text, output.text, _encode_logprobs(output.logprobs))

    def _feed_refusal(self, output: outputs.Refusal) -> list[Event]:
        return self._append_delta(outputs.Refusal, output.text)

    def _feed_reasoning(self, output: outputs.Reasoning) -> list[Event]:
        return self._append_delta(outputs.Reasoning, output.text)

    def _feed_summary(self, output: outputs.ReasoningSummary) -> list[Event]:
        return self._append_delta(outputs.ReasoningSummary, output.text, new_part=output.new_part)

    def _append_delta(
        self, kind: type, text: str, logprobs: list[dict[str, Any]] | None = None, *, new_part: bool = False
    ) -> list[Event]:
        text = replace_surrogates(_check_string(text))
        item_kind, part_kind = OUTPUT_TARGETS[kind]
        part = None if self._open_item is None or self._open_item.type != item_kind else self._open_item.part
        if len(text) > (MAX_TEXT if part is None or part.type != part_kind or new_part else part.remaining):
            raise IllegalOutput(_TEXT_TOO_LONG)
        events, item, part = self._ensure_part(item_kind, part_kind, new_part=new_part)
        if text or logprobs:
            part.remaining -= len(text)
            part.pieces.append(text)
            if not part.is_silent:
                event = self._event_in_part(PART_NAMES[part_kind].delta_type, item, part)
                event["delta"] = text
                if part_kind == "output_text":
                    event["logprobs"] = logprobs or []
                events.append(event)
            part.logprobs.extend(logprobs or ())
        return events

    def _feed_annotation(self, output: outputs.Annotation) -> list[Event]:
        span = (output.start_index, output.end_index)
        if not all(type(index) is int for index in span) or not 0 <= span[0] <= span[1]:
            raise IllegalOutput("an annotation's indices must be integers with 0 <= start_index <= end_index")
        annotation = {
            "type": "url_citation",
            "url": replace_surrogates(_check_string(output.url)),
            "title": replace_surrogates(_check_string(output.title)),
            "start_index": span[0],
            "end_index": span[1],
        }
        events, item, part = self._ensure_part(*OUTPUT_TARGETS[outputs.Annotation])
        event = self._event_in_part("response.output_text.annotation.added", item, part)
        events.append(event | {"annotation_index": len(part.annotations), "annotation": annotation})
        part.annotations.append(annotation)
        return events

    def _feed_message(self, output: outputs.Message) -> list[Event]:
        if output.phase not in (None, "commentary", "final_answer"):
            raise IllegalOutput('a message\'s phase must be None, "commentary" or "final_answer"')
        events = self._close_all("completed")
        self._add_item("message", events, phase=output.phase)
        return events

    def _feed_call(self, output: outputs.ToolCall) -> list[Event]:
        if not TOOL_NAME.fullmatch(_check_string(output.name)):
            raise IllegalOutput("a tool's name must have 1 to 64 letters, digits, underscores or hyphens")
        arguments = replace_surrogates(_check_string(output.arguments))
        call_id = self._new_id("call") if output.call_id is None else replace_surrogates(_check_string(output.call_id))
        if not 1 <= len(call_id) <= 64:
            raise IllegalOutput("a call_id must have 1 to 64 characters")
        if call_id in self._call_ids:
            raise IllegalOutput("a call_id must be unique within a response")
        events = [] if self._open_calls else self._close_all("completed")
        call = CallBuilder(self._new_id("fc"), self._output_index, call_id, output.name)
        self._output_index += 1
        self._call_ids.add(call_id)
        self._open_calls[call_id] = call
        events.append(self._item_event("added", call.index, call.build("in_progress")))
        if arguments:
            events.append(self._append_arguments(call, arguments))
        return events

    def _feed_arguments(self, output: outputs.ToolArguments) -> list[Event]:
        latest = next(reversed(self._open_calls.values()), None)
        call = (
            latest
            if output.call_id is None
            else self._open_calls.get(replace_surrogates(_check_string(output.call_id)))
        )
        if call is None:
            raise IllegalOutput("ToolArguments without an open ToolCall")
        delta = replace_surrogates(_check_string(output.delta))
        return [self._append_arguments(call, delta)] if delta else []

    def _append_arguments(self, call: CallBuilder, delta: str) -> Event:
        call.pieces.append(delta)
        return self._event_in_item("response.function_call_arguments.delta", call) | {"delta": delta}

    def _feed_extension_item(self, output: outputs.Item) -> list[Event]:
        fields = _check_extension(output.type, output.fields, reserved={"id", "type", "status"})
        status = replace_surrogates(_check_string(output.status))
        if status in ("", "incomplete") or (status == "in_progress" and output.key is None):
            raise IllegalOutput(
                'an extension item\'s status must not be empty or "incomplete", and "in_progress" requires a key'
            )
        opened = None if output.key is None else self._open_extensions.get(_check_string(output.key))
        if opened is not None:
            if status == "in_progress" or output.type != opened.type or opened.final_status is not None:
                raise IllegalOutput(
                    "an extension item in progress must be finished once, with the type it started with"
                )
            opened.fields, opened.final_status = fields, status
            return self._close_extensions()
        events = self._close_all("completed")
        item = ExtensionBuilder(self._new_id("item"), self._output_index, output.type, fields)
        self._output_index += 1
        events.append(self._item_event("added", item.index, item.build("in_progress")))
        self._open_extensions[item.id if output.key is None else output.key] = item
        if status == "in_progress":
            return events
        item.final_status = status
        return [*events, *self._close_extensions()]

    def _close_extensions(self, default_status: str | None = None) -> list[Event]:
        """Close extension items in order of index, up to the first one that is not finished.

        Args:
            default_status: The status of unfinished items; with it, all items are closed.
        """
        events: list[Event] = []
        for key, item in list(self._open_extensions.items()):
            status = item.final_status or default_status
            if status is None:
                break
            if status == "incomplete" and len(self._open_extensions) > 1:
                status = "failed"  # only the last item of a response may be incomplete (specification)
            del self._open_extensions[key]
            self._close_item(item, status, events)
        return events

    def _feed_event(self, output: outputs.Event) -> list[Event]:
        fields = _check_extension(output.type, output.fields, reserved={"type", "sequence_number"})
        if not self._stream_extensions:
            return []
        return [{"type": output.type, "sequence_number": self._next_number(), **fields}]

    def _feed_usage(self, output: outputs.Usage) -> list[Event]:
        counts = (output.input_tokens, output.output_tokens, output.cached_tokens, output.reasoning_tokens)
        if not all(type(count) is int and 0 <= count < _MAX_TOKEN_COUNT for count in counts):
            raise IllegalOutput("token counts must be integers of 0 or more, below 2**53")
        if output.cached_tokens > output.input_tokens or output.reasoning_tokens > output.output_tokens:
            raise IllegalOutput("cached_tokens must not exceed input_tokens, nor reasoning_tokens output_tokens")
        self.response["usage"] = {
            "input_tokens": output.input_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens},
            "output_tokens": output.output_tokens,
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": output.input_tokens + output.output_tokens,
        }
        return []

    def _feed_finish(self, output: outputs.Finish) -> list[Event]:
        if output.reason not in ("stop", "max_output_tokens", "content_filter"):
            raise IllegalOutput('the reason of Finish must be "stop", "max_output_tokens" or "content_filter"')
        self._finish_reason = output.reason
        return []

    def _resolve_subclass(self, output: object) -> tuple[Callable[[StateMachine, Any], list[Event]], Any]:
        # An instance of a subclass, including one of str, is treated as an instance of its base class.
        if isinstance(output, str):
            return _FEED_METHODS[outputs.Text], outputs.Text(str.__str__(output))
        for kind, method in _FEED_METHODS.items():
            if isinstance(output, kind):
                return method, output
        raise IllegalOutput(f"a backend must yield str or outputs, not {type(output).__name__}")

    # Items and parts.

    def _ensure_part(
        self, item_kind: str, part_kind: str, *, new_part: bool = False
    ) -> tuple[list[Event], ItemBuilder, PartBuilder]:
        """Return the open item and part of these types, after closing and opening items and parts as necessary."""
        events: list[Event] = []
        item = self._open_item
        if item is None or item.type != item_kind:
            events = self._close_all("completed")
            item = self._add_item(item_kind, events)
        part = item.part
        if part is None or part.type != part_kind or new_part:
            self._close_part(item, events)
            names = PART_NAMES[part_kind]
            is_silent = part_kind == "reasoning_text" and not self._stream_reasoning
            part = item.part = PartBuilder(part_kind, len(item.parts[names.list_member]), is_silent=is_silent)
            if not is_silent:
                events.append(self._event_in_part(names.part_added_type, item, part) | {"part": part.build()})
        return events, item, part

    def _add_item(self, kind: str, events: list[Event], *, phase: str | None = None) -> ItemBuilder:
        fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {}
        if phase is not None:
            fields["phase"] = phase
        item = self._open_item = ItemBuilder(kind, self._new_id(_ID_PREFIXES[kind]), self._output_index, fields)
        self._output_index += 1
        events.append(self._item_event("added", item.index, item.build("in_progress")))
        return item

    def _close_part(self, item: ItemBuilder, events: list[Event]) -> None:
        part = item.part
        if part is None:
            return
        names, built = PART_NAMES[part.type], part.build()
        if not part.is_silent:
            text_done = self._event_in_part(names.text_done_type, item, part)
            text_done[names.text_member] = built[names.text_member]
            if part.type == "output_text":
                text_done["logprobs"] = built["logprobs"]
            part_done = self._event_in_part(names.part_done_type, item, part)
            part_done["part"] = built
            events += (text_done, part_done)
        item.parts[names.list_member].append(built)
        item.part = None

    def _close_all(self, status: str) -> list[Event]:
        """Close the open item and all open calls, in order of index.

        Args:
            status: "completed", or "incomplete" if generation was cut off in the last item.
        """
        events: list[Event] = []
        if self._open_item is not None:
            self._close_part(self._open_item, events)
            self._encrypt_reasoning(self._open_item)
            self._close_item(self._open_item, status, events)
            self._open_item = None
        calls, self._open_calls = list(self._open_calls.values()), {}
        for call in calls:
            # If generation was cut off, it was in the last call: the arguments of earlier ones may be complete.
            is_complete = status == "completed" or (call is not calls[-1] and call.has_valid_json())
            if is_complete and not "".join(call.pieces).strip():
                events.append(self._append_arguments(call, "{}"))
            self._close_call(call, "completed" if is_complete else "incomplete", events)
        return events

    def _close_call(self, call: CallBuilder, status: str, events: list[Event]) -> None:
        done = self._event_in_item("response.function_call_arguments.done", call)
        events.append(done | {"arguments": "".join(call.pieces)})
        self._close_item(call, status, events)

    def _encrypt_reasoning(self, item: ItemBuilder) -> None:
        if self._encrypt is not None and item.type == "reasoning" and item.parts["content"]:
            item.fields["encrypted_content"] = self._encrypt("".join(part["text"] for part in item.parts["content"]))

    def _close_item(self, item: ItemBuilder | CallBuilder | ExtensionBuilder, status: str, events: list[Event]) -> None:
        built = item.build(status)
        events.append(self._item_event("done", item.index, built))
        self.response["output"].append(built)

    # Events.

    def _next_number(self) -> int:
        self._sequence_number = (number := self._sequence_number) + 1
        return number

    def _response_event(self, kind: str, response: dict[str, Any]) -> Event:
        return {"type": kind, "sequence_number": self._next_number(), "response": response}

    def _item_event(self, suffix: str, index: int, item: dict[str, Any]) -> Event:
        kind = f"response.output_item.{suffix}"
        return {"type": kind, "sequence_number": self._next_number(), "output_index": index, "item": item}

    def _event_in_item(self, kind: str, item: ItemBuilder | CallBuilder) -> Event:
        return {"type": kind, "sequence_number": self._next_number(), "item_id": item.id, "output_index": item.index}

    def _event_in_part(self, kind: str, item: ItemBuilder, part: PartBuilder) -> Event:
        event = self._event_in_item(kind, item)
        event[PART_NAMES[part.type].index_member] = part.index
        return event


_FEED_METHODS: Final[dict[type, Callable[[StateMachine, Any], list[Event]]]] = {
    outputs.Text: StateMachine._feed_text,
    outputs.Refusal: StateMachine._feed_refusal,
    outputs.Annotation: StateMachine._feed_annotation,
    outputs.Message: StateMachine._feed_message,
    outputs.Reasoning: StateMachine._feed_reasoning,
    outputs.ReasoningSummary: StateMachine._feed_summary,
    outputs.ToolCall: StateMachine._feed_call,
    outputs.ToolArguments: StateMachine._feed_arguments,
    outputs.Item: StateMachine._feed_extension_item,
    outputs.Event: StateMachine._feed_event,
    outputs.Usage: StateMachine._feed_usage,
    outputs.Finish: StateMachine._feed_finish,
}


def _check_string(value: object) -> str:
    if not isinstance(value, str):
        raise IllegalOutput(f"text must be str, not {type(value).__name__}")
    return value


def _encode_logprobs(entries: Sequence[outputs.LogProb]) -> list[dict[str, Any]]:
    try:
        return [
            _encode_token(entry) | {"top_logprobs": [_encode_token(alternative) for alternative in entry.top]}
            for entry in entries
        ]
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise IllegalOutput("logprobs must be a sequence of LogProb(token, logprob, bytes, top)") from error


def _encode_token(entry: outputs.LogProb) -> dict[str, Any]:
    value = float(entry.logprob) if math.isfinite(entry.logprob) else _MIN_LOGPROB
    return {
        "token": replace_surrogates(_check_string(entry.token)),
        "logprob": value,
        "bytes": list(bytes(iter(entry.bytes))),
    }


def _check_extension(kind: str, fields: Mapping[str, Any], *, reserved: set[str]) -> dict[str, Any]:
    if not EXTENSION_TYPE.fullmatch(_check_string(kind)):
        raise IllegalOutput("an extension's type must have the form slug:name")
    try:
        # The round trip copies the fields and checks that they are JSON and not nested too deeply.
        encoded = to_json(dict(fields), inf_nan_mode="null")
        from_json(b"[" * _RESERVED_DEPTH + encoded + b"]" * _RESERVED_DEPTH)
        members: dict[str, Any] = from_json(encoded)
    except (PydanticSerializationError, TypeError, ValueError) as error:
        raise IllegalOutput("an extension's fields must be a mapping of JSON values") from error
    if conflicts := reserved & members.keys():
        raise IllegalOutput(f"an extension's fields must not contain {', '.join(sorted(conflicts))}")
    return members
