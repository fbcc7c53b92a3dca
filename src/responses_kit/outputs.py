"""Outputs: the values that a backend yields.

The state machine turns outputs into items and events. A plain `str` counts as a `Text`. Outputs describe the model's
output only; ids, indices and event order are up to the state machine.

==================  ==============================================================================
output              effect on the response
==================  ==============================================================================
`str`, `Text`       extends the current message's text, or opens a message
`Refusal`           extends the current message's refusal
`Annotation`        cites a source for the current message's text
`Message`           opens a new message, optionally with a phase
`Reasoning`         extends the current reasoning item's raw text
`ReasoningSummary`  extends the current reasoning item's summary
`ToolCall`          opens a function call; several may be open at once
`ToolArguments`     extends an open call's arguments
`Item`              adds a complete item of an extension type, or opens or finishes one
`Event`             emits an extension event if the kit has `stream_extensions=True`
`Usage`             sets the token counts; the last one applies
`Finish`            sets the reason for the end of generation; only `Usage` may follow
==================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Annotation",
    "Event",
    "Finish",
    "Item",
    "LogProb",
    "Message",
    "Output",
    "Outputs",
    "Reasoning",
    "ReasoningSummary",
    "Refusal",
    "Text",
    "ToolArguments",
    "ToolCall",
    "Usage",
]


@dataclass(slots=True)
class LogProb:
    """A token's log probability, with those of the alternatives.

    Args:
        token: The token's text; it may be a part of a character.
        logprob: The natural logarithm of its probability. A value that is not finite is sent as -9999.
        bytes: The token's UTF-8 bytes.
        top: The most likely tokens at this position, most likely first, without `top` of their own.
    """

    token: str
    logprob: float
    bytes: Sequence[int] = ()
    top: Sequence[LogProb] = ()


@dataclass(slots=True)
class Text:
    """A piece of the answer's text. An empty piece opens a message without adding text."""

    text: str
    logprobs: Sequence[LogProb] = ()


@dataclass(slots=True)
class Refusal:
    """A piece of the model's refusal to answer."""

    text: str


@dataclass(slots=True)
class Annotation:
    """A citation of a web page within the current text part (`url_citation`).

    Args:
        url: The page's address.
        title: The page's title.
        start_index: Index of the first character of the cited span within the part's text.
        end_index: Index after the span's last character.
    """

    url: str
    title: str = ""
    start_index: int = 0
    end_index: int = 0


@dataclass(slots=True)
class Message:
    """A new message; open items are closed, and later text extends this message."""

    phase: Literal["commentary", "final_answer"] | None = None


@dataclass(slots=True)
class Reasoning:
    """A piece of the model's raw reasoning."""

    text: str


@dataclass(slots=True)
class ReasoningSummary:
    """A piece of a summary of the reasoning, for display.

    Args:
        text: The piece.
        new_part: Whether the piece starts a new summary part.
    """

    text: str
    new_part: bool = False


@dataclass(slots=True)
class ToolCall:
    """A call of a function tool. It stays open for `ToolArguments` until another kind of output is yielded.

    Args:
        name: The function's name.
        arguments: The arguments as JSON text, or their first piece. If they are empty in the end, they become `{}`.
        call_id: 1 to 64 characters that pair the call with its output; by default the state machine generates them.
    """

    name: str
    arguments: str = ""
    call_id: str | None = None


@dataclass(slots=True)
class ToolArguments:
    """A piece of an open call's arguments.

    Args:
        delta: The piece.
        call_id: The call; by default the one that was opened last.
    """

    delta: str
    call_id: str | None = None


@dataclass(slots=True)
class Item:
    """An item of an extension type: complete, or in progress and later finished.

    An item with the status "in_progress" stays open until an `Item` with the same `key` finishes it. Several may be
    open at once. Until all are finished, only `Item`, `Event`, `Usage` and `Finish` may be yielded.

    Args:
        type: `slug:name`.
        fields: The members besides `id`, `type` and `status`; JSON values.
        status: "in_progress", or a final status such as "completed" or "failed". Items that are still open when
            generation is cut off become "incomplete" automatically.
        key: Identifies an item that is in progress; not sent to clients.
    """

    type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    status: str = "completed"
    key: str | None = None


@dataclass(slots=True)
class Event:
    """An extension event; sent only if the kit has `stream_extensions=True`.

    Args:
        type: `slug:name`.
        fields: The members besides `type` and `sequence_number`; JSON values.
    """

    type: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Usage:
    """Token counts of the whole response; without it the response's usage is null.

    Args:
        input_tokens: Tokens of the prompt.
        output_tokens: Generated tokens, including reasoning.
        cached_tokens: Input tokens that were cached.
        reasoning_tokens: Output tokens that were reasoning.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Finish:
    """The reason for the end of generation. A backend that returns without one has stopped normally."""

    reason: Literal["stop", "max_output_tokens", "content_filter"] = "stop"


Output = (
    str
    | Text
    | Refusal
    | Annotation
    | Message
    | Reasoning
    | ReasoningSummary
    | ToolCall
    | ToolArguments
    | Item
    | Event
    | Usage
    | Finish
)
"""Any value that a backend may yield."""

Outputs = Iterable[Output] | AsyncIterable[Output] | Awaitable[Iterable[Output] | AsyncIterable[Output]]
"""The return type of `Backend.generate`: a generator of either kind, a `str`, or a coroutine of one."""
