"""The streaming events (specification, "Streaming").

The state machine emits events as plain mappings of these shapes, because a model per delta would dominate the cost of
a stream. These models are for readers of a stream, such as clients and tests.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from .base import Optional, WireModel
from .content import InputText, LogProb, OutputText, ReasoningText, Refusal, SummaryText, UrlCitation, part_kind
from .items import Item
from .response import Response

StreamPart = Annotated[
    Annotated[InputText, Tag("~input_text")]
    | Annotated[OutputText, Tag("~output_text")]
    | Annotated[Refusal, Tag("~refusal")]
    | Annotated[ReasoningText, Tag("~reasoning_text")]
    | Annotated[SummaryText, Tag("~summary_text")],
    Discriminator(part_kind),
]


class StreamEvent(WireModel):
    """The base of all events: the type, and the position in the stream, counted from 0."""

    type: str
    sequence_number: int


class ResponseEvent(StreamEvent):
    """A change of the response's status, with the whole response object."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class OutputItemEvent(StreamEvent):
    """The start of an item with its initial members, or its end with all members."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class _InItem(StreamEvent):
    item_id: str
    output_index: int


class ContentPartEvent(_InItem):
    """The start or end of a content part."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: StreamPart


class SummaryPartEvent(_InItem):
    """The start or end of a part of a reasoning summary."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int
    part: StreamPart


class TextDelta(_InItem):
    """A piece of text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[LogProb] = Field(default_factory=list)
    obfuscation: Optional[str] = None


class TextDone(_InItem):
    """The complete text of a text part."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[LogProb] = Field(default_factory=list)


class AnnotationAdded(_InItem):
    """A citation within a text part."""

    type: Literal["response.output_text.annotation.added"]
    content_index: int
    annotation_index: int
    annotation: UrlCitation


class RefusalDelta(_InItem):
    """A piece of a refusal."""

    type: Literal["response.refusal.delta"]
    content_index: int
    delta: str


class RefusalDone(_InItem):
    """A complete refusal."""

    type: Literal["response.refusal.done"]
    content_index: int
    refusal: str


class ReasoningDelta(_InItem):
    """A piece of raw reasoning."""

    type: Literal["response.reasoning.delta"]
    content_index: int
    delta: str


class ReasoningDone(_InItem):
    """The complete raw reasoning of a part."""

    type: Literal["response.reasoning.done"]
    content_index: int
    text: str


class SummaryDelta(_InItem):
    """A piece of a reasoning summary."""

    type: Literal["response.reasoning_summary_text.delta"]
    summary_index: int
    delta: str


class SummaryDone(_InItem):
    """A complete part of a reasoning summary."""

    type: Literal["response.reasoning_summary_text.done"]
    summary_index: int
    text: str


class ArgumentsDelta(_InItem):
    """A piece of a function call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_InItem):
    """A function call's complete arguments."""

    type: Literal["response.function_call_arguments.done"]
    arguments: str


class ErrorPayload(WireModel):
    """An error's type, code, message and parameter."""

    type: str
    code: str | None
    message: str
    param: str | None


class ErrorEvent(StreamEvent):
    """An error after the start of the stream; `response.failed` follows."""

    type: Literal["error"]
    error: ErrorPayload


class ExtensionEvent(StreamEvent):
    """An event of an extension type, `slug:name`. Clients may ignore it."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=":")]


Event = (
    ResponseEvent
    | OutputItemEvent
    | ContentPartEvent
    | SummaryPartEvent
    | TextDelta
    | TextDone
    | AnnotationAdded
    | RefusalDelta
    | RefusalDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
    | ExtensionEvent
)
"""Any event, distinguished by `type`."""
