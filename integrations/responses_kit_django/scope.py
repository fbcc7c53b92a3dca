"""What backends, tools and receivers need around them in a Django project: database connections that are given back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import anyio
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connections

from responses_kit.engine.hooks import Scope

__all__ = ["DatabaseScope", "give_back", "within_request"]

within_request: ContextVar[bool] = ContextVar("responses_kit_within_request", default=False)
"""Whether Django itself gives back, at the request's end, what async code borrows."""


class DatabaseScope(Scope):
    """Gives the connections back that the ORM has opened for a backend or tool."""

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        """The async ORM works in a thread of this response's own, which ends with it."""
        if within_request.get():
            yield
            return
        context: Any = ThreadSensitiveContext()
        await context.__aenter__()
        try:
            yield
        finally:
            # Where the process ends meanwhile no thread can be started any more, and the connections end with it.
            with anyio.CancelScope(shield=True), suppress(RuntimeError):
                await sync_to_async(give_back)()
                await context.__aexit__(None, None, None)

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        """The thread will serve others, or none."""
        try:
            yield
        finally:
            give_back()


def give_back(*, old: bool = False) -> None:
    """Closes this thread's connections, or gives them back to Django's pool.

    Args:
        old: Only those that are to be closed at the end of a request. Of a thread that may never come back to them
            all have to be, or they would pile up.
    """
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:  # somebody's who goes on here, such as a test's
            continue
        if old:
            connection.close_if_unusable_or_obsolete()
        else:
            connection.close()
