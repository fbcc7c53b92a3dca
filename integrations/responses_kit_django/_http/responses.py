"""Django responses for event streams and WebSocket upgrades."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, SupportsIndex

from django.http import HttpResponse, StreamingHttpResponse

from responses_kit.adapters.asgi import PullStream
from responses_kit.adapters.wsgi_bridge import WSGIBridge
from responses_kit.kit import ResponsesKit

__all__ = ["EventStream", "WebSocketUpgrade"]


class EventStream(StreamingHttpResponse):
    """A stream of server-sent events that middleware does not compress and Django does not slice.

    Args:
        pieces: Chunks of the stream.
        status: The HTTP status.
        headers: The HTTP headers.
    """

    def __init__(self, pieces: WSGIBridge | PullStream, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, status=status, headers=dict(headers))
        self._pieces = pieces
        # Django does not close a response that middleware replaces, or drops by failing.
        weakref.finalize(self, pieces.cancel).atexit = False

    def has_header(self, header: str) -> bool:
        """Return whether a header is set.

        Always true for Content-Encoding, so that middleware does not compress the stream, which would delay events.
        """
        return header.lower() == "content-encoding" or super().has_header(header)

    __contains__ = has_header

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._pieces, PullStream), "streams made for WSGI are iterated synchronously"
        async with aclosing(self._pieces):
            async for piece in super().__aiter__():
                yield _UnslicedBytes(piece)


class _UnslicedBytes(bytes):
    """Bytes that Django's ASGI handler sends in one message: it slices chunks by their length, which is 1 at most."""

    def __len__(self) -> int:
        return min(super().__len__(), 1)

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        return bytes(self) if isinstance(key, slice) else super().__getitem__(key)


class WebSocketUpgrade(HttpResponse):
    """The view's consent to open a WebSocket.

    Args:
        kit: The kit that serves it.
        owner: The owner of its responses.
    """

    def __init__(self, kit: ResponsesKit, owner: str) -> None:
        super().__init__(status=101)
        self.kit, self.owner = kit, owner

    async def authorize(self) -> str:
        """Return the owner; see `responses_kit.adapters.asgi.serve_websocket`."""
        return self.owner
