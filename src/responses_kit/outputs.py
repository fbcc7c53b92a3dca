"""What a backend may yield.

A backend yields outputs; the state machine turns them into items and events. A plain `str` is a `Text`.
Outputs say what the model produced and nothing of ids, indices or order on the wire.

==================  ==============================================================================
output              what it does to the response
==================  ==============================================================================
`str`, `Text`       goes on with the current message's text, or opens a message for it
`Refusal`           goes on with the current message's refusal
`Annotation`        cites a source for the current message's text
`Message`           starts a new message, optionally with a phase
`Reasoning`         goes on with the current reasoning item's raw text
`ReasoningSummary`  goes on with the reasoning item's summary
`ToolCall`          opens a function call; several may be open at once
`ToolArguments`     goes on with an open call's arguments
`Item`              emits an item of an extension type, whole, or its beginning and later its end
`Event`             emits an extension event, where the kit's owner switched them on
`Usage`             states the token counts; the last one counts
`Finish`            says why generation ended; only `Usage` may follow
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
    """How likely a token was, and what else was likely in its place.

    Args:
        token: The token's text; may be a part of a character.
        logprob: Natural logarithm of its probability; finite.
        bytes: The token's UTF-8 bytes.
        top: The most likely tokens at this position, most likely first, without `top` of their own.
    """

    token: str
    logprob: float
    bytes: Sequence[int] = ()
    top: Sequence[LogProb] = ()


@dataclass(slots=True)
class Text:
    """A piece of the answer's text. An empty piece opens the message and adds nothing."""

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
        url: The page.
        title: Its title.
        start_index: First character of the cited span within the part's text.
        end_index: One past its last character.
    """

    url: str
    title: str = ""
    start_index: int = 0
    end_index: int = 0


@dataclass(slots=True)
class Message:
    """Starts a new message: what is open is closed, and text that follows goes into this one."""

    phase: Literal["commentary", "final_answer"] | None = None


@dataclass(slots=True)
class Reasoning:
    """A piece of the model's raw reasoning."""

    text: str


@dataclass(slots=True)
class ReasoningSummary:
    """A piece of a summary of the reasoning, fit to be shown.

    Args:
        text: The piece.
        new_part: Start a further summary part with it.
    """

    text: str
    new_part: bool = False


@dataclass(slots=True)
class ToolCall:
    """A call of a function tool. It stays open for `ToolArguments` until something that is no call is yielded.

    Args:
        name: The function.
        arguments: Its arguments as JSON text, or the beginning of them. Empty at the end counts as `{}`.
        call_id: 1 to 64 characters that pair the call with its output; made by the machine where left out.
    """

    name: str
    arguments: str = ""
    call_id: str | None = None


@dataclass(slots=True)
class ToolArguments:
    """A piece of an open call's arguments.

    Args:
        delta: The piece.
        call_id: Which call; the one opened last where left out.
    """

    delta: str
    call_id: str | None = None


@dataclass(slots=True)
class Item:
    """An item of an extension type, whole; or the beginning of one, or its end.

    With the status "in_progress" the item begins, and stays open until an `Item` with the same `key` ends it. Several
    may be open at once. Meanwhile nothing else may be yielded but `Event`, `Usage` and whole items.

    Args:
        type: `slug:name`.
        fields: Its members beside `id`, `type` and `status`; JSON values.
        status: "in_progress", or how it ended: "completed", "failed" or the like. What is still open when generation
            is cut becomes "incomplete" by itself.
        key: Names an item that begins or ends; never sent.
    """

    type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    status: str = "completed"
    key: str | None = None


@dataclass(slots=True)
class Event:
    """An extension event; sent only where the kit was made with `stream_extensions=True`.

    Args:
        type: `slug:name`.
        fields: Its members beside `type` and `sequence_number`; JSON values.
    """

    type: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Usage:
    """Token counts of the whole response; without it the response's usage is null.

    Args:
        input_tokens: Tokens of the prompt.
        output_tokens: Tokens generated, reasoning included.
        cached_tokens: How many of the input tokens needed no evaluation.
        reasoning_tokens: How many of the output tokens were reasoning.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Finish:
    """Why generation ended. Returning without one means `stop`; raising means failure."""

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
"""Anything a backend may yield."""

Outputs = Iterable[Output] | AsyncIterable[Output] | Awaitable[Iterable[Output] | AsyncIterable[Output]]
"""What `Backend.generate` may return: a generator of either kind, or a coroutine of one; a `str` is iterable too."""
