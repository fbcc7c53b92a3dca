"""Response objects and events in the format of LMSP 1.0 (6.2 and 6.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import error_from_code
from ...protocol.sse import decode_events, encode_json, quote
from ...protocol.state_machine import Event
from .assumptions import render_problem

__all__ = ["EventRenderer", "render_response"]

_TEXT_MEMBERS = {"output_text": "text", "refusal": "refusal"}
"""The member that holds the text of a message's part, by its type. LMSP represents refusals as text."""

_DELTA_PREFIXES = (b"event: response.output_text.delta\n", b"event: response.refusal.delta\n")
"""Prefixes of encoded events that LMSP renders as `response.output_text.delta`."""


def render_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response object of LMSP (6.2).

    Args:
        response: The kit's response object.
    """
    return {
        "id": response["id"],
        "object": "response",
        "created_at": response["created_at"],
        "status": "in_progress" if response["status"] == "queued" else response["status"],
        "model": response["model"],
        "output": [rendered for item in response["output"] if (rendered := _render_item(item)) is not None],
        "usage": _render_usage(response),
        "error": _render_error(response),
        "incomplete_details": _render_incomplete_details(response),
    }


def _render_item(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an item, or None if LMSP has no such item, as for a call of a hosted tool."""
    match item["type"]:
        case "message":
            return {
                "id": item["id"],
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": part[_TEXT_MEMBERS[part["type"]]]} for part in item["content"]
                ],
            }
        case "function_call":
            return {name: item[name] for name in ("id", "type", "call_id", "name", "arguments")}
        case "reasoning":
            return {name: item[name] for name in ("id", "type", "summary")}
    return None


def _render_usage(response: Mapping[str, Any]) -> dict[str, int] | None:
    usage = response["usage"]
    return usage and {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}


def _render_error(response: Mapping[str, Any]) -> dict[str, Any] | None:
    return render_problem(error_from_code(**response["error"])) if response["status"] == "failed" else None


def _render_incomplete_details(response: Mapping[str, Any]) -> dict[str, Any] | None:
    return response["incomplete_details"] if response["status"] == "incomplete" else None


class EventRenderer:
    """Renders one response's events as server-sent events of LMSP (6.3 and 6.4), with ids from 1.

    It needs all events of the state machine from the first one, because it counts them.

    Args:
        after: Id of the last event that the client has received; events up to it are not rendered.
    """

    def __init__(self, after: int = 0) -> None:
        self._after = after
        self._number = 0
        self._response_id = ""
        self._output_indexes: dict[int, int] = {}

    def render(self, events: Iterable[Event]) -> bytes:
        """Return the encoded events; empty if LMSP has no counterpart for them."""
        pieces = []
        for event in events:
            for name, data in self._render_event(event):
                self._number += 1
                if self._number > self._after:
                    pieces.append(b"id: %d\nevent: %b\ndata: %b\n\n" % (self._number, name.encode(), data))
        return b"".join(pieces)

    def decode_new_events(self, piece: bytes) -> Iterator[Event]:
        """Yield the events in a piece of the log; deltas that the client has received are only counted."""
        for event in piece.split(b"\n\n")[:-1]:
            if self._number < self._after and event.startswith(_DELTA_PREFIXES):
                self._number += 1
            else:
                yield from decode_events(event + b"\n\n")

    def _render_event(self, event: Event) -> Iterator[tuple[str, bytes]]:
        kind = event["type"]
        match kind:
            case "response.output_text.delta" | "response.refusal.delta":
                head = f'{{"response_id":"{self._response_id}","item_id":"{event["item_id"]}","delta":'
                yield "response.output_text.delta", f"{head}{quote(event['delta'])}}}".encode("ascii")
            case "response.created":
                self._response_id = event["response"]["id"]
                yield kind, self._encode_data(status="in_progress")
            case "response.output_item.added" | "response.output_item.done":
                item = _render_item(event["item"])
                if item is not None:
                    index = self._output_indexes.setdefault(event["output_index"], len(self._output_indexes))
                    yield kind, self._encode_data(output_index=index, item=item)
            case "response.completed" | "response.incomplete" | "response.failed":
                yield self._render_terminal_event(event["response"])

    def _render_terminal_event(self, response: Mapping[str, Any]) -> tuple[str, bytes]:
        status = response["status"]
        members: dict[str, Any] = {"status": status}
        match status:
            case "incomplete":
                members["incomplete_details"] = _render_incomplete_details(response)
            case "failed":
                members["error"] = _render_error(response)
        if status in ("completed", "incomplete"):
            members["usage"] = _render_usage(response)
        return f"response.{status}", self._encode_data(**members)

    def _encode_data(self, **members: Any) -> bytes:
        return encode_json({"response_id": self._response_id, **members})
