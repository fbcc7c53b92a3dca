"""Stores by URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .memory import MemoryStore

if TYPE_CHECKING:
    from .redis import RedisStore
    from .sql import SqlStore

__all__ = ["open_store"]


def open_store(url: str, **settings: Any) -> SqlStore | RedisStore | MemoryStore:
    """Return the store at a URL; call `setup` once before use, and `aclose` at the end.

    Args:
        url: "sqlite:///responses.db", "postgresql://user@host/database", "redis://host:6379/0" or "memory:".
        settings: Passed to `SqlStore`, `RedisStore` or `MemoryStore`.

    Raises:
        ConfigurationError: There is no store for this URL scheme.
        ImportError: The extra is missing; the message names it.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"a store URL must be a str, not {type(url).__name__}")
    scheme = url.partition(":")[0].partition("+")[0].lower()
    if scheme == "memory":
        return MemoryStore(**settings)
    if scheme in ("redis", "rediss", "unix"):
        from .redis import RedisStore

        return RedisStore(url, **settings)
    if scheme in ("sqlite", "postgresql", "postgres"):
        from .sql import SqlStore

        return SqlStore(url, **settings)
    raise ConfigurationError("a store URL must start with sqlite://, postgresql://, redis:// or memory:")
