"""Replies that stream server-sent events, with keep-alive comments and a bound on unread streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from .._concurrency.tasks import ScopedTask
from ..errors import (
    ClientDisconnected,
)
from ..kit import ResponsesKit
from ..protocol.sse import KEEP_ALIVE, SSE_HEADERS
from .messages import Reply, Send

__all__ = ["SendEvents", "stream_reply"]

SendEvents = Callable[[bytes], Awaitable[None]]
"""Sends whole events; raises `ClientDisconnected` if the client has left."""


def stream_reply(
    kit: ResponsesKit, play: Callable[[SendEvents], Awaitable[None]], give_up: Callable[[], None] = lambda: None
) -> Reply:
    """A reply that streams server-sent events.

    Args:
        kit: Says how long the silence may be, and how long a client may leave the stream unread.
        play: Puts the events.
        give_up: Called where the client leaves it unread for too long, before `play` is cancelled.
    """
    stream = _Stream(play, give_up, keep_alive=kit.settings.timeouts.keep_alive, patience=kit.settings.timeouts.send)
    return Reply(200, SSE_HEADERS, stream=stream.write)


class _Stream:
    """One response as server-sent events, with comments while nothing happens."""

    def __init__(
        self,
        play: Callable[[SendEvents], Awaitable[None]],
        give_up: Callable[[], None],
        *,
        keep_alive: float,
        patience: float,
    ) -> None:
        self._play, self._give_up = play, give_up
        self._keep_alive, self._patience = keep_alive, patience
        self._sent = 0
        self._sending = False

    async def write(self, send: Send) -> None:
        async def put(data: bytes) -> None:
            self._sending = True
            try:
                await send(data)
            except OSError:
                raise ClientDisconnected from None
            self._sending = False
            self._sent += 1

        with anyio.CancelScope() as playing:
            async with ScopedTask(self._watch, send, playing.cancel) as watching:
                watching.start()
                with suppress(ClientDisconnected):
                    await self._play(put)

    async def _watch(self, send: Send, stop: Callable[[], None]) -> None:
        """Fills silence with comments, and ends the stream of a client that leaves it unread."""
        pause = min(self._keep_alive, self._patience)
        waited = 0.0
        while True:
            sent = self._sent
            await anyio.sleep(pause)
            waited = waited + pause if sent == self._sent else 0.0
            if self._sending:
                if waited >= self._patience:
                    self._give_up()
                    stop()
            elif waited >= self._keep_alive:
                waited = 0.0
                try:
                    with anyio.fail_after(self._patience):
                        await send(KEEP_ALIVE)
                except OSError:  # a TimeoutError is one
                    self._give_up()
                    stop()
