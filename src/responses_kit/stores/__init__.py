"""Stores of responses, behind one small, owner-scoped protocol."""

from typing import TYPE_CHECKING

from .._exports import lazy_exports
from .memory import MemoryStore
from .opening import open_store
from .protocol import Log, Record, ResponseStore

if TYPE_CHECKING:
    from .redis import RedisStore
    from .sql import SqlStore
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"RedisStore": ".redis", "SqlStore": ".sql"})

__all__ = ["Log", "MemoryStore", "Record", "RedisStore", "ResponseStore", "SqlStore", "open_store"]
