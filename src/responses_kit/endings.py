"""The app hears of each response that has ended: for its bills, its audits, its statistics."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from pydantic_core import from_json

from .companion import detach, is_cancelled
from .encoding import encode

__all__ = ["Ended", "Endings"]

logger = logging.getLogger("responses_kit")

Ended = Callable[[str, dict[str, Any]], Awaitable[None] | None]
"""Takes the owner and the response object, which is its own to keep. A plain function must not wait."""

_PATIENCE_SECONDS = 5.0
"""For how long the end of an answer may be held up. The hook itself is not cut off."""


class Endings:
    """Tells the app of each response once, in the process that has ended it, when its record is final.

    Args:
        hook: Takes the news, if anybody wants them. Its failures are logged.
    """

    def __init__(self, hook: Ended | None = None) -> None:
        self._hook = hook

    async def tell(self, owner: str, response: Mapping[str, Any]) -> None:
        """Has the hook called, and waits for it, but not for ever; nothing that is cancelled around cuts it off."""
        if self._hook is None:
            return
        called = anyio.Event()
        detach(self._call, self._hook, owner, from_json(encode(response)), called)
        with anyio.move_on_after(_PATIENCE_SECONDS, shield=True):
            await called.wait()

    async def _call(self, hook: Ended, owner: str, response: dict[str, Any], called: anyio.Event) -> None:
        name = response["id"]
        try:
            answer = hook(owner, response)
            if inspect.isawaitable(answer):
                await answer
        except BaseException as error:
            # Of whatever kind: a hook must not end its host, nor the loop that others are served by.
            if isinstance(error, KeyboardInterrupt) or is_cancelled(error):
                raise
            logger.error("the hook for the end of response %s failed", name, exc_info=error)
        finally:
            called.set()
