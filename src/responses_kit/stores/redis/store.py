"""Responses in Redis: shared by many processes, each gone once it was not used for some time."""

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

_VERSION: Final = (6, 2)

_MOST_CONNECTIONS, _CONNECT_SECONDS, _COMMAND_SECONDS, _MOST_SECONDS = 32, 5, 10, 30
"""Of an event loop; for a connection; for a command, and to wait for a free connection; for all that a call does."""

_MOST_NAMES: Final = 1000
"""Records that are asked for at once."""

_LAST: Final = 2**63
"""No event has this number."""

_NUMBERS = itertools.count()


class RedisStore:
    """Keeps responses in one Redis, 6.2 or newer, or whatever speaks its language and runs its scripts.

    Using a response uses the whole chain that it continues, so a living conversation stays whole. Writes that a broken
    connection left in doubt are sent again, and done once.

    Redis has to keep what it was given: `maxmemory-policy noeviction`, and on disk if responses shall outlive it. Redis
    Cluster is not supported, for a step touches several keys; Sentinel is: give it `Sentinel(...).master_for(...)`.
    It needs asyncio.

    Example::

        store = RedisStore("redis://:password@redis.example.com/0")
        await store.setup()                              # at the start, to fail there if it has to
        kit = ResponsesKit(backend, store=store)
        await store.aclose()                             # at the end

    Args:
        redis: A URL: `redis://`, `rediss://` or `unix://`, with the options that redis-py knows. Each event loop
            connects when it needs to. Or a client, which is used as it is, belongs to the event loop that it is used
            on, and is not closed.
        prefix: What the names of all keys begin with.
        ttl: Seconds after its last use at which a response is gone, or a sixteenth of that sooner.
        log_ttl: Seconds after its end for which the events of a response are kept; `ttl` at most.
        max_record_bytes: Largest record, and largest piece of a log.

    Raises:
        ConfigurationError: The URL is none, or the client is not one of `redis.asyncio` that gives bytes.
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
                # Its message may hold what stands where the port should: the rest of a password.
                raise ConfigurationError(
                    "the URL of Redis cannot be read; it looks like redis://user:password@host:6379/0, and what is "
                    "no letter or digit in the password is percent-encoded"
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
        """Checks that Redis answers and can be used. There is nothing to create.

        Raises:
            ConfigurationError: It is too old, or a cluster.
            redis.RedisError: It cannot be reached, or refuses us.
            TimeoutError: It does not answer.
        """
        with anyio.fail_after(_MOST_SECONDS):
            info = await self._client().info("server")
        version = str(info["redis_version"])
        if tuple(map(int, version.split(".")[:2])) < _VERSION:
            needed = ".".join(map(str, _VERSION))
            raise ConfigurationError(f"RedisStore needs Redis {needed} or newer, and this is {version}")
        if info.get("redis_mode") == "cluster":
            raise ConfigurationError("RedisStore cannot use Redis Cluster: give it one Redis, or Sentinel's master")

    async def aclose(self) -> None:
        """Closes the connections of this event loop. The next call would open new ones."""
        await self._appends.drain()
        client = self._clients.get(None)
        if client is not None:
            self._clients.set(None)
            await client.aclose()

    async def create(self, owner: str, record: Record) -> Record | None:
        name, fields = _name(owner, record.id), self._fields(record)
        while isinstance(answer := await self._call("create", name, *fields), list):
            [(_, other)] = await self._found(answer)
            if other is not None:
                return other  # else it was deleted since, and the key is free
        if not answer:
            raise StoreError("A response with this id exists already.")
        return None

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        piece = () if log is None else (log.start, log.end, self._checked(log.data))
        fields = (*self._fields(record), self._log_ttl, *piece)
        return bool(await self._call("update", _name(owner, record.id), *fields))

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        data = self._checked(log.data)
        place = f"{_name(owner, response_id)} {_stamp()} {log.start} {log.end} {len(data)}\n"
        return await self._appends.submit((place, data))

    async def _append(self, appends: Sequence[tuple[str, bytes]]) -> Sequence[bool]:
        # Two arguments for them all, for each argument costs as much as all the rest of an append.
        places, data = zip(*appends, strict=True)
        return _yes(await self._call("append", "".join(places), b"".join(data)))

    async def get(self, owner: str, response_id: str) -> Record | None:
        [(_, record)] = await self._found(await self._call("get", _name(owner, response_id)))
        return record

    async def find(self, owner: str, key: str) -> Record | None:
        answer = await self._call("find", _quote(owner), _text(key))
        if answer is None:
            return None
        [(_, record)] = await self._found(answer)
        return record

    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        name = _name(owner, response_id)
        pieces: list[Log] = []
        following, end = max(after, -1) + 1, None
        while end is None or following < end:
            reply = await self._call("events", name, min(following + 1, _LAST))
            if reply is None:
                return None
            stop, *places = reply[0].split(b"\n")
            end = int(stop) if end is None else end  # as it was at first, for it may grow faster than it is read
            if not places and following < end:
                return None
            for place, data in zip(places, reply[1:], strict=True):
                start, past = map(int, place.split())
                if start > following:
                    return None  # its beginning has expired
                pieces.append(Log(start, past - start, data))
                following = past
        return pieces

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        records: dict[str, Record] = {}
        following: str | None = response_id
        while following is not None and following not in records:
            reply = await self._call("chain", _name(owner, following))  # all, but of a very long one the last thousand
            following = None
            for _, record in await self._found(reply):
                if record is None or record.id in records:
                    break  # deleted since, or a circle
                records[record.id] = record
                following = record.previous_id
        return list(reversed(records.values()))

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        wanted = list(dict.fromkeys(item_ids))
        if not wanted:
            return {}
        holders, *reply = await self._call("items", _quote(owner), "".join(map(_text, wanted)))
        records = {_name(*of): record for of, record in await self._found(reply)}
        found = zip(wanted, holders.decode().split(" "), strict=True)
        return {item_id: record for item_id, name in found if (record := records.get(name)) is not None}

    async def delete(self, owner: str, response_id: str) -> bool:
        return bool(await self._call("delete", _name(owner, response_id)))

    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        return bool(await self._call("cancel", _name(owner, response_id), float(until)))

    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        till = () if until is None else (float(until),)
        asked, left = list(runs), set[tuple[str, str]]()
        for first in range(0, len(asked), _MOST_NAMES):
            some = asked[first : first + _MOST_NAMES]
            answers = _yes(await self._call("renew", " ".join(_name(*run) for run in some), *till))
            left.update(run for run, live in zip(some, answers, strict=True) if live)
        return left

    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        while (answer := await self._call("expired", float(now), limit)) is None:
            pass  # it has cleared away many that are gone, and may not have come to the others
        found = await self._found(answer)
        return [(owner, record) for (owner, _), record in found if record is not None and not record.final]

    async def prune(self) -> int:
        """Redis itself removes what has expired; here goes what still says that somebody is at work on it."""
        rank = pruned = 0
        while True:
            seen, gone = await self._call("prune", rank)
            if not seen:
                return pruned
            pruned += gone
            rank += seen - gone

    async def _found(self, reply: Sequence[Any]) -> list[tuple[tuple[str, str], Record | None]]:
        """Owners and ids, and records or None for those that are gone: from their names and what was read with them.

        What was too much for a script, which nobody can come between, is read here.
        """
        names = reply[0].decode().split()
        fields = list(reply[1:])
        while names[len(fields) // 3 :]:
            with anyio.fail_after(_MOST_SECONDS):
                pipeline: Any = self._client().pipeline(transaction=False)
                for name in names[len(fields) // 3 :][:_MOST_NAMES]:
                    pipeline.hmget(f"{self._prefix}record:{name}", "head", "state", "body")
                fields += itertools.chain.from_iterable(await pipeline.execute())
        found: list[tuple[tuple[str, str], Record | None]] = []
        for name, head, state, body in zip(names, fields[::3], fields[1::3], fields[2::3], strict=True):
            owner, response_id = _texts(":" + name)
            record = None if head is None else _record(response_id, head.decode(), state.decode(), body)
            found.append(((owner, response_id), record))
        return found

    def _fields(self, record: Record) -> tuple[str, str, str, bytes]:
        if record.size > self._max_record_bytes:
            raise StoreError("The response is larger than the server's store takes. Send store: false.")
        head = (
            "" if record.key is None else _text(record.key),
            _quote(record.fingerprint),
            "" if record.previous_id is None else _text(record.previous_id),
            "".join(map(_text, record.item_ids)),
            record.events,
            str(len(record.input)),
            str(len(record.response)),
        )
        state = f"{record.final:d} {record.cancelled:d} {float(record.lease)!r}"
        return _stamp(), " ".join(head), state, b"".join((record.input, record.response, record.request))

    def _checked(self, data: bytes) -> bytes:
        if len(data) > self._max_record_bytes:
            raise StoreError("The events of the response are larger than the server's store takes.")
        return data

    async def _call(self, command: str, *args: Any) -> Any:
        client: Any = self._client()  # whose execute_command has no types
        args = (0, command, self._prefix, self._ttl, *args)
        with anyio.fail_after(_MOST_SECONDS):
            try:
                return await client.execute_command("EVALSHA", _SHA, *args)
            except exceptions.NoScriptError:  # it was started anew
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
        raise ConfigurationError("RedisStore needs asyncio; on trio, use another store") from None
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MOST_CONNECTIONS,
        timeout=_COMMAND_SECONDS,
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_COMMAND_SECONDS,
        # Not where there was no answer in time: who waits has waited enough.
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=2, supported_errors=(exceptions.ConnectionError,)),
        retry_on_error=[exceptions.ConnectionError],  # says it again, for redis-py 5
    )
    client = Redis.from_pool(pool)
    _check_client(client)
    return client


def _check_client(client: Any) -> None:
    if not isinstance(client, Redis):
        raise ConfigurationError(f"RedisStore takes a URL or a redis.asyncio.Redis, not {type(client).__name__}")
    if client.connection_pool.connection_kwargs.get("decode_responses"):
        raise ConfigurationError("RedisStore needs a client that gives bytes: leave decode_responses out, or False")


# Text has no colon and no space on its way; see script.lua.


@lru_cache(maxsize=4096)
def _name(owner: str, response_id: str) -> str:
    return _quote(owner) + _text(response_id)


def _quote(text: str) -> str:
    return quote(text, "", errors="surrogatepass")


def _text(text: str) -> str:
    return ":" + _quote(text)


def _texts(field: str) -> list[str]:
    return [unquote(text, errors="surrogatepass") for text in field.split(":")[1:]]


def _stamp() -> str:
    return os.urandom(8).hex()


def _yes(answers: bytes) -> list[bool]:
    return [answer == ord("1") for answer in answers]


def _record(response_id: str, head: str, state: str, body: bytes) -> Record:
    key, fingerprint, previous, items, events, input_size, response_size = head.split(" ")
    final, cancelled, lease = state.split(" ")
    start, end = int(input_size), int(input_size) + int(response_size)
    return Record(
        id=response_id,
        previous_id=_texts(previous)[0] if previous else None,
        input=body[:start],
        response=body[start:end],
        item_ids=tuple(_texts(items)),
        final=final == "1",
        events=cast(Literal["kept", "told", "none"], events),
        lease=float(lease),
        cancelled=cancelled == "1",
        request=body[end:],
        key=_texts(key)[0] if key else None,
        fingerprint=unquote(fingerprint, errors="surrogatepass"),
    )
