"""What an app's own code needs around it where the kit calls it: database connections closed, a context pushed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any

import anyio
from pydantic_core import from_json

from .._concurrency.tasks import is_cancellation, spawn
from ..protocol.sse import encode_json

__all__ = ["CompletionHook", "HostCaller", "OnResponseEnd", "Scope", "call_on_event_loop"]

logger = logging.getLogger("responses_kit")

OnResponseEnd = Callable[[str, dict[str, Any]], Awaitable[None] | None]
"""Takes the owner and the response object, which is its own to keep. A plain function must not wait."""

_PATIENCE_SECONDS = 5.0
"""For how long the end of an answer may be held up. The hook itself is not cut off."""


class CompletionHook:
    """Tells the app of each response once, in the process that has ended it, when its record is final.

    Args:
        hook: Takes the news, if anybody wants them. Its failures are logged.
    """

    def __init__(self, hook: OnResponseEnd | None = None) -> None:
        self._hook = hook

    async def notify(self, owner: str, response: Mapping[str, Any]) -> None:
        """Has the hook called, and waits for it, but not for ever; nothing that is cancelled around cuts it off."""
        if self._hook is None:
            return
        called = anyio.Event()
        spawn(self._call, self._hook, owner, from_json(encode_json(response)), called)
        with anyio.move_on_after(_PATIENCE_SECONDS, shield=True):
            await called.wait()

    async def _call(self, hook: OnResponseEnd, owner: str, response: dict[str, Any], called: anyio.Event) -> None:
        name = response["id"]
        try:
            answer = hook(owner, response)
            if inspect.isawaitable(answer):
                await answer
        except BaseException as error:
            # Of whatever kind: a hook must not end its host, nor the loop that others are served by.
            if isinstance(error, KeyboardInterrupt) or is_cancellation(error):
                raise
            logger.error("the hook for the end of response %s failed", name, exc_info=error)
        finally:
            called.set()


HostCaller = Callable[[Callable[[Any], Any], Any], Awaitable[Any]]
"""Calls a host's function with the host's request, in the thread in which that function may wait; gives its result."""


async def call_on_event_loop(function: Callable[[Any], Any], request: Any) -> Any:
    """Calls it on the event loop."""
    return function(request)


class Scope:
    """Entered around backends and tools. There is nothing in it; integrations bring what their framework needs."""

    def async_scope(self) -> AbstractAsyncContextManager[object]:
        """Entered on the event loop, around all that is asked of a backend for one response, tools' calls included."""
        return nullcontext()

    def thread_scope(self) -> AbstractContextManager[object]:
        """Entered in a worker thread, around one turn of a plain backend, or one call of a plain tool."""
        return nullcontext()
