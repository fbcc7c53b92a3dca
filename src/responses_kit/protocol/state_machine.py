"""The response state machine: outputs in, events out. Pure; no IO, no clock and no ids of its own.

How it works
------------
A response goes through the states of `TRANSITIONS`::

    new → [queued →] in_progress → closed → ended

and `fail` or `cancel` end it from any of them. While it is in progress, `feed` takes one output after the
other. Every output has a place: `PLACES` says which kind of item, and which kind of part within it, an output
goes on with. If that item and part are open, the output is a delta; if not, what is open is closed, in order
of index, and the right thing is opened. That is the whole of it: whatever the order and size of outputs, the
events nest properly.

Function calls are one exception: several may be open at once, their argument deltas interleave, and they are
closed, by index, when something that is no call arrives. Extension items that begin now and end later are the
other: several may be open at once, they are closed by index too, and until then nothing else is taken.

`close` closes what is open and settles the final object, `end` emits the terminal event. They are two steps so
that the final object can be stored before anybody is told, and with it the terminal event, which `ending` shows
beforehand; if that fails, `fail` still can.

An output that has no place raises `IllegalOutput` and changes nothing. Events are plain mappings of the shapes
in `schema.events`; the object in a terminal event is exactly what replaying the stream builds (specification,
"Items are streamable").
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic_core import PydanticSerializationError, from_json, to_json

from .. import outputs
from ..errors import APIError, IllegalOutput
from ..schema.base import MAX_TEXT, replace_surrogates
from ..schema.items import EXTENSION_TYPE, TOOL_NAME

__all__ = ["PLACES", "TERMINAL", "TRANSITIONS", "Event", "StateMachine"]

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
"""Every legal (state, action) and the state it leads to; all others raise."""

TERMINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""The types of the events that end a stream."""

PLACES: Final[Mapping[type, tuple[str, str]]] = {
    outputs.Text: ("message", "output_text"),
    outputs.Annotation: ("message", "output_text"),
    outputs.Refusal: ("message", "refusal"),
    outputs.Reasoning: ("reasoning", "reasoning_text"),
    outputs.ReasoningSummary: ("reasoning", "summary_text"),
}
"""Which kind of item and part an output goes on with."""

_ID_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_LEAST_LOGPROB: Final = -9999.0
_TOO_LONG: Final = f"a text has at most {MAX_TEXT} characters; no client could send a longer one back"
_DEPTH_AROUND: Final = 64
_MOST_TOKENS: Final = 2**53  # what every JSON reader holds exactly


class _PartKind:
    """The names that a kind of part has on the wire."""

    __slots__ = ("added", "delta", "done", "finished", "index", "list", "text")

    def __init__(self, part: str, name: str, *, index: str = "content_index", text: str = "text") -> None:
        self.added, self.finished = f"response.{part}.added", f"response.{part}.done"
        self.delta, self.done = f"response.{name}.delta", f"response.{name}.done"
        self.index, self.text = index, text
        self.list = "summary" if index == "summary_index" else "content"


_PARTS: Final[Mapping[str, _PartKind]] = {
    "output_text": _PartKind("content_part", "output_text"),
    "refusal": _PartKind("content_part", "refusal", text="refusal"),
    "reasoning_text": _PartKind("content_part", "reasoning"),
    "summary_text": _PartKind("reasoning_summary_part", "reasoning_summary_text", index="summary_index"),
}


class _OpenPart:
    __slots__ = ("annotations", "index", "kind", "logprobs", "pieces", "room", "silent")

    def __init__(self, kind: str, index: int, *, silent: bool) -> None:
        self.kind, self.index, self.silent = kind, index, silent
        self.pieces: list[str] = []
        self.room = MAX_TEXT
        self.annotations: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []

    def wire(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.kind, _PARTS[self.kind].text: "".join(self.pieces)}
        if self.kind == "output_text":
            part |= {"annotations": list(self.annotations), "logprobs": list(self.logprobs)}
        return part


