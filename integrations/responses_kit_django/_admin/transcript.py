"""The rendering of stored responses as turns of a conversation, which templates escape."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from django.utils.translation import gettext as _
from pydantic_core import from_json

from ..models import Response
from .items import (
    PageBudget,
    RenderedItem,
    TextBlock,
    format_count,
    format_json,
    iter_function_names,
    render_item,
    shorten,
)

__all__ = ["Excerpt", "Turn", "build_turns", "extract_preview", "format_stored"]

_MAX_ITEMS: Final = 100
"""Items of an input, or of an output, that are shown; the last ones of longer lists."""

_MAX_NAMES: Final = 50
"""Tools, or pairs of metadata, that are shown of a response."""

_MAX_PREVIEW_LENGTH: Final = 120
"""Characters of a preview in the list."""

_MAX_STORED_LENGTH: Final = 100_000
"""Characters that are shown of stored JSON."""

_MAX_MEMBER_LENGTH: Final = 2_000
"""Characters that are shown of each string in stored JSON, so that an image does not hide the members after it."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The stored JSON of a response, possibly only its beginning.

    Attributes:
        row: The response, without its long columns.
        input: The input's JSON, or the beginning of it.
        input_size: Characters of the whole input, or bytes if `input` is its beginning.
        response: The response's JSON, or the beginning of it.
        response_size: Characters of the whole response, or bytes if `response` is its beginning.
    """

    row: Response
    input: str
    input_size: int
    response: str
    response_size: int


@dataclass(slots=True)
class Turn:
    """One response, ready for the template.

    Attributes:
        row: The response.
        problems: Errors of the response, and problems with its stored JSON.
        usage: Its tokens, as a text.
        instructions: The instructions of the request.
        tools: Names of the request's tools.
        metadata: The client's key-value pairs.
        input: The input items.
        output: The output items.
    """

    row: Response
    problems: list[str] = field(default_factory=list)
    usage: str = ""
    instructions: TextBlock | None = None
    tools: list[str] = field(default_factory=list)
    metadata: list[tuple[str, str]] = field(default_factory=list)
    input: list[RenderedItem] = field(default_factory=list)
    output: list[RenderedItem] = field(default_factory=list)


def build_turns(excerpts: Sequence[Excerpt]) -> list[Turn]:
    """Return the turns of a conversation, oldest first. The newest turns use the page's budget first."""
    budget = PageBudget()
    parsed = [_ParsedExcerpt(excerpt) for excerpt in excerpts]
    for one in parsed:
        budget.function_names.update(iter_function_names(one.input))
        budget.function_names.update(iter_function_names(one.output))
    return [_build_turn(one, budget) for one in reversed(parsed)][::-1]


class _ParsedExcerpt:
    """The parsed JSON of an excerpt.

    Attributes:
        excerpt: The excerpt.
        input: The input items.
        response: The response object, empty if it cannot be read.
        output: The output items.
        problems: Sentences about JSON that was truncated or cannot be read.
        malformed: Labels and texts of JSON that cannot be read.
    """

    def __init__(self, excerpt: Excerpt) -> None:
        self.excerpt = excerpt
        self.problems: list[str] = []
        self.malformed: list[tuple[str, str]] = []
        items = self._parse(_("The input"), excerpt.input, excerpt.input_size, [])
        self.input = items if isinstance(items, list) else [items]
        response = self._parse(_("The response"), excerpt.response, excerpt.response_size, {})
        self.response: Mapping[str, Any] = response if isinstance(response, dict) else {}
        output = self.response.get("output")
        self.output = output if isinstance(output, list) else []

    def _parse(self, label: str, text: str, size: int, default: Any) -> Any:
        is_truncated = len(text) < size
        try:
            value = from_json(text, allow_partial="trailing-strings" if is_truncated else False)
        except ValueError:
            self.problems.append(_("%(label)s is not valid JSON. It is shown as it is stored.") % {"label": label})
            self.malformed.append((label, text))
            return default
        if type(value) is not type(default):
            self.problems.append(_("%(label)s has an unknown format. It is shown as it is stored.") % {"label": label})
            self.malformed.append((label, text))
            return default
        if is_truncated:
            self.problems.append(
                _("%(label)s is long: only the first %(read)s of its %(size)s bytes were read.")
                % {
                    "label": label,
                    "read": format_count(len(text.encode("utf-8", "surrogatepass"))),
                    "size": format_count(size),
                }
            )
        return value


def _build_turn(parsed: _ParsedExcerpt, budget: PageBudget) -> Turn:
    response = parsed.response
    turn = Turn(parsed.excerpt.row)
    turn.problems += _describe_failures(response)
    turn.problems += parsed.problems
    turn.usage = _describe_usage(parsed.excerpt.row, response.get("usage"))
    if response.get("instructions"):
        turn.instructions = budget.render_text(response["instructions"])
    turn.tools = [_tool_name(tool) for tool in _first_members(response.get("tools"))]
    metadata = response.get("metadata")
    if isinstance(metadata, dict):
        turn.metadata = [(shorten(key), shorten(value, 600)) for key, value in list(metadata.items())[:_MAX_NAMES]]
    turn.input = _render_items(parsed.input, budget)
    turn.output = _render_items(parsed.output, budget)
    for label, text in parsed.malformed:
        block = budget.truncate(text, "code", max_length=_MAX_MEMBER_LENGTH)
        turn.output.append(RenderedItem(label, "other", parts=[block]))
    return turn


