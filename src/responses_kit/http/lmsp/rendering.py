"""What LMSP clients are told (LMSP 1.0, 6.2 and 6.3): the machine's objects and events, in this dialect's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import error_from_code
from ...protocol.sse import decode_events, encode_json, quote
from ...protocol.state_machine import Event
from .inferred import problem

__all__ = ["Rendering", "response_in_lmsp"]


def response_in_lmsp(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response object (LMSP 1.0, 6.2).

    Args:
        response: The response object as the kit has it.
    """
    return {
        "id": response["id"],
        "object": "response",
        "created_at": response["created_at"],
        "status": "in_progress" if response["status"] == "queued" else response["status"],
        "model": response["model"],
        "output": [item for told in response["output"] if (item := _item(told)) is not None],
        "usage": _usage(response),
        "error": _error(response),
        "incomplete_details": _incomplete_details(response),
    }


def _item(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """An item; None for what LMSP has no shape for, such as a hosted tool's receipt."""
    match item["type"]:
        case "message":
            return {
                "id": item["id"],
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": part[_TEXTS[part["type"]]]} for part in item["content"]],
            }
        case "function_call":
            return {name: item[name] for name in ("id", "type", "call_id", "name", "arguments")}
        case "reasoning":
            return {name: item[name] for name in ("id", "type", "summary")}
    return None


_TEXTS = {"output_text": "text", "refusal": "refusal"}
"""Where the text of a message's part is. A refusal is text like any other here: LMSP has no other part."""


def _usage(response: Mapping[str, Any]) -> dict[str, int] | None:
    usage = response["usage"]
    return usage and {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}


def _error(response: Mapping[str, Any]) -> dict[str, Any] | None:
    return problem(error_from_code(**response["error"])) if response["status"] == "failed" else None


def _incomplete_details(response: Mapping[str, Any]) -> dict[str, Any] | None:
    return response["incomplete_details"] if response["status"] == "incomplete" else None


class Rendering:
    """One response's events, from the machine's to server-sent events of LMSP (6.3 and 6.4).

    They are numbered from 1 on. It has to be given all of the machine's events, from the first one on.

    Args:
        after: Those up to this number are known already, and not told.
    """

    def __init__(self, after: int = 0) -> None:
        self._after = after
        self._number = 0
        self._response_id = ""
        self._places: dict[int, int] = {}

    def render(self, events: Iterable[Event]) -> bytes:
        """The bytes of what these events are in LMSP; there may be none."""
        pieces = []
        for event in events:
            for name, data in self._told(event):
                self._number += 1
                if self._number > self._after:
                    pieces.append(b"id: %d\nevent: %b\ndata: %b\n\n" % (self._number, name.encode(), data))
        return b"".join(pieces)

    def unknown(self, piece: bytes) -> Iterator[Event]:
        """The events in a piece of a log, without the deltas that are known already: those are but counted."""
        for event in piece.split(b"\n\n")[:-1]:
            if self._number < self._after and event.startswith(_HEADS_OF_DELTAS):
                self._number += 1
            else:
                yield from decode_events(event + b"\n\n")

    def _told(self, event: Event) -> Iterator[tuple[str, bytes]]:
        kind = event["type"]
        match kind:
            case "response.output_text.delta" | "response.refusal.delta":
                head = f'{{"response_id":"{self._response_id}","item_id":"{event["item_id"]}","delta":'
                yield "response.output_text.delta", f"{head}{quote(event['delta'])}}}".encode("ascii")
            case "response.created":
                self._response_id = event["response"]["id"]
                yield kind, self._data(status="in_progress")
            case "response.output_item.added" | "response.output_item.done":
                item = _item(event["item"])
                if item is not None:
                    place = self._places.setdefault(event["output_index"], len(self._places))
                    yield kind, self._data(output_index=place, item=item)
            case "response.completed" | "response.incomplete" | "response.failed":
                yield self._ending(event["response"])

    def _ending(self, response: Mapping[str, Any]) -> tuple[str, bytes]:
        status = response["status"]
        members: dict[str, Any] = {"status": status}
        match status:
            case "incomplete":
                members["incomplete_details"] = _incomplete_details(response)
            case "failed":
                members["error"] = _error(response)
        if status in ("completed", "incomplete"):
            members["usage"] = _usage(response)
        return f"response.{status}", self._data(**members)

    def _data(self, **members: Any) -> bytes:
        return encode_json({"response_id": self._response_id, **members})


_HEADS_OF_DELTAS = (b"event: response.output_text.delta\n", b"event: response.refusal.delta\n")
