"""Stored JSON as people read it: turns of a conversation in short texts, which a template has only to escape."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from django.utils.translation import gettext as _
from pydantic_core import from_json

from ..models import Response
from .items import Entry, Room, Shown, called, code, counted, entry, label

__all__ = ["Excerpt", "Turn", "preview", "raw", "turns"]

_MOST_ITEMS: Final = 100
"""Items of an input, or of an output, that a page shows."""

_MOST_NAMES: Final = 50

_LONGEST_PREVIEW: Final = 120

_LONGEST_RAW: Final = 100_000

_LONGEST_MEMBER: Final = 2_000
"""Characters of a string within JSON that is shown as it is, so that no picture hides what comes after it."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What was read of a response.

    Attributes:
        row: The response; its columns of JSON need not be loaded.
        input: The input's JSON, or the beginning of it.
        input_size: Characters of the whole, or bytes where it was cut.
        response: The response's JSON, or the beginning of it.
        response_size: The same of the response.
    """

    row: Response
    input: str
    input_size: int
    response: str
    response_size: int


@dataclass(slots=True)
class Turn:
    """One response, ready to be shown.

    Attributes:
        row: The response.
        problems: What went wrong with it, or with reading it.
        usage: Its tokens.
        instructions: What the model was told by this request alone.
        tools: Names of its tools.
        metadata: The client's key-value pairs.
        input: What was asked.
        output: What was answered.
    """

    row: Response
    problems: list[str] = field(default_factory=list)
    usage: str = ""
    instructions: Shown | None = None
    tools: list[str] = field(default_factory=list)
    metadata: list[tuple[str, str]] = field(default_factory=list)
    input: list[Entry] = field(default_factory=list)
    output: list[Entry] = field(default_factory=list)


def turns(excerpts: Sequence[Excerpt]) -> list[Turn]:
    """The responses of a conversation, in their order. Where a page has no room for all, the newest have it."""
    room = Room()
    read = [_Read(excerpt) for excerpt in excerpts]
    for one in read:
        room.names.update(called(one.input))
        room.names.update(called(one.output))
    return [_turn(one, room) for one in reversed(read)][::-1]


class _Read:
    """An excerpt's JSON as values, with what there is to say of reading it."""

    def __init__(self, excerpt: Excerpt) -> None:
        self.excerpt = excerpt
        self.problems: list[str] = []
        self.broken: list[tuple[str, str]] = []
        given = self._value(_("The input"), excerpt.input, excerpt.input_size, [])
        self.input = given if isinstance(given, list) else [given]
        response = self._value(_("The response"), excerpt.response, excerpt.response_size, {})
        self.response: Mapping[str, Any] = response if isinstance(response, dict) else {}
        output = self.response.get("output")
        self.output = output if isinstance(output, list) else []

    def _value(self, what: str, text: str, size: int, nothing: Any) -> Any:
        cut = len(text) < size
        try:
            value = from_json(text, allow_partial="trailing-strings" if cut else False)
        except ValueError:
            self.problems.append(_("%(what)s cannot be read as JSON; it is shown as it is stored.") % {"what": what})
            self.broken.append((what, text))
            return nothing
        if type(value) is not type(nothing):
            self.problems.append(_("%(what)s is not what this version stores.") % {"what": what})
            self.broken.append((what, text))
            return nothing
        if cut:
            self.problems.append(
                _("%(what)s is long: only the first %(read)s of its %(size)s bytes were read.")
                % {"what": what, "read": counted(len(text.encode("utf-8", "surrogatepass"))), "size": counted(size)}
            )
        return value


def _turn(read: _Read, room: Room) -> Turn:
    response = read.response
    turn = Turn(read.excerpt.row)
    turn.problems += _failures(response)
    turn.problems += read.problems
    turn.usage = _usage(read.excerpt.row, response.get("usage"))
    if response.get("instructions"):
        turn.instructions = room.text(response["instructions"])
    turn.tools = [_tool_name(tool) for tool in _some(response.get("tools"))]
    metadata = response.get("metadata")
    if isinstance(metadata, dict):
        turn.metadata = [(label(key), label(value, 600)) for key, value in list(metadata.items())[:_MOST_NAMES]]
    turn.input = _entries(read.input, room)
    turn.output = _entries(read.output, room)
    for what, text in read.broken:
        turn.output.append(Entry(what, "other", parts=[room.cut(text, "code", longest=_LONGEST_MEMBER)]))
    return turn


