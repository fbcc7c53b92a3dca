"""Requests (specification, revisions 2026-01-15 and 2026-04-24).

`CreateRequest` is the specification's `CreateResponseBody`, `CompactRequest` its `CompactResponseMethodPublicBody`.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from .base import MAX_ITEMS, MAX_TOOLS, Text, WireModel, bounded
from .content import part_kind
from .items import InputItem
from .tools import Tool, ToolChoice


class PlainText(WireModel):
    """Free text."""

    type: Literal["text"] = "text"


class JsonObject(WireModel):
    """Any JSON object."""

    type: Literal["json_object"] = "json_object"


class JsonSchema(WireModel):
    """JSON that matches a schema. Without a schema it is equivalent to `json_object`."""

    type: Literal["json_schema"] = "json_schema"
    name: Annotated[str, Field(max_length=64)] = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Annotated[bool, BeforeValidator(lambda value: False if value is None else value)] = False


TextFormat = Annotated[
    Annotated[PlainText, Tag("~text")]
    | Annotated[JsonObject, Tag("~json_object")]
    | Annotated[JsonSchema, Tag("~json_schema")],
    Discriminator(part_kind),
]
"""The required format of the answer's text."""


class TextOptions(WireModel):
    """`text`: the answer's format and length."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(WireModel):
    """`reasoning`: the effort, and the form of the summary."""

    effort: Literal["none", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["concise", "detailed", "auto"] | None = None


class StreamOptions(WireModel):
    """`stream_options`."""

    include_obfuscation: bool | None = None


def _input_kind(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~items"


Input = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[list[InputItem], bounded(MAX_ITEMS), Tag("~items")],
    Discriminator(_input_kind),
]
"""A text, which is equivalent to one user message, or items."""

_MAX_METADATA_ENTRIES = 16
"""The specification's `maxProperties`."""


def _cut_metadata(value: Any) -> Any:
    # Pydantic has no fail_fast for dictionaries: it would report an error for each of millions of invalid entries.
    return dict(islice(value.items(), _MAX_METADATA_ENTRIES + 1)) if isinstance(value, dict) else value


Key = Annotated[str, Field(max_length=64)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Request(WireModel):
    """The base of all requests: a null member counts as omitted."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {key: member for key, member in value.items() if member is not None}
        return value


class CreateRequest(Request):
    """The parameters of `POST /responses`."""

    model: str | None = None
    input: Input | None = None
    previous_response_id: str | None = None
    instructions: Text | None = None
    include: Annotated[
        list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]], bounded(MAX_TOOLS)
    ] = Field(default_factory=list)
    tools: Annotated[list[Tool], bounded(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    max_output_tokens: Annotated[int, Field(le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[
        dict[Key, Annotated[str, Field(max_length=512)]],
        Field(max_length=_MAX_METADATA_ENTRIES),
        BeforeValidator(_cut_metadata),
    ] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions | None = None
    background: bool = False
    store: bool = True
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    conversation: Any = None
    prompt: Any = None
    safety_identifier: Key | None = None
    prompt_cache_key: Key | None = None


class CompactRequest(Request):
    """The parameters of `POST /responses/compact`."""

    model: str
    input: Input | None = None
    previous_response_id: str | None = None
    instructions: Text | None = None
    prompt_cache_key: Key | None = None
