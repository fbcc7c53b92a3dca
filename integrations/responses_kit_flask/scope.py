"""The app context around backends and tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

from flask import Flask

from responses_kit.engine.hooks import Scope

__all__ = ["AppScope"]


class AppScope(Scope):
    """A scope that provides Flask's application context.

    Args:
        app: The app.
    """

    def __init__(self, app: Flask) -> None:
        self._app = app

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        """Push an app context around the async calls of one response."""
        with self._app.app_context():
            yield

    def thread_scope(self) -> AbstractContextManager[object]:
        """Return an app context for a turn of a plain backend or a plain tool call."""
        return self._app.app_context()
