"""Items as people read them: each a heading and short texts. What an item does not say is left out, and nothing fails.

Nothing here makes HTML or a link: all that is shown is text, and a template escapes it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from django.template.defaultfilters import filesizeformat
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from pydantic_core import from_json

__all__ = ["Entry", "Form", "Room", "Shown", "called", "code", "counted", "entry", "label", "visible"]

Form = Literal["text", "code", "label"]
"""Running text, text of fixed width, or one line about what is not shown itself."""

_LONGEST: Final = 10_000
"""Characters of one text that are shown."""

_ROOM: Final = 1_000_000
"""Characters of all texts of a page."""

_LONGEST_LABEL: Final = 200

_MOST_PARTS: Final = 100


@dataclass(frozen=True, slots=True)
class Shown:
    """A text, as far as it is shown.

    Attributes:
        text: What is shown of it.
        form: How.
        label: What it is, where its entry does not say so.
        left_out: How much is not shown, in words.
    """

    text: str
    form: Form = "text"
    label: str = ""
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """An item.

    Attributes:
        title: What it is, and by whom.
        kind: Names its looks.
        notes: Short facts: ids, a status.
        parts: What it says.
        collapsed: Whether it is opened by those who want to see it.
    """

    title: str
    kind: str
    notes: list[str] = field(default_factory=list)
    parts: list[Shown] = field(default_factory=list)
    collapsed: bool = False


class Room:
    """What a page still has room for. Attribute `names` tells functions by the `call_id` of their calls."""

    def __init__(self) -> None:
        self.left = _ROOM
        self.names: dict[str, str] = {}

    def cut(self, text: str, form: Form = "text", name: str = "", *, longest: int = _LONGEST, size: int = 0) -> Shown:
        """A text, as far as there is room; `size` is that of the whole, where it is the beginning of a longer one."""
        shown = text[: min(longest, self.left)]
        self.left -= len(shown)
        return Shown(visible(shown), form, name, _left_out(max(size, len(text)) - len(shown)))

    def text(self, value: Any, name: str = "") -> Shown:
        """A value that should be text."""
        return self.cut(value, name=name) if isinstance(value, str) else self.cut(code(value), "code", name)

    def json(self, value: Any, name: str = "") -> Shown:
        """JSON, or text that should be JSON, laid out for reading."""
        if isinstance(value, str) and len(value) <= _LONGEST:
            with contextlib.suppress(ValueError):
                value = from_json(value)
        return self.cut(value if isinstance(value, str) else code(value), "code", name)


def _left_out(count: int) -> str:
    if count <= 0:
        return ""
    return ngettext("%(count)s more character is not shown.", "%(count)s more characters are not shown.", count) % {
        "count": counted(count)
    }


_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Characters that show nothing, and turn around, hide or smuggle in what stands beside them."""


def visible(text: str) -> str:
    """The text with its invisible characters named, but for those that plain writing needs."""
    return _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def label(value: Any, longest: int = _LONGEST_LABEL) -> str:
    """A value in one short line."""
    text = value if isinstance(value, str) else "" if value is None else code(value)
    text = " ".join(text[: 4 * longest].split())
    return visible(text if len(text) <= longest else f"{text[: longest - 1]}…")


def code(value: Any) -> str:
    """A JSON value, laid out for reading."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def counted(number: int) -> str:
    """A number, with its digits in groups."""
    return str(number_format(number, force_grouping=True))


def called(items: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """The `call_id` and the function's name of each call among items."""
    for item in items:
        if isinstance(item, dict) and item.get("type") == "function_call":
            call_id, name = item.get("call_id"), item.get("name")
            if isinstance(call_id, str) and isinstance(name, str):
                yield call_id, name


def entry(item: Any, room: Room) -> Entry:
    """An item of any type."""
    if not isinstance(item, dict):
        return Entry(_("What is no item"), "other", parts=[room.text(item)])
    kind = item.get("type", "message" if "role" in item else None)
    make = _ENTRIES.get(kind) if isinstance(kind, str) else None
    if make is None:
        make = _receipt if isinstance(item.get("name"), str) and isinstance(item.get("arguments"), str) else _other
    return make(item, room)


def _message(item: Mapping[str, Any], room: Room) -> Entry:
    role = item.get("role")
    known = isinstance(role, str) and role in _ROLES
    title = str(_ROLES[role]) if isinstance(role, str) and known else label(role)
    return Entry(title, str(role) if known else "other", _notes(item, "phase"), _parts(item.get("content"), room))


_ROLES: Final = {
    "user": gettext_lazy("User"),
    "assistant": gettext_lazy("Assistant"),
    "system": gettext_lazy("System"),
    "developer": gettext_lazy("Developer"),
}


