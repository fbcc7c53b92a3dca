"""Items that a response is building: mutable until the state machine closes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ..schema.base import MAX_TEXT

__all__ = ["PART_NAMES", "CallBuilder", "ExtensionBuilder", "ItemBuilder", "PartBuilder", "PartNames"]


class PartNames:
    """The event types and members that a type of part uses on the wire."""

    __slots__ = (
        "delta_type",
        "index_member",
        "list_member",
        "part_added_type",
        "part_done_type",
        "text_done_type",
        "text_member",
    )

    def __init__(self, part: str, name: str, *, index: str = "content_index", text: str = "text") -> None:
        self.part_added_type, self.part_done_type = f"response.{part}.added", f"response.{part}.done"
        self.delta_type, self.text_done_type = f"response.{name}.delta", f"response.{name}.done"
        self.index_member, self.text_member = index, text
        self.list_member = "summary" if index == "summary_index" else "content"


PART_NAMES: Final[Mapping[str, PartNames]] = {
    "output_text": PartNames("content_part", "output_text"),
    "refusal": PartNames("content_part", "refusal", text="refusal"),
    "reasoning_text": PartNames("content_part", "reasoning"),
    "summary_text": PartNames("reasoning_summary_part", "reasoning_summary_text", index="summary_index"),
}
"""The names of each type of part."""


class PartBuilder:
    """A part that is still growing.

    Attributes:
        remaining: Characters that its text may still gain.
        is_silent: Whether the part emits no events of its own.
    """

    __slots__ = ("annotations", "index", "is_silent", "logprobs", "pieces", "remaining", "type")

    def __init__(self, kind: str, index: int, *, is_silent: bool) -> None:
        self.type, self.index, self.is_silent = kind, index, is_silent
        self.pieces: list[str] = []
        self.remaining = MAX_TEXT
        self.annotations: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []

    def build(self) -> dict[str, Any]:
        """Return the part as the wire has it."""
        part: dict[str, Any] = {"type": self.type, PART_NAMES[self.type].text_member: "".join(self.pieces)}
        if self.type == "output_text":
            part |= {"annotations": list(self.annotations), "logprobs": list(self.logprobs)}
        return part


class ItemBuilder:
    """A message or reasoning item that is still growing.

    Attributes:
        part: The open part, if any.
        parts: The closed parts, by the name of the list that holds them.
    """

    __slots__ = ("fields", "id", "index", "part", "parts", "type")

    def __init__(self, kind: str, item_id: str, index: int, fields: dict[str, Any]) -> None:
        self.type, self.id, self.index, self.fields = kind, item_id, index, fields
        self.part: PartBuilder | None = None
        self.parts: dict[str, list[dict[str, Any]]] = {"content": []}
        if kind == "reasoning":
            self.parts["summary"] = []

    def build(self, status: str) -> dict[str, Any]:
        """Return the item with this status as the wire has it."""
        lists = {name: list(parts) for name, parts in self.parts.items()}
        return {"type": self.type, "id": self.id, "status": status, **self.fields, **lists}


class CallBuilder:
    """A function call with arguments that are still growing."""

    __slots__ = ("call_id", "id", "index", "name", "pieces")

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self.id, self.index, self.call_id, self.name = item_id, index, call_id, name
        self.pieces: list[str] = []

    def build(self, status: str) -> dict[str, Any]:
        """Return the item with this status as the wire has it."""
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self.pieces),
            "status": status,
        }

    def has_valid_json(self) -> bool:
        """Return whether the arguments are valid JSON."""
        try:
            json.loads("".join(self.pieces))
        except (ValueError, RecursionError):
            return False
        return True


class ExtensionBuilder:
    """An extension item that has not been closed.

    Attributes:
        final_status: Its status once the backend has finished it. An item of a lower index may delay its closing.
    """

    __slots__ = ("fields", "final_status", "id", "index", "type")

    def __init__(self, item_id: str, index: int, kind: str, fields: dict[str, Any]) -> None:
        self.id, self.index, self.type, self.fields = item_id, index, kind, fields
        self.final_status: str | None = None

    def build(self, status: str) -> dict[str, Any]:
        """Return the item with this status as the wire has it."""
        return {"type": self.type, "id": self.id, "status": status, **self.fields}
