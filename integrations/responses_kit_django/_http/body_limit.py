"""Long bodies under ASGI, which Django would take in, to the last byte, before it looks whom they are for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

__all__ = ["Bounded", "is_long"]

_SHORT: Final = 64 * 1024
"""Bytes of a body that may be taken in for whatever it is meant."""


class Bounded:
    """What is received of a long request: no more of its body than one piece beyond the limit, which the view refuses.

    Args:
        scope: The request's.
        receive: The request's.
        limit: Most bytes of the body.
    """

    def __init__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], *, limit: int) -> None:
        self._receive, self._left = receive, limit
        self._ended, self._is_refused = False, (_length(scope) or 0) > limit

    async def __call__(self) -> Any:
        """The next message (ASGI)."""
        if self._is_refused and not self._ended:  # before it has come
            self._ended = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            if not self._ended:
                break
        self._left -= len(message.get("body", b""))
        self._ended = self._left < 0 or not message.get("more_body", False)
        return {**message, "more_body": not self._ended}


def _length(scope: dict[str, Any]) -> int | None:
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length[:20]) if length.isdigit() else None


def is_long(scope: dict[str, Any]) -> bool:
    """Whether the body may be long, as far as its announcement tells."""
    length = _length(scope)
    if length is not None:
        return length > _SHORT
    return scope["method"] not in ("GET", "HEAD") or b"transfer-encoding" in dict(scope["headers"])