class _OpenItem:
    """A message or a reasoning item that is being made."""

    __slots__ = ("fields", "id", "index", "kind", "part", "parts")

    def __init__(self, kind: str, item_id: str, index: int, fields: dict[str, Any]) -> None:
        self.kind, self.id, self.index, self.fields = kind, item_id, index, fields
        self.part: _OpenPart | None = None
        self.parts: dict[str, list[dict[str, Any]]] = {"content": []}
        if kind == "reasoning":
            self.parts["summary"] = []

    def wire(self, status: str) -> dict[str, Any]:
        lists = {name: list(parts) for name, parts in self.parts.items()}
        return {"type": self.kind, "id": self.id, "status": status, **self.fields, **lists}


class _OpenCall:
    __slots__ = ("call_id", "id", "index", "name", "pieces")

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self.id, self.index, self.call_id, self.name = item_id, index, call_id, name
        self.pieces: list[str] = []

    def wire(self, status: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self.pieces),
            "status": status,
        }

    def is_json(self) -> bool:
        try:
            json.loads("".join(self.pieces))
        except (ValueError, RecursionError):
            return False
        return True


class _OpenExtension:
    """An extension item that has begun. `ending` is what it will be, once that is known."""

    __slots__ = ("ending", "fields", "id", "index", "type")

    def __init__(self, item_id: str, index: int, kind: str, fields: dict[str, Any]) -> None:
        self.id, self.index, self.type, self.fields = item_id, index, kind, fields
        self.ending: str | None = None

    def wire(self, status: str) -> dict[str, Any]:
        return {"type": self.type, "id": self.id, "status": status, **self.fields}


