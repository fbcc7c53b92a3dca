"""Parsing and validation of requests, with errors that name the invalid parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, from_json, to_json

from ..errors import InvalidRequest
from ..schema.request import CompactRequest, CreateRequest, Request

__all__ = ["as_json", "parse_compact_request", "parse_json", "parse_request", "validate"]

T = TypeVar("T", bound=Request)

_RULES: Final = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "union_tag_invalid": "has an unknown type",
    "union_tag_not_found": "must be an object with a known type",
    "string_pattern_mismatch": "has an invalid length or invalid characters",
    "string_unicode": "must not contain lone surrogates",
    "invalid_key": "must have strings as keys",
}
"""The rule that each type of pydantic error breaks. Pydantic's own messages may name classes or quote the input."""

_QUOTABLE_ERRORS: Final = frozenset(
    {
        "literal_error",
        "less_than_equal",
        "greater_than_equal",
        "string_too_long",
        "string_too_short",
        "too_long",
        "too_short",
        "int_parsing_size",
    }
)
"""Types of pydantic errors with messages that name limits and choices only."""


def parse_json(body: bytes) -> Any:
    """Return the JSON value of a request's body.

    Raises:
        InvalidRequest: The body is not valid JSON, contains NaN or lone surrogates, or its numbers or nesting exceed
            the parser's limits. The message contains the position.
    """
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def as_json(value: Any) -> Any:
    """Return a copy of Python values after a round trip through JSON.

    Raises:
        InvalidRequest: A value cannot be represented in JSON.
    """
    try:
        return parse_json(to_json(value))
    except (PydanticSerializationError, ValueError):
        raise InvalidRequest("The request must consist of JSON values.", code="invalid_json") from None


def parse_request(body: Any) -> CreateRequest:
    """Return the validated request.

    Args:
        body: JSON values, as `parse_json` or `as_json` return them.

    Raises:
        InvalidRequest: The request is not valid; `param` is the path of the first invalid parameter.
    """
    request = validate(CreateRequest, body)
    if request.max_output_tokens is not None and request.max_output_tokens < _MIN_OUTPUT_TOKENS:
        raise InvalidRequest(
            f"'max_output_tokens' must be greater than or equal to {_MIN_OUTPUT_TOKENS}.", param="max_output_tokens"
        )
    return request


def parse_compact_request(body: Any) -> CompactRequest:
    """Return the validated request for a compaction.

    Args:
        body: JSON values, as `parse_json` or `as_json` return them.

    Raises:
        InvalidRequest: The request is not valid; `param` is the path of the first invalid parameter.
    """
    return validate(CompactRequest, body)


_MIN_OUTPUT_TOKENS: Final = 16
"""The specification's `minimum`. It applies to requests on the wire only, not to models that build requests."""


def validate(model: type[T], body: Any) -> T:
    """Return a validated request.

    Args:
        model: The request's class.
        body: JSON values, as `parse_json` or `as_json` return them.

    Raises:
        InvalidRequest: The request is not valid; `param` is the path of the first invalid parameter.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _invalid_request(error.errors(include_url=False, include_input=False)[0]) from None


def _invalid_request(error: ErrorDetails) -> InvalidRequest:
    param = _path(error["loc"])
    kind = error["type"]
    if kind.startswith("union_tag") and error["loc"][0] == "input" and len(error["loc"]) <= 3:
        rule = "must be an item with a known type, or a message with a known role"
    elif error["loc"] == ("input", "~items") and kind == "list_type":
        rule = "must be a string or a list of items"
    elif param == "metadata" and kind == "string_type":
        rule = "must contain strings only"
    elif kind in _QUOTABLE_ERRORS:
        rule = error["msg"].replace("Input should", "must").replace("String should", "must")
        rule = rule.replace("List should", "must").replace("Dictionary should", "must")
        rule = rule.replace(" after validation", "")
    else:
        rule = _RULES.get(kind, "is not valid")
    subject = f"'{param}'" if param else "The body"
    return InvalidRequest(f"{subject} {rule}.", param=param or None)


def _path(location: Iterable[int | str]) -> str:
    """Return the parameter's path, such as `input[0].content`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("~"):  # a tag of a union, not a member
            path += f".{step}" if path else step
        if path == "metadata":  # later steps are keys that the client has chosen, and messages must not echo them
            break
    return path