def _describe_failures(response: Mapping[str, Any]) -> list[str]:
    problems = []
    error, details = response.get("error"), response.get("incomplete_details")
    if error:
        texts = [shorten(error.get(name), 1_000) for name in ("code", "message")] if isinstance(error, dict) else []
        problems.append(_("Error: %(error)s") % {"error": ": ".join(filter(None, texts)) or shorten(error)})
    if details:
        reason = details.get("reason") if isinstance(details, dict) else details
        problems.append(_("Incomplete: %(reason)s") % {"reason": shorten(reason)})
    return problems


def _describe_usage(row: Response, usage: Any) -> str:
    if row.input_tokens is None or row.output_tokens is None:
        return ""
    text = _("%(input)s input tokens, %(output)s output tokens") % {
        "input": format_count(row.input_tokens),
        "output": format_count(row.output_tokens),
    }
    more = []
    for details, name, words in (
        ("input_tokens_details", "cached_tokens", _("%(count)s cached")),
        ("output_tokens_details", "reasoning_tokens", _("%(count)s of reasoning")),
    ):
        counts = usage.get(details) if isinstance(usage, dict) else None
        count = counts.get(name) if isinstance(counts, dict) else None
        if isinstance(count, int) and count:
            more.append(words % {"count": format_count(count)})
    return f"{text} ({', '.join(more)})" if more else text


def _tool_name(tool: Any) -> str:
    return shorten(tool.get("name") or tool.get("type")) if isinstance(tool, dict) else shorten(tool)


def _first_members(value: Any) -> list[Any]:
    return value[:_MAX_NAMES] if isinstance(value, list) else []


def _render_items(items: Sequence[Any], budget: PageBudget) -> list[RenderedItem]:
    omitted = len(items) - _MAX_ITEMS
    rendered = [render_item(item, budget) for item in items[-_MAX_ITEMS:]]
    if omitted <= 0:
        return rendered
    title = _("%(count)s earlier items are not shown") % {"count": format_count(omitted)}
    return [RenderedItem(title, "other"), *rendered]


# Previews in the list.

_DECODER: Final = json.JSONDecoder()

_MESSAGE_PREFIX: Final = '{"type":"message"'
"""The beginning of each message in stored JSON. Within a string its quotes would be escaped."""


def extract_preview(head: str, tail: str, size: int) -> str:
    """Return the last user message of an input in one line, or "" if there is none.

    Args:
        head: The beginning of the input's JSON.
        tail: The end of the input's JSON.
        size: Characters of the whole input.
    """
    texts = _user_texts(head, size)
    if len(head) < size:
        texts = [*texts, *_user_texts_in_tail(tail)]
    return shorten(texts[-1], _MAX_PREVIEW_LENGTH) if texts else ""


def _user_texts(head: str, size: int) -> list[str]:
    try:
        items = from_json(head, allow_partial="trailing-strings" if len(head) < size else False)
    except ValueError:
        return []
    return list(filter(None, map(_user_text, items))) if isinstance(items, list) else []


def _user_texts_in_tail(tail: str) -> list[str]:
    place = tail.rfind(_MESSAGE_PREFIX)
    while place >= 0:
        try:
            item, _end = _DECODER.raw_decode(tail, place)
        except (ValueError, RecursionError):
            item = None
        if text := _user_text(item):
            return [text]
        place = tail.rfind(_MESSAGE_PREFIX, 0, place)
    return []


def _user_text(item: Any) -> str:
    if not isinstance(item, dict) or item.get("role") != "user":
        return ""
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return " ".join(part for part in parts if isinstance(part, str))


# Stored JSON.


def format_stored(text: str, size: int) -> TextBlock:
    """Return stored JSON with indentation and shortened strings, or as it is if only its beginning was read.

    Args:
        text: The JSON, or its beginning.
        size: Characters of the whole.
    """
    with contextlib.suppress(ValueError):
        if len(text) == size:
            text = format_json(_shorten_strings(from_json(text)))
            size = len(text)
    return PageBudget().truncate(text, "code", max_length=_MAX_STORED_LENGTH, size=size)


def _shorten_strings(value: Any) -> Any:
    if isinstance(value, str):
        omitted = len(value) - _MAX_MEMBER_LENGTH
        return value if omitted <= 0 else f"{value[:_MAX_MEMBER_LENGTH]}… (+{omitted})"
    if isinstance(value, dict):
        return {key: _shorten_strings(member) for key, member in value.items()}
    return [_shorten_strings(member) for member in value] if isinstance(value, list) else value