def _reasoning(item: Mapping[str, Any], room: Room) -> Entry:
    parts = [part for name in ("summary", "content") for part in _parts(item.get(name), room)]
    if item.get("encrypted_content"):
        parts.append(_sealed(item["encrypted_content"]))
    return Entry(_("Reasoning"), "reasoning", _notes(item), parts, collapsed=True)


def _call(item: Mapping[str, Any], room: Room) -> Entry:
    title = _("Call of %(function)s") % {"function": label(item.get("name"))}
    return Entry(title, "tool", _notes(item, "call_id"), [room.json(item.get("arguments"))])


def _output(item: Mapping[str, Any], room: Room) -> Entry:
    call_id = item.get("call_id")
    name = item.get("name") or (room.names.get(call_id) if isinstance(call_id, str) else None)
    title = _("Output of %(function)s") % {"function": label(name)} if name else _("Output of a function")
    output = item.get("output")
    parts = [room.json(output)] if isinstance(output, str) else _parts(output, room)
    return Entry(title, "tool", _notes(item, "call_id"), parts)


def _receipt(item: Mapping[str, Any], room: Room) -> Entry:
    parts = [room.json(item["arguments"], _("Arguments"))]
    if item.get("output") is not None:
        parts.append(room.json(item["output"], _("Output")))
    title = _("Hosted tool %(tool)s") % {"tool": label(item["name"])}
    return Entry(title, "tool", _notes(item, "type", "call_id"), parts)


def _compaction(item: Mapping[str, Any], room: Room) -> Entry:
    title = _("Compaction: an earlier part of the conversation, made short")
    return Entry(title, "other", _notes(item), [_sealed(item.get("encrypted_content"))])


def _reference(item: Mapping[str, Any], room: Room) -> Entry:
    return Entry(_("Reference to an item"), "other", parts=[Shown(label(item.get("id")), "label")])


def _other(item: Mapping[str, Any], room: Room) -> Entry:
    told = {name: value for name, value in item.items() if name not in ("type", "id", "status")}
    return Entry(label(item.get("type")) or _("What is no item"), "other", _notes(item), [room.json(told)])


_ENTRIES: Final[Mapping[str, Callable[[Mapping[str, Any], Room], Entry]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
    "compaction": _compaction,
    "item_reference": _reference,
}


def _notes(item: Mapping[str, Any], *names: str) -> list[str]:
    notes = [label(item.get(name)) for name in names]
    if item.get("status") != "completed":
        notes.append(label(item.get("status")))
    return [note for note in notes if note]


def _sealed(value: Any) -> Shown:
    size = len(value) if isinstance(value, str) else 0
    return Shown(_("Sealed, %(count)s characters") % {"count": counted(size)}, "label")


# Content.


def _parts(content: Any, room: Room) -> list[Shown]:
    if content is None:
        return []
    if not isinstance(content, list):
        return [room.text(content)]
    parts = [shown for part in content[:_MOST_PARTS] for shown in _part(part, room)]
    if len(content) > _MOST_PARTS:
        more = counted(len(content) - _MOST_PARTS)
        parts.append(Shown(_("%(count)s more parts are not shown") % {"count": more}, "label"))
    return parts


def _part(part: Any, room: Room) -> Iterator[Shown]:
    if not isinstance(part, dict):
        yield room.text(part)
        return
    kind = part.get("type")
    if kind == "refusal":
        yield room.text(part.get("refusal"), _("Refusal"))
    elif kind == "input_image":
        yield _elsewhere(_("Picture"), part.get("image_url"))
    elif kind == "input_video":
        yield _elsewhere(_("Video"), part.get("video_url"))
    elif kind == "input_file":
        name = label(part.get("filename"))
        what = _("File %(name)s") % {"name": name} if name else _("File")
        yield _elsewhere(what, part.get("file_url") or part.get("file_data"))
    elif "text" in part:
        yield room.text(part["text"], _("Summary") if kind == "summary_text" else "")
        cited = part.get("annotations")
        for note in cited[:_MOST_PARTS] if isinstance(cited, list) else []:
            if isinstance(note, dict):
                source = " ".join(filter(None, (label(note.get("title")), label(note.get("url")))))
                yield Shown(_("Source: %(source)s") % {"source": source}, "label")
    else:
        yield room.json(part)


def _elsewhere(what: str, source: Any) -> Shown:
    """What is no text, in words: nothing is fetched, and no address becomes a link."""
    if not isinstance(source, str) or not source:
        return Shown(what, "label")
    if re.match(r"[a-z][a-z0-9+.-]*:", source[:40], re.IGNORECASE) and not source.startswith("data:"):
        return Shown(f"{what}: {label(source)}", "label")
    head, comma, _data = source[:_LONGEST_LABEL].partition(",")
    kind = label(head.removeprefix("data:").partition(";")[0]) if comma else ""
    size = filesizeformat((len(source) - len(head) * len(comma)) * 3 // 4)
    return Shown(", ".join(filter(None, (what, kind, size))), "label")
