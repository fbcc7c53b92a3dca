"""The stores of hosts whose frameworks bring none: a file, a schema or keys of a server's own. One a process."""

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

from .hosts import TTL, Fragile
from .puppet import Strings

_here: dict[str, Any] = {}


class FragileSqlStore(Fragile, SqlStore):
    """SQLite and PostgreSQL."""


class FragileRedisStore(Fragile, RedisStore):
    """Redis."""


@contextmanager
def place(kind: str) -> Iterator[None]:
    """Where the store is, made before and gone in the end.

    Args:
        kind: "sqlite", "postgresql" or "redis".
    """
    maker, name = os.getpid(), f"kit_{secrets.token_hex(6)}"
    there = {"sqlite": _in_a_file, "postgresql": _in_postgres, "redis": _in_redis}[kind](name)
    _here.update(there.__enter__())
    try:
        yield
    finally:
        if os.getpid() == maker:  # a forked process comes here as well
            there.__exit__(None, None, None)


def settings(strings: Strings) -> dict[str, Any]:
    """What the host brings to its kit."""
    made: dict[str, Any] = {**_here, "ttl": TTL}
    kind = made.pop("kind")
    if kind is FragileSqlStore:  # Redis goes by its own clock
        made["clock"] = lambda: time.time() + strings.ahead
    return {"store": kind(**made)}


@contextmanager
def _in_a_file(name: str) -> Iterator[dict[str, Any]]:
    folder = tempfile.mkdtemp(prefix=name)
    url = f"sqlite:///{Path(folder) / 'responses.db'}"
    anyio.run(_set_up, url)
    yield {"kind": FragileSqlStore, "source": url}
    shutil.rmtree(folder)


@contextmanager
def _in_postgres(name: str) -> Iterator[dict[str, Any]]:
    import psycopg

    server = os.environ["RESPONSES_KIT_TEST_POSTGRES"]
    with psycopg.connect(server, autocommit=True) as outside:
        outside.execute(f"CREATE SCHEMA {name}")
    options = quote(f"-c search_path={name} -c synchronous_commit=off")  # nothing is to outlive a power cut
    url = f"{server}?options={options}"
    anyio.run(_set_up, url)
    yield {"kind": FragileSqlStore, "source": url}
    with psycopg.connect(server, autocommit=True) as outside:
        outside.execute(f"DROP SCHEMA {name} CASCADE")


@contextmanager
def _in_redis(name: str) -> Iterator[dict[str, Any]]:
    import redis

    server = os.environ["RESPONSES_KIT_TEST_REDIS"]
    yield {"kind": FragileRedisStore, "redis": server, "prefix": f"{name}:"}
    with redis.Redis.from_url(server) as outside:
        for key in outside.scan_iter(f"{name}:*"):
            outside.delete(key)


async def _set_up(url: str) -> None:
    store = SqlStore(url)
    try:
        await store.setup()
    finally:
        await store.aclose()
