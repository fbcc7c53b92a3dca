"""Constraints that a request puts on the model's output, compiled once."""

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
    """What a request demands beside what its turn says, compiled once.

    Attributes:
        format: What the answer's text has to be, or None for free text.
        arguments: What the arguments of strict functions have to be, by name.
        hosted: Hosted tools that the request switched on, by name.
    """

    format: Schema | None = None
    arguments: Mapping[str, Schema] = field(default_factory=dict)
    hosted: Mapping[str, HostedTool] = field(default_factory=dict)


_MOST_STRICT = 50_000
"""Keywords of all strict functions together: they are compiled for each request."""


def compile_format(text_format: TextFormat) -> Schema | None:
    """Return the schema of the answer's text, or None for free text.

    Raises:
        InvalidRequest: The schema is not valid.
    """
    if isinstance(text_format, JsonSchema) and text_format.schema_ is not None:
        return _schema(text_format.schema_, "text.format.schema")
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
            schema = schemas[tool.name] = _schema(tool.parameters, f"tools[{index}].parameters")
            weight += schema.weight
            if weight > _MOST_STRICT:
                raise InvalidRequest("The strict functions' schemas are too large together.", param="tools")
    return schemas


def _schema(schema: dict[str, Any], param: str) -> Schema:
    try:
        return Schema(schema)
    except ValueError as error:
        raise InvalidRequest(f"The schema {error}", param=param, code="invalid_schema") from None
