"""Hooks into the app: the completion hook, calls of host functions, and scopes around backends and tools."""

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
"""Called with the owner and a copy of the response object. A plain function must not block the event loop."""

_HOOK_TIMEOUT = 5.0
"""Seconds that the hook may delay the end of a run; after that it continues in the background."""


class CompletionHook:
    """Calls the app's hook once per response, in the process that has ended it.

    Args:
        hook: Called with the owner and the response. Its failures are logged.
    """

    def __init__(self, hook: OnResponseEnd | None = None) -> None:
        self._hook = hook

    async def notify(self, owner: str, response: Mapping[str, Any]) -> None:
        """Call the hook in its own task, which survives cancellation, and wait up to `_HOOK_TIMEOUT` for it."""
        if self._hook is None:
            return
        called = anyio.Event()
        spawn(self._call, self._hook, owner, from_json(encode_json(response)), called)
        with anyio.move_on_after(_HOOK_TIMEOUT, shield=True):
            await called.wait()

    async def _call(self, hook: OnResponseEnd, owner: str, response: dict[str, Any], called: anyio.Event) -> None:
        response_id = response["id"]  # the hook may change its copy
        try:
            result = hook(owner, response)
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            # Only KeyboardInterrupt and real cancellations propagate: a hook's SystemExit must not end the server.
            if isinstance(error, KeyboardInterrupt) or is_cancellation(error):
                raise
            logger.error("response %s: the completion hook failed", response_id, exc_info=error)
        finally:
            called.set()


HostCaller = Callable[[Callable[[Any], Any], Any], Awaitable[Any]]
"""Calls a function with the host's request, on a thread that the function may block, and returns its result."""


async def call_on_event_loop(function: Callable[[Any], Any], request: Any) -> Any:
    """Call a function on the event loop; a `HostCaller`."""
    return function(request)


class Scope:
    """Contexts around backends and tools; empty here. Integrations override them for their framework's needs."""

    def async_scope(self) -> AbstractAsyncContextManager[object]:
        """Return the context of one response on the event loop, around its backend and its tools."""
        return nullcontext()

    def thread_scope(self) -> AbstractContextManager[object]:
        """Return the context of one synchronous turn, or one call of a synchronous tool, in its worker thread."""
        return nullcontext()
