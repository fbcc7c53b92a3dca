"""The rendering of items as headings and short texts, which templates escape. Malformed items are rendered, too.

Nothing here creates HTML or links.
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

__all__ = [
    "PageBudget",
    "RenderedItem",
    "Style",
    "TextBlock",
    "escape_invisible",
    "format_count",
    "format_json",
    "iter_function_names",
    "render_item",
    "shorten",
]

Style = Literal["text", "code", "label"]
"""Running text, preformatted text, or one line that describes content which is not shown."""

_MAX_TEXT_LENGTH: Final = 10_000
"""Characters that are shown of one text."""

_MAX_PAGE_LENGTH: Final = 1_000_000
"""Characters that are shown of all texts of a page."""

_MAX_LABEL_LENGTH: Final = 200
"""Characters of a label, such as an id or a name."""

_MAX_PARTS: Final = 100
"""Content parts, or annotations of a part, that are shown."""


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A text, possibly truncated.

    Attributes:
        content: The characters that are shown.
        style: How they are shown.
        label: A heading, if the item's title does not describe the text.
        omitted: A sentence about the characters that are not shown, or "".
    """

    content: str
    style: Style = "text"
    label: str = ""
    omitted: str = ""


@dataclass(frozen=True, slots=True)
class RenderedItem:
    """An item, ready for the template.

    Attributes:
        title: The item's role or type.
        kind: The suffix of its CSS class.
        notes: Short facts, such as ids and a status.
        parts: The content.
        collapsed: Whether the content is hidden until it is opened.
    """

    title: str
    kind: str
    notes: list[str] = field(default_factory=list)
    parts: list[TextBlock] = field(default_factory=list)
    collapsed: bool = False


class PageBudget:
    """The number of characters that a page may still show.

    Attributes:
        remaining: Characters.
        function_names: Names of functions by the `call_id` of their calls.
    """

    def __init__(self) -> None:
        self.remaining = _MAX_PAGE_LENGTH
        self.function_names: dict[str, str] = {}

    def truncate(
        self, text: str, style: Style = "text", label: str = "", *, max_length: int = _MAX_TEXT_LENGTH, size: int = 0
    ) -> TextBlock:
        """Return a text, truncated to its maximum and to the rest of the page.

        Args:
            text: The text, or its beginning.
            style: How it is shown.
            label: Its heading.
            max_length: Characters.
            size: Characters of the whole text, if `text` is its beginning.
        """
        shown = text[: min(max_length, self.remaining)]
        self.remaining -= len(shown)
        return TextBlock(escape_invisible(shown), style, label, _describe_omission(max(size, len(text)) - len(shown)))

    def render_text(self, value: Any, label: str = "") -> TextBlock:
        """Return a value that should be text, or JSON if it is not."""
        if isinstance(value, str):
            return self.truncate(value, label=label)
        return self.truncate(format_json(value), "code", label)

    def render_json(self, value: Any, label: str = "") -> TextBlock:
        """Return a JSON value, or a text that should be JSON, with indentation."""
        if isinstance(value, str) and len(value) <= _MAX_TEXT_LENGTH:
            with contextlib.suppress(ValueError):
                value = from_json(value)
        return self.truncate(value if isinstance(value, str) else format_json(value), "code", label)


def _describe_omission(count: int) -> str:
    if count <= 0:
        return ""
    return ngettext("%(count)s more character is not shown.", "%(count)s more characters are not shown.", count) % {
        "count": format_count(count)
    }


_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Control and formatting characters, which can hide or reorder the text around them."""


def escape_invisible(text: str) -> str:
    """Return the text with code points in place of control characters, except for tabs and line ends."""
    return _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def shorten(value: Any, max_length: int = _MAX_LABEL_LENGTH) -> str:
    """Return a value as one line of limited length."""
    text = value if isinstance(value, str) else "" if value is None else format_json(value)
    text = " ".join(text[: 4 * max_length].split())
    return escape_invisible(text if len(text) <= max_length else f"{text[: max_length - 1]}…")


def format_json(value: Any) -> str:
    """Return a JSON value with indentation."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def format_count(number: int) -> str:
    """Return a number with thousands separators."""
    return str(number_format(number, force_grouping=True))


