"""One-off operations on a store for command lines."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from ..errors import ConfigurationError, ResponsesKitError, StoreError

__all__ = ["run_with_store", "set_up_store"]

T = TypeVar("T")


def run_with_store(store: Any, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run an operation on a store, on a new event loop, then close the store.

    Args:
        store: The store.
        work: The operation.

    Raises:
        ConfigurationError: The store failed; the message gives the reason.
    """

    async def run_and_close() -> T:
        try:
            return await work(store)
        finally:
            if hasattr(store, "aclose"):
                await store.aclose()

    logger = logging.getLogger("responses_kit")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # failures are reported below, once
    try:
        return anyio.run(run_and_close)
    except StoreError as error:
        raise ConfigurationError(f"The store failed: {_reason(error.__cause__ or error)}") from error
    except ResponsesKitError:
        raise
    except Exception as error:
        raise ConfigurationError(f"The store failed: {_reason(error)}") from error
    finally:
        logger.setLevel(level)


async def set_up_store(store: Any) -> None:
    """Set up a store: create or migrate its tables. Idempotent; a no-op for stores without `setup`."""
    if hasattr(store, "setup"):
        await store.setup()


def _reason(error: BaseException) -> str:
    """Return the driver's message without the wrapping of libraries."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0].rpartition(">: ")[2] if lines else type(error).__name__
