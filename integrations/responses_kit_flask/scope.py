"""What backends and tools find of Flask's around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

from flask import Flask

from responses_kit.engine.hooks import Scope

__all__ = ["AppScope"]


class AppScope(Scope):
    """An application context: `current_app` is there, and what extensions keep in it is torn down.

    Args:
        app: The app.
    """

    def __init__(self, app: Flask) -> None:
        self._app = app

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        """One for each response."""
        with self._app.app_context():
            yield

    def thread_scope(self) -> AbstractContextManager[object]:
        """One for each turn of a plain backend, and each call of a plain tool."""
        return self._app.app_context()