class StateMachine:
    """One response from its creation to its end.

    Args:
        response: The response object as it begins: all members, `output` empty. The machine keeps it current.
        new_id: Makes an unguessable id with the given prefix, such as "msg".
        stream_reasoning: Emit the events of raw reasoning; without them it still arrives whole in its item.
        stream_extensions: Emit extension events; without them `outputs.Event` is swallowed.
        encrypt: Makes `encrypted_content` of raw reasoning; without it there is none.
        error_events: Tell of a failure by `error` and `response.failed`; without them by the latter alone.

    Attributes:
        response: The response object as far as it has come. Items enter `output` when they are closed.
        state: A state of `TRANSITIONS`.
    """

    __slots__ = (
        "_call_ids",
        "_calls",
        "_encrypt",
        "_error_events",
        "_extensions",
        "_index",
        "_new_id",
        "_open",
        "_reason",
        "_sequence",
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
        self._sequence = 0
        self._index = 0
        self._open: _OpenItem | None = None
        self._calls: dict[str, _OpenCall] = {}
        self._call_ids: set[str] = set()
        self._extensions: dict[str, _OpenExtension] = {}
        self._reason: str | None = None

    @property
    def next_sequence_number(self) -> int:
        """The `sequence_number` that the next event gets."""
        return self._sequence

    # The response's own life.

    def queue(self) -> list[Event]:
        """The response waits for a worker: `response.created`, `response.queued`."""
        self._transition("queue")
        self.response["status"] = "queued"
        begun = self.response | {"output": []}
        return [self._response_event("response.created", begun), self._response_event("response.queued", begun)]

    def start(self) -> list[Event]:
        """Work begins: `response.created` unless it was queued, `response.in_progress`."""
        fresh = self.state == "new"
        self._transition("start")
        self.response["status"] = "in_progress"
        begun = self.response | {"output": []}  # events keep what they show; the response goes on
        created = [self._response_event("response.created", begun)] if fresh else []
        return [*created, self._response_event("response.in_progress", begun)]

    def feed(self, output: outputs.Output) -> list[Event]:
        """Takes one output and returns the events it makes, none or many.

        Raises:
            IllegalOutput: The output has no place now; nothing has changed.
        """
        if self.state != "in_progress":
            raise IllegalOutput(f"a response that is {self.state} takes no outputs")
        kind = type(output)
        if kind is str and self._reason is None and not self._extensions:
            return self._text(output)  # type: ignore[arg-type]  # mypy does not narrow on type()
        take = _TAKES.get(kind)
        if take is None:
            take, output = self._by_ancestry(output)
        if self._reason is not None and not isinstance(output, outputs.Usage):
            raise IllegalOutput(f"{kind.__name__} after Finish; only Usage may follow it")
        if self._extensions and not isinstance(output, outputs.Item | outputs.Event | outputs.Usage | outputs.Finish):
            raise IllegalOutput(f"{kind.__name__} while an extension item has begun and not ended")
        events: list[Event] = take(self, output)
        return events

    def close(self, now: float) -> list[Event]:
        """Generation is over: closes what is open and settles the final object, but tells nobody yet.

        Args:
            now: Seconds since the epoch, for `completed_at`.
        """
        self._transition("close")
        incomplete = self._reason not in (None, "stop")
        events = self._close_all("incomplete" if incomplete else "completed")
        events += self._close_extensions("incomplete" if incomplete else "failed")
        if incomplete:
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": self._reason}}
        else:
            self.response |= {"status": "completed", "completed_at": int(now)}
        return events

    def end(self) -> list[Event]:
        """The terminal event of a closed response: `response.completed` or `response.incomplete`."""
        events = self.ending()
        self._transition("end")
        return events

    def ending(self) -> list[Event]:
        """What `end` is going to tell, so that it can be stored first. Changes nothing: `fail` still can.

        Raises:
            IllegalOutput: The response is not closed.
        """
        if self.state != "closed":
            raise IllegalOutput(f"a response that is {self.state} cannot end")
        response = dict(self.response)  # a failure may yet change the response, but not what was shown
        kind = f"response.{response['status']}"
        return [{"type": kind, "sequence_number": self._sequence, "response": response}]

    def fail(self, error: APIError) -> list[Event]:
        """Ends the response as failed, from any state: closes what is open, then `error`, `response.failed`.

        Without error events there is no `error`; `response.failed` says the same.
        """
        events = self._abort("fail")
        payload = error.payload()
        self.response |= {
            "status": "failed",
            "completed_at": None,
            "incomplete_details": None,
            "error": {"code": payload["code"], "message": payload["message"]},
        }
        if self._error_events:
            events.append({"type": "error", "sequence_number": self._next(), "error": payload})
        return [*events, self._response_event("response.failed", self.response)]

    def cancel(self) -> list[Event]:
        """Ends the response as cancelled, from any state.

        The specification has the status but no event for it, so the terminal event is `response.incomplete`
        with the reason "cancelled"; the object in it says `cancelled`.
        """
        events = self._abort("cancel")
        self.response |= {
            "status": "cancelled",
            "completed_at": None,
            "incomplete_details": {"reason": "cancelled"},
        }
        return [*events, self._response_event("response.incomplete", self.response)]

    def _abort(self, action: str) -> list[Event]:
        # A stream is legal only if it begins with its creation, even when nothing else comes of it.
        events = self.start() if self.state in ("new", "queued") else []
        self._transition(action)
        return [*events, *self._close_all("incomplete"), *self._close_extensions("incomplete")]

    def _transition(self, action: str) -> None:
        state = TRANSITIONS.get((self.state, action))
        if state is None:
            raise IllegalOutput(f"a response that is {self.state} cannot {action}")
        self.state = state

    # Outputs.

    def _text(self, text: str) -> list[Event]:
        # The hot path: the common delta is made right here.
        item = self._open
        if item is not None and (part := item.part) is not None and part.kind == "output_text":
            if not text.isascii():
                text = replace_surrogates(text)
            if text:
                if len(text) > part.room:
                    raise IllegalOutput(_TOO_LONG)
                part.room -= len(text)
                part.pieces.append(text)
                self._sequence = (number := self._sequence) + 1
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
        return self._delta(outputs.Text, text)

    def _take_text(self, output: outputs.Text) -> list[Event]:
        if not output.logprobs:
            return self._text(_string(output.text))
        return self._delta(outputs.Text, output.text, _logprobs(output.logprobs))

    def _take_refusal(self, output: outputs.Refusal) -> list[Event]:
        return self._delta(outputs.Refusal, output.text)

    def _take_reasoning(self, output: outputs.Reasoning) -> list[Event]:
        return self._delta(outputs.Reasoning, output.text)

    def _take_summary(self, output: outputs.ReasoningSummary) -> list[Event]:
        return self._delta(outputs.ReasoningSummary, output.text, new_part=output.new_part)

    def _delta(
        self, kind: type, text: str, logprobs: list[dict[str, Any]] | None = None, *, new_part: bool = False
    ) -> list[Event]:
        text = replace_surrogates(_string(text))
        item_kind, part_kind = PLACES[kind]
        part = None if self._open is None or self._open.kind != item_kind else self._open.part
        if len(text) > (MAX_TEXT if part is None or part.kind != part_kind or new_part else part.room):
            raise IllegalOutput(_TOO_LONG)
        events, item, part = self._place(item_kind, part_kind, new_part=new_part)
        if text or logprobs:
            part.room -= len(text)
            part.pieces.append(text)
            if not part.silent:
                event = self._in_part(_PARTS[part_kind].delta, item, part)
                event["delta"] = text
                if part_kind == "output_text":
                    event["logprobs"] = logprobs or []
                events.append(event)
            part.logprobs.extend(logprobs or ())
        return events

    def _take_annotation(self, output: outputs.Annotation) -> list[Event]:
        span = (output.start_index, output.end_index)
        if not all(type(index) is int for index in span) or not 0 <= span[0] <= span[1]:
            raise IllegalOutput("an annotation needs whole numbers with 0 <= start_index <= end_index")
        note = {
            "type": "url_citation",
            "url": replace_surrogates(_string(output.url)),
            "title": replace_surrogates(_string(output.title)),
            "start_index": span[0],
            "end_index": span[1],
        }
        events, item, part = self._place(*PLACES[outputs.Annotation])
        event = self._in_part("response.output_text.annotation.added", item, part)
        events.append(event | {"annotation_index": len(part.annotations), "annotation": note})
        part.annotations.append(note)
        return events

    def _take_message(self, output: outputs.Message) -> list[Event]:
        if output.phase not in (None, "commentary", "final_answer"):
            raise IllegalOutput('a message\'s phase is None, "commentary" or "final_answer"')
        events = self._close_all("completed")
        self._open_item("message", events, phase=output.phase)
        return events

    def _take_call(self, output: outputs.ToolCall) -> list[Event]:
        if not TOOL_NAME.fullmatch(_string(output.name)):
            raise IllegalOutput("a tool's name is 1 to 64 letters, digits, underscores or hyphens")
        arguments = replace_surrogates(_string(output.arguments))
        call_id = self._new_id("call") if output.call_id is None else replace_surrogates(_string(output.call_id))
        if not 1 <= len(call_id) <= 64:
            raise IllegalOutput("a call_id has 1 to 64 characters")
        if call_id in self._call_ids:
            raise IllegalOutput("a call_id may stand for one call only")
        events = [] if self._calls else self._close_all("completed")
        call = _OpenCall(self._new_id("fc"), self._index, call_id, output.name)
        self._index += 1
        self._call_ids.add(call_id)
        self._calls[call_id] = call
        events.append(self._item_event("added", call.index, call.wire("in_progress")))
        if arguments:
            events.append(self._arguments_delta(call, arguments))
        return events

    def _take_arguments(self, output: outputs.ToolArguments) -> list[Event]:
        latest = next(reversed(self._calls.values()), None)
        call = latest if output.call_id is None else self._calls.get(replace_surrogates(_string(output.call_id)))
        if call is None:
            raise IllegalOutput("ToolArguments without an open ToolCall")
        delta = replace_surrogates(_string(output.delta))
        return [self._arguments_delta(call, delta)] if delta else []

    def _arguments_delta(self, call: _OpenCall, delta: str) -> Event:
        call.pieces.append(delta)
        return self._in_item("response.function_call_arguments.delta", call) | {"delta": delta}

    def _take_item(self, output: outputs.Item) -> list[Event]:
        fields = _extension(output.type, output.fields, reserved={"id", "type", "status"})
        status = replace_surrogates(_string(output.status))
        if status in ("", "incomplete") or (status == "in_progress" and output.key is None):
            raise IllegalOutput("an extension item is completed, failed or the like; one in_progress needs a key")
        begun = None if output.key is None else self._extensions.get(_string(output.key))
        if begun is not None:
            if status == "in_progress" or output.type != begun.type or begun.ending is not None:
                raise IllegalOutput("an extension item that has begun ends once, with its own type")
            begun.fields, begun.ending = fields, status
            return self._close_extensions()
        events = self._close_all("completed")
        item = _OpenExtension(self._new_id("item"), self._index, output.type, fields)
        self._index += 1
        events.append(self._item_event("added", item.index, item.wire("in_progress")))
        self._extensions[item.id if output.key is None else output.key] = item
        if status == "in_progress":
            return events
        item.ending = status
        return [*events, *self._close_extensions()]

    def _close_extensions(self, otherwise: str | None = None) -> list[Event]:
        """Closes, by index, those whose end is known; with `otherwise` as their ending, the others too."""
        events: list[Event] = []
        for key, item in list(self._extensions.items()):
            status = item.ending or otherwise
            if status is None:
                break
            if status == "incomplete" and len(self._extensions) > 1:
                status = "failed"  # only the last item of a response may be incomplete
            del self._extensions[key]
            self._close_item(item, status, events)
        return events

    def _take_event(self, output: outputs.Event) -> list[Event]:
        fields = _extension(output.type, output.fields, reserved={"type", "sequence_number"})
        if not self._stream_extensions:
            return []
        return [{"type": output.type, "sequence_number": self._next(), **fields}]

    def _take_usage(self, output: outputs.Usage) -> list[Event]:
        counts = (output.input_tokens, output.output_tokens, output.cached_tokens, output.reasoning_tokens)
        if not all(type(count) is int and 0 <= count < _MOST_TOKENS for count in counts):
            raise IllegalOutput("token counts are whole numbers of 0 or more")
        if output.cached_tokens > output.input_tokens or output.reasoning_tokens > output.output_tokens:
            raise IllegalOutput("cached tokens are a part of the input's, reasoning tokens a part of the output's")
        self.response["usage"] = {
            "input_tokens": output.input_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens},
            "output_tokens": output.output_tokens,
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": output.input_tokens + output.output_tokens,
        }
        return []

    def _take_finish(self, output: outputs.Finish) -> list[Event]:
        if output.reason not in ("stop", "max_output_tokens", "content_filter"):
            raise IllegalOutput('Finish takes "stop", "max_output_tokens" or "content_filter"')
        self._reason = output.reason
        return []

    def _by_ancestry(self, output: object) -> tuple[Callable[[StateMachine, Any], list[Event]], Any]:
        # Subclasses of the outputs, and of str, are as good as the classes themselves.
        if isinstance(output, str):
            return _TAKES[outputs.Text], outputs.Text(str.__str__(output))
        for kind, take in _TAKES.items():
            if isinstance(output, kind):
                return take, output
        raise IllegalOutput(f"a backend yields str or outputs, not {type(output).__name__}")

    # Items and parts.

    def _place(
        self, item_kind: str, part_kind: str, *, new_part: bool = False
    ) -> tuple[list[Event], _OpenItem, _OpenPart]:
        """Closes and opens what must be, so that an item and a part of these kinds are open."""
        events: list[Event] = []
        item = self._open
        if item is None or item.kind != item_kind:
            events = self._close_all("completed")
            item = self._open_item(item_kind, events)
        part = item.part
        if part is None or part.kind != part_kind or new_part:
            self._close_part(item, events)
            names = _PARTS[part_kind]
            silent = part_kind == "reasoning_text" and not self._stream_reasoning
            part = item.part = _OpenPart(part_kind, len(item.parts[names.list]), silent=silent)
            if not silent:
                events.append(self._in_part(names.added, item, part) | {"part": part.wire()})
        return events, item, part

    def _open_item(self, kind: str, events: list[Event], *, phase: str | None = None) -> _OpenItem:
        fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {}
        if phase is not None:
            fields["phase"] = phase
        item = self._open = _OpenItem(kind, self._new_id(_ID_PREFIXES[kind]), self._index, fields)
        self._index += 1
        events.append(self._item_event("added", item.index, item.wire("in_progress")))
        return item

    def _close_part(self, item: _OpenItem, events: list[Event]) -> None:
        part = item.part
        if part is None:
            return
        names, whole = _PARTS[part.kind], part.wire()
        if not part.silent:
            done = self._in_part(names.done, item, part)
            done[names.text] = whole[names.text]
            if part.kind == "output_text":
                done["logprobs"] = whole["logprobs"]
            finished = self._in_part(names.finished, item, part)
            finished["part"] = whole
            events += (done, finished)
        item.parts[names.list].append(whole)
        item.part = None

    def _close_all(self, status: str) -> list[Event]:
        """Closes every open item, by index. With "incomplete", the last one was cut."""
        events: list[Event] = []
        if self._open is not None:
            self._close_part(self._open, events)
            self._encrypt_reasoning(self._open)
            self._close_item(self._open, status, events)
            self._open = None
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            # Only what was being written when generation stopped is cut; calls beside it may well be whole.
            whole = status == "completed" or (call is not calls[-1] and call.is_json())
            if whole and not "".join(call.pieces).strip():
                events.append(self._arguments_delta(call, "{}"))
            self._close_call(call, "completed" if whole else "incomplete", events)
        return events

    def _close_call(self, call: _OpenCall, status: str, events: list[Event]) -> None:
        done = self._in_item("response.function_call_arguments.done", call)
        events.append(done | {"arguments": "".join(call.pieces)})
        self._close_item(call, status, events)

    def _encrypt_reasoning(self, item: _OpenItem) -> None:
        if self._encrypt is not None and item.kind == "reasoning" and item.parts["content"]:
            item.fields["encrypted_content"] = self._encrypt("".join(part["text"] for part in item.parts["content"]))

    def _close_item(self, item: _OpenItem | _OpenCall | _OpenExtension, status: str, events: list[Event]) -> None:
        whole = item.wire(status)
        events.append(self._item_event("done", item.index, whole))
        self.response["output"].append(whole)

    # Events.

    def _next(self) -> int:
        self._sequence = (number := self._sequence) + 1
        return number

    def _response_event(self, kind: str, response: dict[str, Any]) -> Event:
        return {"type": kind, "sequence_number": self._next(), "response": response}

    def _item_event(self, what: str, index: int, item: dict[str, Any]) -> Event:
        kind = f"response.output_item.{what}"
        return {"type": kind, "sequence_number": self._next(), "output_index": index, "item": item}

    def _in_item(self, kind: str, item: _OpenItem | _OpenCall) -> Event:
        return {"type": kind, "sequence_number": self._next(), "item_id": item.id, "output_index": item.index}

    def _in_part(self, kind: str, item: _OpenItem, part: _OpenPart) -> Event:
        event = self._in_item(kind, item)
        event[_PARTS[part.kind].index] = part.index
        return event


