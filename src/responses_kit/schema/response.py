"""The response object and its parts (specification, `ResponseResource`), and the result of a compaction.

The state machine holds a response as a plain mapping of this shape. These models are for readers of a response.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .base import Optional, WireModel
from .content import part_kind
from .items import Item, Message
from .request import Reasoning
from .tools import Tool, ToolChoice


class InputTokensDetails(WireModel):
    """The number of input tokens that were cached."""

    cached_tokens: int


class OutputTokensDetails(WireModel):
    """The number of output tokens that were reasoning."""

    reasoning_tokens: int


class Usage(WireModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Error(WireModel):
    """The reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(WireModel):
    """The reason why a response is incomplete."""

    reason: str


class TextFormat(WireModel):
    """The echo of `text.format: text`."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """The echo of `text.format: json_object`."""

    type: Literal["json_object"]


class JsonSchemaFormat(WireModel):
    """The echo of `text.format: json_schema`, with null for the schema itself."""

    type: Literal["json_schema"]
    name: str
    description: str | None
    schema_: Annotated[None, Field(alias="schema")]
    strict: bool


class TextEcho(WireModel):
    """The echo of `text`, as applied."""

    format: Annotated[
        Annotated[TextFormat, Tag("~text")]
        | Annotated[JsonObjectFormat, Tag("~json_object")]
        | Annotated[JsonSchemaFormat, Tag("~json_schema")],
        Discriminator(part_kind),
    ]
    verbosity: Optional[Literal["low", "medium", "high"]] = None


class Response(WireModel):
    """A response: the request's parameters as applied, and the output."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: IncompleteDetails | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Item]
    error: Error | None
    tools: list[Tool]
    tool_choice: ToolChoice
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: TextEcho
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: Reasoning | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, Any]
    safety_identifier: str | None
    prompt_cache_key: str | None

    @property
    def output_text(self) -> str:
        """All text of all assistant messages in one string."""
        return "".join(item.text for item in self.output if isinstance(item, Message))


class CompactedResponse(WireModel):
    """A compacted conversation (specification, `CompactResource`), with items that replace the original ones."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Item]
    usage: Usage
