"""Stores for hosts whose framework has none: an SQLite file, a PostgreSQL schema or a Redis prefix, one per process."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio

from responses_kit.stores.redis import RedisStore
from responses_kit.stores.sql import SqlStore

from .hosts import TTL, FaultInjectionMixin
from .scripted import Control

_store_arguments: dict[str, Any] = {}


class FaultySqlStore(FaultInjectionMixin, SqlStore):
    """The SQL store, for SQLite and PostgreSQL."""


class FaultyRedisStore(FaultInjectionMixin, RedisStore):
    """The Redis store."""


@contextmanager
def provide_store(kind: str) -> Iterator[None]:
    """Create the store's database before the block, and delete it afterwards.

    Args:
        kind: "sqlite", "postgresql" or "redis".
    """
    creator, name = os.getpid(), f"kit_{secrets.token_hex(6)}"
    there = {"sqlite": _sqlite_database, "postgresql": _postgres_schema, "redis": _redis_prefix}[kind](name)
    _store_arguments.update(there.__enter__())
    try:
        yield
    finally:
        if os.getpid() == creator:  # forked processes leave the block, too
            there.__exit__(None, None, None)


def settings(control: Control) -> dict[str, Any]:
    """Return the kit's settings that the host provides."""
    arguments: dict[str, Any] = {**_store_arguments, "ttl": TTL}
    kind = arguments.pop("kind")
    if kind is FaultySqlStore:  # Redis uses its own clock
        arguments["clock"] = lambda: time.time() + control.clock_offset
    return {"store": kind(**arguments)}


@contextmanager
def _sqlite_database(name: str) -> Iterator[dict[str, Any]]:
    folder = tempfile.mkdtemp(prefix=name)
    url = f"sqlite:///{Path(folder) / 'responses.db'}"
    anyio.run(_set_up, url)
    yield {"kind": FaultySqlStore, "source": url}
    shutil.rmtree(folder)


@contextmanager
def _postgres_schema(name: str) -> Iterator[dict[str, Any]]:
    import psycopg

    server = os.environ["RESPONSES_KIT_TEST_POSTGRES"]
    with psycopg.connect(server, autocommit=True) as outside:
        outside.execute(f"CREATE SCHEMA {name}")
    options = quote(f"-c search_path={name} -c synchronous_commit=off")  # durability is not needed
    url = f"{server}?options={options}"
    anyio.run(_set_up, url)
    yield {"kind": FaultySqlStore, "source": url}
    with psycopg.connect(server, autocommit=True) as outside:
        outside.execute(f"DROP SCHEMA {name} CASCADE")


@contextmanager
def _redis_prefix(name: str) -> Iterator[dict[str, Any]]:
    import redis

    server = os.environ["RESPONSES_KIT_TEST_REDIS"]
    yield {"kind": FaultyRedisStore, "redis": server, "prefix": f"{name}:"}
    with redis.Redis.from_url(server) as outside:
        for key in outside.scan_iter(f"{name}:*"):
            outside.delete(key)


async def _set_up(url: str) -> None:
    store = SqlStore(url)
    try:
        await store.setup()
    finally:
        await store.aclose()
