"""The limit on request bodies under ASGI, where Django reads the whole body before it resolves the URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

__all__ = ["LimitedReceive", "has_long_body"]

_MAX_SHORT_BODY_BYTES: Final = 64 * 1024
"""Bytes of a body that Django may read before the URL is known. Longer bodies are limited for the API's URLs."""


class LimitedReceive:
    """An ASGI `receive` that ends the body at the message that exceeds a limit. The view then refuses the request.

    Args:
        scope: The request's ASGI scope.
        receive: The server's `receive`.
        limit: Bytes of the body.
    """

    def __init__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], *, limit: int) -> None:
        self._receive, self._remaining = receive, limit
        self._has_ended, self._is_refused = False, (_content_length(scope) or 0) > limit

    async def __call__(self) -> Any:
        """Return the next message (ASGI)."""
        if self._is_refused and not self._has_ended:  # refused by its Content-Length, without reading it
            self._has_ended = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            if not self._has_ended:
                break
        self._remaining -= len(message.get("body", b""))
        self._has_ended = self._remaining < 0 or not message.get("more_body", False)
        return {**message, "more_body": not self._has_ended}


def _content_length(scope: dict[str, Any]) -> int | None:
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length[:20]) if length.isdigit() else None


def has_long_body(scope: dict[str, Any]) -> bool:
    """Return whether the body is or may be long, judging by the headers."""
    length = _content_length(scope)
    if length is not None:
        return length > _MAX_SHORT_BODY_BYTES
    return scope["method"] not in ("GET", "HEAD") or b"transfer-encoding" in dict(scope["headers"])
