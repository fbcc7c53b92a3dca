"""The store for Redis."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, Final, Literal, cast
from urllib.parse import quote, unquote

import anyio
import anyio.lowlevel

from ...errors import ConfigurationError, StoreError
from ..group_commit import GroupCommit
from ..protocol import Log, Record

try:
    from redis import exceptions
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.connection import parse_url
    from redis.asyncio.retry import Retry
    from redis.backoff import ExponentialBackoff
except ImportError as missing:
    raise ImportError('RedisStore needs the extra "redis": pip install "responses-kit[redis]"') from missing

__all__ = ["RedisStore"]

_SCRIPT: Final = resources.files(__package__).joinpath("script.lua").read_bytes()
_SHA: Final = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()

_MIN_VERSION: Final = (6, 2)

_MAX_CONNECTIONS, _CONNECT_TIMEOUT, _COMMAND_TIMEOUT, _CALL_TIMEOUT = 32, 5, 10, 30
"""Connections per event loop; seconds to connect, for one command or a free connection, and for a whole call."""

_MAX_NAMES: Final = 1000
"""Records per command."""

_MAX_EVENT_NUMBER: Final = 2**63
"""Larger than the number of any event."""

_NUMBERS = itertools.count()


class RedisStore:
    """A store in Redis 6.2 or newer, or a compatible server with Lua scripts.

    Using a response renews its whole chain, so an active conversation stays whole. Writes that a broken connection left
    in doubt are sent again, and applied once.

    Redis must not evict keys: set `maxmemory-policy noeviction`, and enable persistence if responses must survive a
    restart. Redis Cluster is not supported, because one call touches several keys; for Sentinel pass
    `Sentinel(...).master_for(...)`. Needs asyncio.

    Example::

        store = RedisStore("redis://:password@redis.example.com/0")
        await store.setup()                              # at startup, so that a misconfiguration fails there
        kit = ResponsesKit(backend, store=store)
        await store.aclose()                             # at shutdown

    Args:
        redis: A URL (`redis://`, `rediss://` or `unix://`) with the options of redis-py, opened separately for each
            event loop; or a client, which must be used on one event loop only and is not closed.
        prefix: Prefix of all keys.
        ttl: Seconds from the last use of a response until it expires. It may expire up to `ttl / 16` earlier.
        log_ttl: Seconds from the end of a response until its log expires; at most `ttl`.
        max_record_bytes: Bytes of a record, and of one append to its log.

    Raises:
        ConfigurationError: The URL is not valid, or the client is not a `redis.asyncio.Redis` that returns bytes.
    """

    def __init__(
        self,
        redis: str | Redis,
        *,
        prefix: str = "responses_kit:",
        ttl: float = 24 * 60 * 60,
        log_ttl: float = 60 * 60,
        max_record_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._redis = redis
        if isinstance(redis, str):
            try:
                parse_url(redis)
            except ValueError:
                # The message may quote a part of the password in place of the port.
                raise ConfigurationError(
                    "the URL must be a Redis URL, such as redis://user:password@host:6379/0; percent-encode special "
                    "characters in the password"
                ) from None
        else:
            _check_client(redis)
        self._prefix, self._max_record_bytes = prefix, max_record_bytes
        self._ttl, self._log_ttl = int(ttl * 1000), int(min(ttl, log_ttl) * 1000)
        self._clients: anyio.lowlevel.RunVar[Redis | None] = anyio.lowlevel.RunVar(
            f"responses_kit.redis.{next(_NUMBERS)}"  # anyio knows them by name
        )
        self._appends = GroupCommit(self._append, size=lambda append: len(append[1]))

    async def setup(self) -> None:
        """Check that Redis is reachable and supported. There is nothing to create.

        Raises:
            ConfigurationError: The server is too old, or a cluster.
            redis.RedisError: The server is unreachable, or refuses the connection.
            TimeoutError: The server does not answer.
        """
        with anyio.fail_after(_CALL_TIMEOUT):
            info = await self._client().info("server")
        version = str(info["redis_version"])
        if tuple(map(int, version.split(".")[:2])) < _MIN_VERSION:
            needed = ".".join(map(str, _MIN_VERSION))
            raise ConfigurationError(f"RedisStore needs Redis {needed} or newer; the server has {version}")
        if info.get("redis_mode") == "cluster":
            raise ConfigurationError(
                "RedisStore does not support Redis Cluster: use a single Redis, or Sentinel's master"
            )

    async def aclose(self) -> None:
        """Close the connections of this event loop. A later call opens new ones."""
        await self._appends.drain()
        client = self._clients.get(None)
        if client is not None:
            self._clients.set(None)
            await client.aclose()

    async def create(self, owner: str, record: Record) -> Record | None:
        name, fields = _name(owner, record.id), self._fields(record)
        while isinstance(answer := await self._call("create", name, *fields), list):
            [(_, other)] = await self._read_records(answer)
            if other is not None:
                return other  # otherwise it was deleted meanwhile, and the key is free
        if not answer:
            raise StoreError("A response with this id exists already.")
        return None

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        piece = () if log is None else (log.start, log.end, self._check_size(log.data))
        fields = (*self._fields(record), self._log_ttl, *piece)
        return bool(await self._call("update", _name(owner, record.id), *fields))

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        data = self._check_size(log.data)
        place = f"{_name(owner, response_id)} {_new_stamp()} {log.start} {log.end} {len(data)}\n"
        return await self._appends.submit((place, data))

    async def _append(self, appends: Sequence[tuple[str, bytes]]) -> Sequence[bool]:
        # Two arguments for all appends, because each argument costs as much as the rest of an append.
        places, data = zip(*appends, strict=True)
        return _decode_flags(await self._call("append", "".join(places), b"".join(data)))

    async def get(self, owner: str, response_id: str) -> Record | None:
        [(_, record)] = await self._read_records(await self._call("get", _name(owner, response_id)))
        return record

    async def find(self, owner: str, key: str) -> Record | None:
        answer = await self._call("find", _quote(owner), _encode(key))
        if answer is None:
            return None
        [(_, record)] = await self._read_records(answer)
        return record

    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        name = _name(owner, response_id)
        pieces: list[Log] = []
        following, end = max(after, -1) + 1, None
        while end is None or following < end:
            reply = await self._call("events", name, min(following + 1, _MAX_EVENT_NUMBER))
            if reply is None:
                return None
            stop, *places = reply[0].split(b"\n")
            if end is None:
                end = int(stop)  # fixed at the first reply, because the log may grow faster than it is read
            if not places and following < end:
                return None
            for place, data in zip(places, reply[1:], strict=True):
                start, past = map(int, place.split())
                if start > following:
                    return None  # the start of the log has expired
                pieces.append(Log(start, past - start, data))
                following = past
        return pieces

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        records: dict[str, Record] = {}
        following: str | None = response_id
        while following is not None and following not in records:
            reply = await self._call("chain", _name(owner, following))  # at most the last 1,000 records
            following = None
            for _, record in await self._read_records(reply):
                if record is None or record.id in records:
                    break  # deleted meanwhile, or a circular chain
                records[record.id] = record
                following = record.previous_id
        return list(reversed(records.values()))

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        wanted = list(dict.fromkeys(item_ids))
        if not wanted:
            return {}
        holders, *reply = await self._call("items", _quote(owner), "".join(map(_encode, wanted)))
        records = {_name(*of): record for of, record in await self._read_records(reply)}
        found = zip(wanted, holders.decode().split(" "), strict=True)
        return {item_id: record for item_id, name in found if (record := records.get(name)) is not None}

    async def delete(self, owner: str, response_id: str) -> bool:
        return bool(await self._call("delete", _name(owner, response_id)))

    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        return bool(await self._call("cancel", _name(owner, response_id), float(until)))

    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        till = () if until is None else (float(until),)
        names, active = list(runs), set[tuple[str, str]]()
        for first in range(0, len(names), _MAX_NAMES):
            some = names[first : first + _MAX_NAMES]
            answers = _decode_flags(await self._call("renew", " ".join(_name(*run) for run in some), *till))
            active.update(run for run, live in zip(some, answers, strict=True) if live)
        return active

    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        while (answer := await self._call("expired", float(now), limit)) is None:
            pass  # the script removed stale leases and must be called again
        found = await self._read_records(answer)
        return [(owner, record) for (owner, _), record in found if record is not None and not record.final]

    async def prune(self) -> int:
        """Remove the leases of records that Redis has expired; return their number."""
        rank = pruned = 0
        while True:
            seen, gone = await self._call("prune", rank)
            if not seen:
                return pruned
            pruned += gone
            rank += seen - gone

    async def _read_records(self, reply: Sequence[Any]) -> list[tuple[tuple[str, str], Record | None]]:
        """Return owners, ids and records of a script's reply, with None for deleted records.

        Records that exceed the size of one reply are read here, because a script blocks the server.
        """
        names = reply[0].decode().split()
        fields = list(reply[1:])
        while names[len(fields) // 3 :]:
            with anyio.fail_after(_CALL_TIMEOUT):
                pipeline: Any = self._client().pipeline(transaction=False)
                for name in names[len(fields) // 3 :][:_MAX_NAMES]:
                    pipeline.hmget(f"{self._prefix}record:{name}", "head", "state", "body")
                fields += itertools.chain.from_iterable(await pipeline.execute())
        found: list[tuple[tuple[str, str], Record | None]] = []
        for name, head, state, body in zip(names, fields[::3], fields[1::3], fields[2::3], strict=True):
            owner, response_id = _decode_all(":" + name)
            record = None if head is None else _record(response_id, head.decode(), state.decode(), body)
            found.append(((owner, response_id), record))
        return found

    def _fields(self, record: Record) -> tuple[str, str, str, bytes]:
        if record.size > self._max_record_bytes:
            raise StoreError("The response is too large for the server's store. Set 'store' to false.")
        head = (
            "" if record.key is None else _encode(record.key),
            _quote(record.fingerprint),
            "" if record.previous_id is None else _encode(record.previous_id),
            "".join(map(_encode, record.item_ids)),
            record.events,
            str(len(record.input)),
            str(len(record.response)),
        )
        state = f"{record.final:d} {record.cancelled:d} {float(record.lease)!r}"
        return _new_stamp(), " ".join(head), state, b"".join((record.input, record.response, record.request))

    def _check_size(self, data: bytes) -> bytes:
        if len(data) > self._max_record_bytes:
            raise StoreError("The events of the response are too large for the server's store.")
        return data

    async def _call(self, command: str, *args: Any) -> Any:
        client: Any = self._client()  # execute_command is untyped
        args = (0, command, self._prefix, self._ttl, *args)
        with anyio.fail_after(_CALL_TIMEOUT):
            try:
                return await client.execute_command("EVALSHA", _SHA, *args)
            except exceptions.NoScriptError:  # the server was restarted
                return await client.execute_command("EVAL", _SCRIPT, *args)

    def _client(self) -> Redis:
        if not isinstance(self._redis, str):
            return self._redis
        client = self._clients.get(None)
        if client is None:
            self._clients.set(client := _open(self._redis))
        return client


def _open(url: str) -> Redis:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError("RedisStore needs asyncio; use another store on trio") from None
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MAX_CONNECTIONS,
        timeout=_COMMAND_TIMEOUT,
        socket_connect_timeout=_CONNECT_TIMEOUT,
        socket_timeout=_COMMAND_TIMEOUT,
        # No retry after a timeout: the caller has already waited.
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=2, supported_errors=(exceptions.ConnectionError,)),
        retry_on_error=[exceptions.ConnectionError],  # required by redis-py 5
    )
    client = Redis.from_pool(pool)
    _check_client(client)
    return client


def _check_client(client: Any) -> None:
    if not isinstance(client, Redis):
        raise ConfigurationError(f"RedisStore takes a URL or a redis.asyncio.Redis, not {type(client).__name__}")
    if client.connection_pool.connection_kwargs.get("decode_responses"):
        raise ConfigurationError("RedisStore needs a client that returns bytes: leave out decode_responses")


# Encoded text holds no colon and no space; see script.lua.


@lru_cache(maxsize=4096)
def _name(owner: str, response_id: str) -> str:
    return _quote(owner) + _encode(response_id)


def _quote(text: str) -> str:
    return quote(text, "", errors="surrogatepass")


def _encode(text: str) -> str:
    return ":" + _quote(text)


def _decode_all(field: str) -> list[str]:
    return [unquote(text, errors="surrogatepass") for text in field.split(":")[1:]]


def _new_stamp() -> str:
    return os.urandom(8).hex()


def _decode_flags(answers: bytes) -> list[bool]:
    return [answer == ord("1") for answer in answers]


def _record(response_id: str, head: str, state: str, body: bytes) -> Record:
    key, fingerprint, previous, items, events, input_size, response_size = head.split(" ")
    final, cancelled, lease = state.split(" ")
    start, end = int(input_size), int(input_size) + int(response_size)
    return Record(
        id=response_id,
        previous_id=_decode_all(previous)[0] if previous else None,
        input=body[:start],
        response=body[start:end],
        item_ids=tuple(_decode_all(items)),
        final=final == "1",
        events=cast(Literal["logged", "streamed", "none"], events),
        lease=float(lease),
        cancelled=cancelled == "1",
        request=body[end:],
        key=_decode_all(key)[0] if key else None,
        fingerprint=unquote(fingerprint, errors="surrogatepass"),
    )
