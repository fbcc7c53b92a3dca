"""Content parts of messages, function outputs and reasoning (specification, "Content").

User and model content have different types. On input, a text part of the wrong type for its role is converted, because
clients and servers differ in this respect. On output, the types are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .base import MAX_ITEMS, Lenient, Optional, Text, WireModel, bounded


class LogProb(WireModel):
    """A token's log probability, with those of the alternatives."""

    token: str
    logprob: float
    bytes: Annotated[list[int], Field(fail_fast=True)]
    top_logprobs: Annotated[list[TopLogProb], bounded(20), Lenient] = Field(default_factory=list)


class TopLogProb(WireModel):
    """An alternative token's log probability."""

    token: str
    logprob: float
    bytes: Annotated[list[int], Field(fail_fast=True)]


class UrlCitation(WireModel):
    """A citation of a web page within a text."""

    type: Literal["url_citation"] = "url_citation"
    url: str
    start_index: Annotated[int, Field(ge=0)]
    end_index: Annotated[int, Field(ge=0)]
    title: str


class ContentPart(WireModel):
    """The base of all content parts."""

    @property
    def plain(self) -> str:
        """The part as plain text; empty if it is not text."""
        return ""


class TextPart(ContentPart):
    """A text part."""

    text: Text

    @property
    def plain(self) -> str:
        """The text."""
        return self.text


class InputText(TextPart):
    """Text from the user, the system or the developer."""

    type: Literal["input_text"] = "input_text"


class InputImage(ContentPart):
    """An image, as an https or data URL. The kit does not fetch it."""

    type: Literal["input_image"] = "input_image"
    image_url: Annotated[str, Field(max_length=20_971_520)]
    detail: Annotated[
        Literal["low", "high", "auto"], BeforeValidator(lambda value: "auto" if value is None else value)
    ] = "auto"


class InputFile(ContentPart):
    """A file, inline as base64 or by URL. The kit does not fetch it."""

    type: Literal["input_file"] = "input_file"
    filename: Optional[str] = None
    file_data: Optional[Annotated[str, Field(max_length=33_554_432)]] = None
    file_url: Optional[str] = None


class InputVideo(ContentPart):
    """A video by URL. The kit does not fetch it."""

    type: Literal["input_video"] = "input_video"
    video_url: str


def _known_annotations(value: Any) -> Any:
    if isinstance(value, list):
        return [
            annotation
            for annotation in value
            if not isinstance(annotation, Mapping) or annotation.get("type") == "url_citation"
        ]
    return [] if value is None else value


class OutputText(TextPart):
    """Text from the model. Annotations of types that the specification does not define are dropped."""

    type: Literal["output_text"] = "output_text"
    annotations: Annotated[list[UrlCitation], bounded(MAX_ITEMS), BeforeValidator(_known_annotations)] = Field(
        default_factory=list
    )
    logprobs: Annotated[list[LogProb], Field(fail_fast=True), Lenient] = Field(default_factory=list)


class Refusal(ContentPart):
    """The model's refusal to answer."""

    type: Literal["refusal"] = "refusal"
    refusal: Text

    @property
    def plain(self) -> str:
        """The refusal."""
        return self.refusal


class ReasoningText(TextPart):
    """Raw reasoning of the model."""

    type: Literal["reasoning_text"] = "reasoning_text"


class SummaryText(TextPart):
    """A summary of the model's reasoning."""

    type: Literal["summary_text"] = "summary_text"


Part = InputText | InputImage | InputFile | InputVideo | OutputText | Refusal | ReasoningText | SummaryText
"""Any content part."""

_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def part_kind(value: Any) -> str | None:
    """Return the tag of a member of a discriminated union, from the `type` of a mapping or a model."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"~{kind}" if isinstance(kind, str) else None


def parts_as(kind: str) -> BeforeValidator:
    """Return a validator that converts a string, null or text parts of any type into parts of the given text type."""

    def convert(value: Any) -> Any:
        if value is None:
            return []
        if isinstance(value, str):
            return [{"type": kind, "text": value}]
        if isinstance(value, Sequence):
            return [
                {**part, "type": kind} if isinstance(part, Mapping) and part.get("type") in _TEXT_TYPES else part
                for part in value
            ]
        return value

    return BeforeValidator(convert)


UserPart = Annotated[
    Annotated[InputText, Tag("~input_text")]
    | Annotated[InputImage, Tag("~input_image")]
    | Annotated[InputFile, Tag("~input_file")]
    | Annotated[InputVideo, Tag("~input_video")],
    Discriminator(part_kind),
]
"""A part of a user message or a function's output."""

ModelPart = Annotated[
    Annotated[OutputText, Tag("~output_text")] | Annotated[Refusal, Tag("~refusal")],
    Discriminator(part_kind),
]
"""A part of an assistant message."""
