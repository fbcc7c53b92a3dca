"""From JSON to a request, and from what is wrong with it to an error that names the field and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, from_json, to_json

from ..errors import InvalidRequest
from ..schema.request import CompactRequest, CreateRequest, Request

__all__ = ["as_json", "parse_compact_request", "parse_json", "parse_request", "validate"]

T = TypeVar("T", bound=Request)

_SAYINGS: Final = {
    "missing": "this field is required",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "union_tag_invalid": "has a type that is not known here",
    "union_tag_not_found": "must be an object with a known type",
    "string_pattern_mismatch": "has characters or a length that are not allowed",
    "string_unicode": "must be text without lone surrogates",
    "invalid_key": "must have strings as keys",
}
"""What is said instead of pydantic's message, which would name our classes or repeat the input."""

_SAFE: Final = frozenset(
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
"""Errors whose own message names only limits and choices."""


def parse_json(body: bytes) -> Any:
    """The JSON value in a request's body.

    Raises:
        InvalidRequest: It is no JSON, or holds what JSON cannot: NaN, lone surrogates, numbers or nesting
            beyond measure. The message says where.
    """
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def as_json(value: Any) -> Any:
    """A copy of Python values as JSON would carry them, so that nothing comes in which could not go out.

    Raises:
        InvalidRequest: Some of them are no JSON.
    """
    try:
        return parse_json(to_json(value))
    except (PydanticSerializationError, ValueError):
        raise InvalidRequest("The request must be made of JSON values.", code="invalid_json") from None


def parse_request(body: Any) -> CreateRequest:
    """The validated request.

    Args:
        body: JSON values, as `parse_json` or `as_json` return them.

    Raises:
        InvalidRequest: `param` is the path of the first field at fault.
    """
    request = validate(CreateRequest, body)
    if request.max_output_tokens is not None and request.max_output_tokens < _LEAST_OUTPUT:
        raise InvalidRequest(
            f"max_output_tokens: must be greater than or equal to {_LEAST_OUTPUT}.", param="max_output_tokens"
        )
    return request


def parse_compact_request(body: Any) -> CompactRequest:
    """The validated request for a compaction.

    Args:
        body: JSON values, as `parse_json` or `as_json` return them.

    Raises:
        InvalidRequest: `param` is the path of the first field at fault.
    """
    return validate(CompactRequest, body)


_LEAST_OUTPUT: Final = 16
"""The specification's `minimum`; a rule of the wire, and not of the kit."""


def validate(model: type[T], body: Any) -> T:
    """A request of any kind, validated.

    Args:
        model: The kind.
        body: JSON values, as `parse_json` or `as_json` return them.

    Raises:
        InvalidRequest: `param` is the path of the first field at fault.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)[0]) from None


def _invalid(error: ErrorDetails) -> InvalidRequest:
    param = _path(error["loc"])
    kind = error["type"]
    if kind.startswith("union_tag") and error["loc"][0] == "input" and len(error["loc"]) <= 3:
        saying = "must be an item: an object of a known type, or a message of a known role"
    elif error["loc"] == ("input", "~items") and kind == "list_type":
        saying = "must be a string or a list of items"
    elif param == "metadata" and kind == "string_type":
        saying = "must hold strings only"
    elif kind in _SAFE:
        saying = error["msg"].replace("Input should", "must").replace("String should", "must")
        saying = saying.replace("List should", "must").replace("Dictionary should", "must")
        saying = saying.replace(" after validation", "")
    else:
        saying = _SAYINGS.get(kind, "is not valid")
    return InvalidRequest(f"{param or 'The body'}: {saying}.", param=param or None)


def _path(location: Iterable[int | str]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("~"):  # a union's branch, no field
            path += f".{step}" if path else step
        if path == "metadata":  # what follows is the client's own words
            break
    return path
