"""Events and objects to bytes: JSON, and server-sent events (specification, "Streaming HTTP Responses").

All JSON is ASCII with escapes, so that no line separator, no surrogate and no byte order can split or break a
line on the way. Every event is one `event:` line, one `data:` line and a blank line, in one piece of bytes.
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
"""Headers of every stream: no cache and no proxy may hold it back."""

DONE: Final = b"data: [DONE]\n\n"
"""What follows the terminal event."""

KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment; clients skip it, proxies see life."""


def encode_json(value: Any) -> bytes:
    """One JSON value as ASCII bytes. What is no number in JSON becomes null."""
    return to_json(value, ensure_ascii=True, inf_nan_mode="null")


def encode_sse(event: Event) -> bytes:
    """One event as its bytes in a `text/event-stream`."""
    delta = _DELTAS.get(event["type"])
    if delta is not None:
        return delta(event)
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


def decode_events(data: bytes) -> list[Event]:
    """The events in what `sse` has made of them."""
    return [from_json(event.partition(b"\ndata: ")[2]) for event in data.split(b"\n\n")[:-1]]


def _deltas(kind: str, index: str | None, *, logprobs: bool = False) -> Callable[[Event], bytes]:
    """An encoder for one kind of delta, by hand: these are nearly all of a stream's events."""
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


_DELTAS: Final[Mapping[str, Callable[[Event], bytes]]] = {
    kind: _deltas(kind, index, logprobs=kind == "response.output_text.delta")
    for kind, index in {
        "response.output_text.delta": "content_index",
        "response.refusal.delta": "content_index",
        "response.reasoning.delta": "content_index",
        "response.reasoning_summary_text.delta": "summary_index",
        "response.function_call_arguments.delta": None,
    }.items()
}
