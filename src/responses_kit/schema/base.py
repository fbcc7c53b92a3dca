"""What all wire models share: lenient on unknown keys, strict on types."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_TEXT = 10_485_760
"""Characters that any text of the request may have (specification, `maxLength`)."""


class WireModel(BaseModel):
    """A JSON object of the API.

    Unknown keys are ignored, since clients send more than the specification names; unknown enum values and
    wrong types are refused. Values are never coerced: "1" is no number and 1 is no boolean.
    """

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


def replace_surrogates(text: str) -> str:
    """The text without lone surrogates, which no UTF-8 can carry; pairs become the character they mean."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _absent(value: Any) -> bool:
    return value is None


T = TypeVar("T")

Optional = Annotated[T | None, Field(exclude_if=_absent)]
"""A member that is left out, rather than null, where it has no value."""

Text = Annotated[str, Field(max_length=MAX_TEXT)]

Lenient = BeforeValidator(lambda value: [] if value is None else value)
"""A list for which null says the same as empty."""

MAX_ITEMS = 10_000
"""Items that one request may send, and parts that one item may have. No model's window holds more, and each costs."""

MAX_TOOLS = 1024
"""Tools that one request may define."""


def bounded(length: int) -> Any:
    """A list of at most so many elements, given up at the first bad one: hostile lists have millions."""
    return Field(max_length=length, fail_fast=True)
