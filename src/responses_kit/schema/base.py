"""The base of all wire models: lenient on unknown keys, strict on types."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_TEXT = 10_485_760
"""Maximum length of a text, in characters (specification, `maxLength`)."""


class WireModel(BaseModel):
    """A JSON object of the API.

    Unknown keys are ignored, since clients send more than the specification defines. Unknown enum values and wrong
    types are refused. Values are not coerced: "1" is not a number, and 1 is not a boolean.
    """

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


def replace_surrogates(text: str) -> str:
    """Return the text with surrogate pairs joined and lone surrogates, which UTF-8 cannot encode, replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_none(value: Any) -> bool:
    return value is None


T = TypeVar("T")

Optional = Annotated[T | None, Field(exclude_if=_is_none)]
"""A member that is omitted, rather than null, if it has no value."""

Text = Annotated[str, Field(max_length=MAX_TEXT)]
"""A text of bounded length."""

Lenient = BeforeValidator(lambda value: [] if value is None else value)
"""Accepts null as an empty list."""

MAX_ITEMS = 10_000
"""Maximum number of items in a request, and of parts in an item. Bounds the cost of validation."""

MAX_TOOLS = 1024
"""Maximum number of tools in a request."""


def bounded(length: int) -> Any:
    """Return a field for a list of at most `length` elements.

    Validation stops at the first error, because a hostile list may contain millions.
    """
    return Field(max_length=length, fail_fast=True)
