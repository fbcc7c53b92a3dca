"""Replies that stream server-sent events, with keep-alive comments and a send timeout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from .._concurrency.tasks import ScopedTask
from ..errors import ClientDisconnected
from ..kit import ResponsesKit
from ..protocol.sse import KEEP_ALIVE, SSE_HEADERS
from .messages import Reply, Send

__all__ = ["SendEvents", "stream_reply"]

SendEvents = Callable[[bytes], Awaitable[None]]
"""Sends whole events; raises `ClientDisconnected` if the client has left."""


def stream_reply(
    kit: ResponsesKit, write: Callable[[SendEvents], Awaitable[None]], abort: Callable[[], None] = lambda: None
) -> Reply:
    """Return a reply that streams server-sent events.

    Args:
        kit: Provides the keep-alive and send timeouts.
        write: Sends the events.
        abort: Called before `write` is cancelled because the client has not read for the send timeout or is gone.
    """
    timeouts = kit.settings.timeouts
    stream = _EventStream(write, abort, keep_alive=timeouts.keep_alive, send_timeout=timeouts.send)
    return Reply(200, SSE_HEADERS, stream=stream.run)


class _EventStream:
    """A stream of server-sent events, with keep-alive comments while there are none."""

    def __init__(
        self,
        write: Callable[[SendEvents], Awaitable[None]],
        abort: Callable[[], None],
        *,
        keep_alive: float,
        send_timeout: float,
    ) -> None:
        self._write, self._abort = write, abort
        self._keep_alive, self._send_timeout = keep_alive, send_timeout
        self._sent = 0
        self._is_sending = False

    async def run(self, send: Send) -> None:
        async def send_events(data: bytes) -> None:
            self._is_sending = True
            try:
                await send(data)
            except OSError:
                raise ClientDisconnected from None
            self._is_sending = False
            self._sent += 1

        with anyio.CancelScope() as scope:
            async with ScopedTask(self._send_keep_alives, send, scope.cancel) as keep_alives:
                keep_alives.start()
                with suppress(ClientDisconnected):
                    await self._write(send_events)

    async def _send_keep_alives(self, send: Send, cancel: Callable[[], None]) -> None:
        """Send keep-alive comments, and cancel the stream if the client does not read."""
        interval = min(self._keep_alive, self._send_timeout)
        idle = stalled = 0.0  # seconds without events, and seconds of a send in progress, in steps of the interval
        while True:
            sent, was_sending = self._sent, self._is_sending
            await anyio.sleep(interval)
            is_same = sent == self._sent
            idle = idle + interval if is_same else 0.0
            stalled = stalled + interval if is_same and was_sending else 0.0
            if self._is_sending:
                if stalled >= self._send_timeout:
                    self._abort()
                    cancel()
            elif idle >= self._keep_alive:
                idle = 0.0
                try:
                    with anyio.fail_after(self._send_timeout):
                        await send(KEEP_ALIVE)
                except OSError:  # includes TimeoutError
                    self._abort()
                    cancel()