def _failures(response: Mapping[str, Any]) -> list[str]:
    problems = []
    error, details = response.get("error"), response.get("incomplete_details")
    if error:
        said = [label(error.get(name), 1_000) for name in ("code", "message")] if isinstance(error, dict) else []
        problems.append(_("Error: %(error)s") % {"error": ": ".join(filter(None, said)) or label(error)})
    if details:
        reason = details.get("reason") if isinstance(details, dict) else details
        problems.append(_("Incomplete: %(reason)s") % {"reason": label(reason)})
    return problems


def _usage(row: Response, usage: Any) -> str:
    if row.input_tokens is None or row.output_tokens is None:
        return ""
    text = _("%(input)s input tokens, %(output)s output tokens") % {
        "input": counted(row.input_tokens),
        "output": counted(row.output_tokens),
    }
    more = []
    for details, name, words in (
        ("input_tokens_details", "cached_tokens", _("%(count)s cached")),
        ("output_tokens_details", "reasoning_tokens", _("%(count)s of reasoning")),
    ):
        found = usage.get(details) if isinstance(usage, dict) else None
        count = found.get(name) if isinstance(found, dict) else None
        if isinstance(count, int) and count:
            more.append(words % {"count": counted(count)})
    return f"{text} ({', '.join(more)})" if more else text


def _tool_name(tool: Any) -> str:
    return label(tool.get("name") or tool.get("type")) if isinstance(tool, dict) else label(tool)


def _some(value: Any) -> list[Any]:
    return value[:_MOST_NAMES] if isinstance(value, list) else []


def _entries(items: Sequence[Any], room: Room) -> list[Entry]:
    left = len(items) - _MOST_ITEMS
    shown = [entry(item, room) for item in items[-_MOST_ITEMS:]]
    if left <= 0:
        return shown
    return [Entry(_("%(count)s earlier items are not shown") % {"count": counted(left)}, "other"), *shown]


# The list's one line.

_DECODER: Final = json.JSONDecoder()

_MESSAGE: Final = '{"type":"message"'
"""How a message begins in what the kit stores; within a string its quotes would be escaped."""


def preview(head: str, tail: str, size: int) -> str:
    """What the user said last, in one line.

    Args:
        head: The beginning of the input's JSON.
        tail: The end of it.
        size: Characters of the whole.
    """
    texts = _said_by_user(head, size)
    if len(head) < size:
        texts = [*texts, *_said_by_user_in_tail(tail)]
    return label(texts[-1], _LONGEST_PREVIEW) if texts else ""


def _said_by_user(head: str, size: int) -> list[str]:
    try:
        items = from_json(head, allow_partial="trailing-strings" if len(head) < size else False)
    except ValueError:
        return []
    return list(filter(None, map(_user_text, items))) if isinstance(items, list) else []


def _said_by_user_in_tail(tail: str) -> list[str]:
    place = tail.rfind(_MESSAGE)
    while place >= 0:
        try:
            item, _end = _DECODER.raw_decode(tail, place)
        except (ValueError, RecursionError):
            item = None
        if text := _user_text(item):
            return [text]
        place = tail.rfind(_MESSAGE, 0, place)
    return []


def _user_text(item: Any) -> str:
    if not isinstance(item, dict) or item.get("role") != "user":
        return ""
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return " ".join(part for part in parts if isinstance(part, str))


# As it is stored.


def raw(text: str, size: int) -> Shown:
    """JSON as it is stored, laid out for reading; `size` is that of the whole."""
    with contextlib.suppress(ValueError):
        if len(text) == size:
            text = code(_shortened(from_json(text)))
            size = len(text)
    return Room().cut(text, "code", longest=_LONGEST_RAW, size=size)


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        left = len(value) - _LONGEST_MEMBER
        return value if left <= 0 else f"{value[:_LONGEST_MEMBER]}… (+{left})"
    if isinstance(value, dict):
        return {key: _shortened(member) for key, member in value.items()}
    return [_shortened(member) for member in value] if isinstance(value, list) else value
