"""What an app's own code needs around it where the kit calls it: database connections closed, a context pushed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any

__all__ = ["Call", "Surroundings", "called_here"]

Call = Callable[[Callable[[Any], Any], Any], Awaitable[Any]]
"""Calls a host's function with the host's request, in the thread in which that function may wait; gives its result."""


async def called_here(function: Callable[[Any], Any], request: Any) -> Any:
    """Calls it on the event loop."""
    return function(request)


class Surroundings:
    """Entered around backends and tools. There is nothing in it; integrations bring what their framework needs."""

    def on_loop(self) -> AbstractAsyncContextManager[object]:
        """Entered on the event loop, around all that is asked of a backend for one response, tools' calls included."""
        return nullcontext()

    def in_thread(self) -> AbstractContextManager[object]:
        """Entered in a worker thread, around one turn of a plain backend, or one call of a plain tool."""
        return nullcontext()
