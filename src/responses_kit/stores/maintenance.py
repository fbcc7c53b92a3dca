"""What command lines do with a store: something, once, and then close it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from ..errors import ConfigurationError, ResponsesKitError, StoreError

__all__ = ["run_with_store", "set_up_store"]

T = TypeVar("T")


def run_with_store(store: Any, work: Callable[[Any], Awaitable[T]]) -> T:
    """Does something with a store, on an event loop of its own, and closes it.

    Args:
        store: The store.
        work: Takes it.

    Raises:
        ConfigurationError: The store failed; says why.
    """

    async def done() -> T:
        try:
            return await work(store)
        finally:
            if hasattr(store, "aclose"):
                await store.aclose()

    logger = logging.getLogger("responses_kit")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what fails is said below, once
    try:
        return anyio.run(done)
    except StoreError as error:
        raise ConfigurationError(f"The store failed: {_reason(error.__cause__ or error)}") from error
    except ResponsesKitError:
        raise
    except Exception as error:
        raise ConfigurationError(f"The store failed: {_reason(error)}") from error
    finally:
        logger.setLevel(level)


async def set_up_store(store: Any) -> None:
    """Makes a store ready: creates what is missing, or brings it up to this version. Does no harm when repeated."""
    if hasattr(store, "setup"):
        await store.setup()


def _reason(error: BaseException) -> str:
    """What a driver says, without what libraries put around it."""
    said = str(getattr(error, "orig", None) or error).strip().splitlines()
    return said[0].rpartition(">: ")[2] if said else type(error).__name__
