"""Content parts: what messages, outputs and reasoning are made of (specification, "Content").

User and model content have different shapes. Coming in, a text part of the wrong kind for its role is taken
for the right one, since clients and servers differ there; going out, the kinds are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .base import MAX_ITEMS, Lenient, Optional, Text, WireModel, bounded


class LogProb(WireModel):
    """A token's log probability, with those of its rivals."""

    token: str
    logprob: float
    bytes: Annotated[list[int], Field(fail_fast=True)]
    top_logprobs: Annotated[list[TopLogProb], bounded(20), Lenient] = Field(default_factory=list)


class TopLogProb(WireModel):
    """A rival token's log probability."""

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
    """What all parts share."""

    @property
    def plain(self) -> str:
        """The part as plain text; empty for what is none."""
        return ""


class TextPart(ContentPart):
    """A part that is text."""

    text: Text

    @property
    def plain(self) -> str:
        """The text."""
        return self.text


class InputText(TextPart):
    """Text from the user, the system or the developer."""

    type: Literal["input_text"] = "input_text"


class InputImage(ContentPart):
    """A picture, as an https or data URL. The kit itself never fetches it."""

    type: Literal["input_image"] = "input_image"
    image_url: Annotated[str, Field(max_length=20_971_520)]
    detail: Annotated[
        Literal["low", "high", "auto"], BeforeValidator(lambda value: "auto" if value is None else value)
    ] = "auto"


class InputFile(ContentPart):
    """A file, inline as base64 or by URL. The kit itself never fetches it."""

    type: Literal["input_file"] = "input_file"
    filename: Optional[str] = None
    file_data: Optional[Annotated[str, Field(max_length=33_554_432)]] = None
    file_url: Optional[str] = None


class InputVideo(ContentPart):
    """A video by URL. The kit itself never fetches it."""

    type: Literal["input_video"] = "input_video"
    video_url: str


def _known_annotations(value: Any) -> Any:
    if isinstance(value, list):
        return [note for note in value if not isinstance(note, Mapping) or note.get("type") == "url_citation"]
    return [] if value is None else value


class OutputText(TextPart):
    """Text from the model. Annotations of kinds that the specification doesn't know are dropped."""

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

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def part_kind(value: Any) -> str | None:
    """The discriminator of part unions: `type` of a mapping or a model."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"~{kind}" if isinstance(kind, str) else None


def parts_as(kind: str) -> BeforeValidator:
    """A validator that turns a string, null or text parts of any kind into parts of the given text kind."""

    def convert(value: Any) -> Any:
        if value is None:
            return []
        if isinstance(value, str):
            return [{"type": kind, "text": value}]
        if isinstance(value, Sequence):
            return [
                {**part, "type": kind} if isinstance(part, Mapping) and part.get("type") in _TEXTS else part
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
"""What a user message or a function's output may hold."""

ModelPart = Annotated[
    Annotated[OutputText, Tag("~output_text")] | Annotated[Refusal, Tag("~refusal")],
    Discriminator(part_kind),
]
"""What an assistant message may hold."""
