"""Requests of LMSP 1.0 (6.1 and 6.5), and their translation to requests of the kit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ...protocol.validation import validate
from ...schema.base import MAX_ITEMS, MAX_TOOLS, Text, WireModel, bounded
from ...schema.content import SummaryText, part_kind
from ...schema.items import CallId, Id, ToolName
from ...schema.request import CreateRequest, Number, PlainText, Request
from ...schema.tools import NamedFunction, choice_kind

__all__ = ["ResponseRequest", "to_create_request"]


class TextPart(WireModel):
    """Text, the only content of LMSP 1.0: `output_text` in the model's messages, else `input_text`."""

    type: Literal["input_text", "output_text"]
    text: Text


class Message(WireModel):
    """A message of the system, the user or the model."""

    type: Literal["message"]
    id: Id = ""
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[TextPart], bounded(MAX_ITEMS)]


class FunctionCall(WireModel):
    """A function call by the model."""

    type: Literal["function_call"]
    id: Id = ""
    call_id: CallId
    name: ToolName
    arguments: str


class FunctionCallOutput(WireModel):
    """The output of a function that the client ran."""

    type: Literal["function_call_output"]
    id: Id = ""
    call_id: CallId
    output: Text


class Reasoning(WireModel):
    """A summary of the model's reasoning."""

    type: Literal["reasoning"]
    id: Id = ""
    summary: Annotated[list[SummaryText], bounded(MAX_ITEMS)]


InputItem = Annotated[
    Annotated[Message, Tag("~message")]
    | Annotated[FunctionCall, Tag("~function_call")]
    | Annotated[FunctionCallOutput, Tag("~function_call_output")]
    | Annotated[Reasoning, Tag("~reasoning")],
    Discriminator(part_kind),
]


class Tool(WireModel):
    """A function that the client can run."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("~mode")] | Annotated[NamedFunction, Tag("~function")],
    Discriminator(choice_kind),
]


class JsonSchema(WireModel):
    """`response_format.json_schema`."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class JsonSchemaFormat(WireModel):
    """Output that conforms to a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    Annotated[PlainText, Tag("~text")] | Annotated[JsonSchemaFormat, Tag("~json_schema")], Discriminator(part_kind)
]


class ResponseRequest(Request):
    """The body of `POST /responses` and `POST /tasks`. Other members are ignored."""

    model: str
    input: Annotated[list[InputItem], bounded(MAX_ITEMS)]
    stream: bool = False
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], bounded(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    store: bool | None = None
    previous_response_id: str | None = None
    extensions: dict[str, Any] | None = None


def to_create_request(request: ResponseRequest, **overrides: Any) -> CreateRequest:
    """Return the kit's request for one of LMSP. Positions in `input` and `tools` stay the same.

    Args:
        request: The validated request.
        overrides: Members of the kit's request that the endpoint sets.

    Raises:
        InvalidRequest: The kit is stricter than LMSP.
    """
    members = request.model_dump(
        include={"model", "input", "stream", "max_output_tokens", "temperature", "tools", "tool_choice"}
        | {"previous_response_id"}
    )
    return validate(CreateRequest, {**members, "text": {"format": _text_format(request.response_format)}, **overrides})


def _text_format(response_format: PlainText | JsonSchemaFormat | None) -> Mapping[str, Any]:
    if not isinstance(response_format, JsonSchemaFormat):
        return {"type": "text"}
    return {"type": "json_schema", **response_format.json_schema.model_dump(by_alias=True)}
