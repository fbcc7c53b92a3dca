"""What the view answers with, beside plain responses of Django's."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, SupportsIndex

from django.http import HttpResponse, StreamingHttpResponse

from responses_kit.adapters.asgi import PullStream
from responses_kit.adapters.wsgi_bridge import WSGIBridge
from responses_kit.kit import ResponsesKit

__all__ = ["EventStream", "Upgrade"]


class EventStream(StreamingHttpResponse):
    """Server-sent events, which nobody may hold back or cut.

    Args:
        pieces: What is sent, piece by piece.
        status: The reply's.
        headers: The reply's.
    """

    def __init__(self, pieces: WSGIBridge | PullStream, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, status=status, headers=dict(headers))
        self._pieces = pieces
        # Where middleware fails, or answers something else, nobody closes what the view has answered.
        weakref.finalize(self, pieces.drop).atexit = False

    def has_header(self, header: str) -> bool:
        """Whether there is such a header. Compression, which waits for more to compress, is told that it was done."""
        return header.lower() == "content-encoding" or super().has_header(header)

    __contains__ = has_header

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._pieces, PullStream), "what is made for WSGI is iterated there"
        async with aclosing(self._pieces):  # whoever stops, for whatever reason
            async for piece in super().__aiter__():
                yield _Whole(piece)


class _Whole(bytes):
    """Whole events, for Django's ASGI handler, which would cut them into slices: one slice is all of them."""

    def __len__(self) -> int:
        return min(super().__len__(), 1)

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        return bytes(self) if isinstance(key, slice) else super().__getitem__(key)


class Upgrade(HttpResponse):
    """A WebSocket may be opened.

    Args:
        kit: Answers on it.
        owner: Whose it is.
    """

    def __init__(self, kit: ResponsesKit, owner: str) -> None:
        super().__init__(status=101)
        self.kit, self.owner = kit, owner

    async def admitted(self) -> str:
        """Whose socket it becomes; see `responses_kit.adapters.asgi.converse`."""
        return self.owner
