"""JSON and server-sent events as bytes (specification, "Streaming HTTP Responses").

All JSON is escaped to ASCII, so that no line separator, surrogate or byte-order mark can break a line. Each event is
one `event:` line, one `data:` line and a blank line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final

from pydantic_core import from_json, to_json

from .state_machine import Event

__all__ = ["DONE", "KEEP_ALIVE", "SSE_HEADERS", "decode_events", "encode_json", "encode_sse", "quote"]

SSE_HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
"""Headers of every stream; they keep caches and proxies from buffering it."""

DONE: Final = b"data: [DONE]\n\n"
"""Follows the terminal event."""

KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment that clients ignore, and that keeps proxies from closing an idle connection."""


def encode_json(value: Any) -> bytes:
    """Return a JSON value as ASCII bytes, with null for NaN and infinities."""
    return to_json(value, ensure_ascii=True, inf_nan_mode="null")


def encode_sse(event: Event) -> bytes:
    """Return an event as bytes of a `text/event-stream`."""
    encode_delta = _DELTA_ENCODERS.get(event["type"])
    if encode_delta is not None:
        return encode_delta(event)
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


def decode_events(data: bytes) -> list[Event]:
    """Return the events in a concatenation of `encode_sse` results."""
    return [from_json(event.partition(b"\ndata: ")[2]) for event in data.split(b"\n\n")[:-1]]


def _delta_encoder(kind: str, index: str | None, *, logprobs: bool = False) -> Callable[[Event], bytes]:
    """Return an encoder for one type of delta, written by hand because most events of a stream are deltas.

    Args:
        kind: The event's type.
        index: The member with the part's index, or None if the delta belongs to no part.
        logprobs: Whether the event has `logprobs`.
    """
    head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'

    def with_logprobs(event: Event) -> bytes:
        tail = "[]}\n\n" if not event["logprobs"] else encode_json(event["logprobs"]).decode() + "}\n\n"
        return (
            f'{head}{event["sequence_number"]},"item_id":"{event["item_id"]}","output_index":{event["output_index"]}'
            f',"content_index":{event["content_index"]},"delta":{quote(event["delta"])},"logprobs":{tail}'
        ).encode("ascii")

    def in_part(event: Event) -> bytes:
        return (
            f'{head}{event["sequence_number"]},"item_id":"{event["item_id"]}","output_index":{event["output_index"]}'
            f',"{index}":{event[index]},"delta":{quote(event["delta"])}}}\n\n'  # type: ignore[index]  # not None here
        ).encode("ascii")

    def in_item(event: Event) -> bytes:
        return (
            f'{head}{event["sequence_number"]},"item_id":"{event["item_id"]}","output_index":{event["output_index"]}'
            f',"delta":{quote(event["delta"])}}}\n\n'
        ).encode("ascii")

    if logprobs:
        return with_logprobs
    return in_item if index is None else in_part


_DELTA_ENCODERS: Final[Mapping[str, Callable[[Event], bytes]]] = {
    kind: _delta_encoder(kind, index, logprobs=kind == "response.output_text.delta")
    for kind, index in {
        "response.output_text.delta": "content_index",
        "response.refusal.delta": "content_index",
        "response.reasoning.delta": "content_index",
        "response.reasoning_summary_text.delta": "summary_index",
        "response.function_call_arguments.delta": None,
    }.items()
}