def iter_function_names(items: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield the `call_id` and the function's name of each function call among items."""
    for item in items:
        if isinstance(item, dict) and item.get("type") == "function_call":
            call_id, name = item.get("call_id"), item.get("name")
            if isinstance(call_id, str) and isinstance(name, str):
                yield call_id, name


def render_item(item: Any, budget: PageBudget) -> RenderedItem:
    """Render an item of any type."""
    if not isinstance(item, dict):
        return RenderedItem(_("Malformed item"), "other", parts=[budget.render_text(item)])
    kind = item.get("type", "message" if "role" in item else None)
    render = _RENDERERS.get(kind) if isinstance(kind, str) else None
    if render is None:
        is_hosted_call = isinstance(item.get("name"), str) and isinstance(item.get("arguments"), str)
        render = _render_hosted_call if is_hosted_call else _render_other
    return render(item, budget)


def _render_message(item: Mapping[str, Any], budget: PageBudget) -> RenderedItem:
    role = item.get("role")
    is_known = isinstance(role, str) and role in _ROLES
    title = str(_ROLES[role]) if isinstance(role, str) and is_known else shorten(role)
    kind = str(role) if is_known else "other"
    return RenderedItem(title, kind, _notes(item, "phase"), _render_parts(item.get("content"), budget))


_ROLES: Final = {
    "user": gettext_lazy("User"),
    "assistant": gettext_lazy("Assistant"),
    "system": gettext_lazy("System"),
    "developer": gettext_lazy("Developer"),
}


def _render_reasoning(item: Mapping[str, Any], budget: PageBudget) -> RenderedItem:
    parts = [part for name in ("summary", "content") for part in _render_parts(item.get(name), budget)]
    if item.get("encrypted_content"):
        parts.append(_render_encrypted(item["encrypted_content"]))
    return RenderedItem(_("Reasoning"), "reasoning", _notes(item), parts, collapsed=True)


def _render_call(item: Mapping[str, Any], budget: PageBudget) -> RenderedItem:
    title = _("Call of %(function)s") % {"function": shorten(item.get("name"))}
    return RenderedItem(title, "tool", _notes(item, "call_id"), [budget.render_json(item.get("arguments"))])


def _render_output(item: Mapping[str, Any], budget: PageBudget) -> RenderedItem:
    call_id = item.get("call_id")
    name = item.get("name") or (budget.function_names.get(call_id) if isinstance(call_id, str) else None)
    title = _("Output of %(function)s") % {"function": shorten(name)} if name else _("Output of a function")
    output = item.get("output")
    parts = [budget.render_json(output)] if isinstance(output, str) else _render_parts(output, budget)
    return RenderedItem(title, "tool", _notes(item, "call_id"), parts)


def _render_hosted_call(item: Mapping[str, Any], budget: PageBudget) -> RenderedItem:
    parts = [budget.render_json(item["arguments"], _("Arguments"))]
    if item.get("output") is not None:
        parts.append(budget.render_json(item["output"], _("Output")))
    title = _("Hosted tool %(tool)s") % {"tool": shorten(item["name"])}
    return RenderedItem(title, "tool", _notes(item, "type", "call_id"), parts)


def _render_compaction(item: Mapping[str, Any], budget: PageBudget) -> RenderedItem:
    title = _("Compaction of an earlier part of the conversation")
    return RenderedItem(title, "other", _notes(item), [_render_encrypted(item.get("encrypted_content"))])


def _render_reference(item: Mapping[str, Any], budget: PageBudget) -> RenderedItem:
    return RenderedItem(_("Reference to an item"), "other", parts=[TextBlock(shorten(item.get("id")), "label")])


def _render_other(item: Mapping[str, Any], budget: PageBudget) -> RenderedItem:
    members = {name: value for name, value in item.items() if name not in ("type", "id", "status")}
    title = shorten(item.get("type")) or _("Malformed item")
    return RenderedItem(title, "other", _notes(item), [budget.render_json(members)])


_RENDERERS: Final[Mapping[str, Callable[[Mapping[str, Any], PageBudget], RenderedItem]]] = {
    "message": _render_message,
    "reasoning": _render_reasoning,
    "function_call": _render_call,
    "function_call_output": _render_output,
    "compaction": _render_compaction,
    "item_reference": _render_reference,
}


def _notes(item: Mapping[str, Any], *names: str) -> list[str]:
    notes = [shorten(item.get(name)) for name in names]
    if item.get("status") != "completed":
        notes.append(shorten(item.get("status")))
    return [note for note in notes if note]


def _render_encrypted(value: Any) -> TextBlock:
    size = len(value) if isinstance(value, str) else 0
    return TextBlock(_("Encrypted, %(count)s characters") % {"count": format_count(size)}, "label")


# Content.


def _render_parts(content: Any, budget: PageBudget) -> list[TextBlock]:
    if content is None:
        return []
    if not isinstance(content, list):
        return [budget.render_text(content)]
    parts = [block for part in content[:_MAX_PARTS] for block in _render_part(part, budget)]
    if len(content) > _MAX_PARTS:
        more = format_count(len(content) - _MAX_PARTS)
        parts.append(TextBlock(_("%(count)s more parts are not shown") % {"count": more}, "label"))
    return parts


def _render_part(part: Any, budget: PageBudget) -> Iterator[TextBlock]:
    if not isinstance(part, dict):
        yield budget.render_text(part)
        return
    kind = part.get("type")
    if kind == "refusal":
        yield budget.render_text(part.get("refusal"), _("Refusal"))
    elif kind == "input_image":
        yield _render_media(_("Image"), part.get("image_url"))
    elif kind == "input_video":
        yield _render_media(_("Video"), part.get("video_url"))
    elif kind == "input_file":
        name = shorten(part.get("filename"))
        label = _("File %(name)s") % {"name": name} if name else _("File")
        yield _render_media(label, part.get("file_url") or part.get("file_data"))
    elif "text" in part:
        yield budget.render_text(part["text"], _("Summary") if kind == "summary_text" else "")
        annotations = part.get("annotations")
        for annotation in annotations[:_MAX_PARTS] if isinstance(annotations, list) else []:
            if isinstance(annotation, dict):
                source = " ".join(filter(None, (shorten(annotation.get("title")), shorten(annotation.get("url")))))
                yield TextBlock(_("Source: %(source)s") % {"source": source}, "label")
    else:
        yield budget.render_json(part)


def _render_media(label: str, source: Any) -> TextBlock:
    """Describe a file without fetching it: its URL, or the type and size of its data."""
    if not isinstance(source, str) or not source:
        return TextBlock(label, "label")
    if re.match(r"[a-z][a-z0-9+.-]*:", source[:40], re.IGNORECASE) and not source.startswith("data:"):
        return TextBlock(f"{label}: {shorten(source)}", "label")
    head, comma, _data = source[:_MAX_LABEL_LENGTH].partition(",")
    kind = shorten(head.removeprefix("data:").partition(";")[0]) if comma else ""
    size = filesizeformat((len(source) - len(head) * len(comma)) * 3 // 4)
    return TextBlock(", ".join(filter(None, (label, kind, size))), "label")
