"""Constraints of a request on the model's output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import (
    InvalidRequest,
)
from ..protocol.json_schema import Schema
from ..schema.request import CreateRequest, JsonSchema, TextFormat
from ..schema.tools import FunctionTool
from ..tools import HostedTool

__all__ = ["Constraints", "compile_format", "compile_strict_arguments"]


@dataclass(frozen=True, slots=True)
class Constraints:
    """The compiled constraints of a request.

    Attributes:
        format: The schema of the answer's text, or None for free text.
        arguments: The schemas of the arguments of strict functions, by function name.
        hosted: The hosted tools that the request switched on, by name.
    """

    format: Schema | None = None
    arguments: Mapping[str, Schema] = field(default_factory=dict)
    hosted: Mapping[str, HostedTool] = field(default_factory=dict)


_MAX_STRICT_KEYWORDS = 50_000
"""Maximum weight of the schemas of all strict functions together, because each request compiles them."""


def compile_format(text_format: TextFormat) -> Schema | None:
    """Return the schema of the answer's text, or None for free text.

    Raises:
        InvalidRequest: The schema is not valid.
    """
    if isinstance(text_format, JsonSchema) and text_format.schema_ is not None:
        return _compile(text_format.schema_, "text.format.schema")
    return Schema({"type": "object"}) if text_format.type != "text" else None


def compile_strict_arguments(request: CreateRequest) -> dict[str, Schema]:
    """Return the schemas of the arguments of strict functions, by function name.

    Raises:
        InvalidRequest: A schema is not valid, or all schemas together are too large.
    """
    schemas: dict[str, Schema] = {}
    weight = 0
    for index, tool in enumerate(request.tools):
        if isinstance(tool, FunctionTool) and tool.strict and tool.parameters is not None:
            schema = schemas[tool.name] = _compile(tool.parameters, f"tools[{index}].parameters")
            weight += schema.weight
            if weight > _MAX_STRICT_KEYWORDS:
                raise InvalidRequest("The schemas of strict functions in 'tools' are too large.", param="tools")
    return schemas


def _compile(schema: dict[str, Any], param: str) -> Schema:
    try:
        return Schema(schema)
    except ValueError as error:
        raise InvalidRequest(f"'{param}' {error}", param=param, code="invalid_schema") from None