_TAKES: Final[dict[type, Callable[[StateMachine, Any], list[Event]]]] = {
    outputs.Text: StateMachine._take_text,
    outputs.Refusal: StateMachine._take_refusal,
    outputs.Annotation: StateMachine._take_annotation,
    outputs.Message: StateMachine._take_message,
    outputs.Reasoning: StateMachine._take_reasoning,
    outputs.ReasoningSummary: StateMachine._take_summary,
    outputs.ToolCall: StateMachine._take_call,
    outputs.ToolArguments: StateMachine._take_arguments,
    outputs.Item: StateMachine._take_item,
    outputs.Event: StateMachine._take_event,
    outputs.Usage: StateMachine._take_usage,
    outputs.Finish: StateMachine._take_finish,
}


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise IllegalOutput(f"text must be str, not {type(value).__name__}")
    return value


def _logprobs(entries: Sequence[outputs.LogProb]) -> list[dict[str, Any]]:
    try:
        return [_token(entry) | {"top_logprobs": [_token(rival) for rival in entry.top]} for entry in entries]
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise IllegalOutput("logprobs are a sequence of LogProb(token, logprob, bytes, top)") from error


def _token(entry: outputs.LogProb) -> dict[str, Any]:
    # Minus infinity is a fine probability of nought, but no JSON.
    value = float(entry.logprob) if math.isfinite(entry.logprob) else _LEAST_LOGPROB
    return {
        "token": replace_surrogates(_string(entry.token)),
        "logprob": value,
        "bytes": list(bytes(iter(entry.bytes))),
    }


def _extension(kind: str, fields: Mapping[str, Any], *, reserved: set[str]) -> dict[str, Any]:
    if not EXTENSION_TYPE.fullmatch(_string(kind)):
        raise IllegalOutput("an extension's type is slug:name")
    try:
        # The round trip copies, and proves that it is JSON, and not too deep for those who read it within a response.
        encoded = to_json(dict(fields), inf_nan_mode="null")
        from_json(b"[" * _DEPTH_AROUND + encoded + b"]" * _DEPTH_AROUND)
        members: dict[str, Any] = from_json(encoded)
    except (PydanticSerializationError, TypeError, ValueError) as error:
        raise IllegalOutput("an extension's fields must be a mapping of JSON values") from error
    if taken := reserved & members.keys():
        raise IllegalOutput(f"an extension's fields may not hold {', '.join(sorted(taken))}")
    return members
