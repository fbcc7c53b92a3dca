"""Responses in an SQL database: PostgreSQL, or an SQLite file."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ...errors import StoreError
from ..group_commit import GroupCommit
from ..key_encoding import encode_key
from ..protocol import Log, Record
from . import statements as sql
from .engine import Engines

__all__ = ["SqlStore"]

_TRIES: Final = 3
"""How often what met another process at the same place looks anew."""

_SLACK: Final = 0.01
"""The part of the ttl by which an expiry may lag behind the last use, so that reading seldom writes."""

_AT_ONCE: Final = 500
"""Most records of one transaction that clears away."""

_MOST_RENEWED: Final = 5000
"""Most runs of one statement."""


T = TypeVar("T")
_Args = ParamSpec("_Args")
_Method = Callable[Concatenate["SqlStore", _Args], Coroutine[Any, Any, T]]


class _Piece(NamedTuple):
    owner: str
    response_id: str
    log: Log


def _reading(method: _Method[_Args, T]) -> _Method[_Args, T]:
    """Has a method that has begun go on to its end, whatever becomes of its caller."""

    @functools.wraps(method)
    async def call(self: SqlStore, /, *args: _Args.args, **kwargs: _Args.kwargs) -> T:
        return await self._engines.finish(functools.partial(method, self, *args, **kwargs), writes=False)

    return call


def _writing(method: _Method[_Args, T]) -> _Method[_Args, T]:
    """The same for those that write first of all."""

    @functools.wraps(method)
    async def call(self: SqlStore, /, *args: _Args.args, **kwargs: _Args.kwargs) -> T:
        return await self._engines.finish(functools.partial(method, self, *args, **kwargs), writes=True)

    return call


class SqlStore:
    """Keeps responses in PostgreSQL or in an SQLite file, for any number of processes.

    The tables are made, and brought up to date after an upgrade, by `responses-kit store setup URL` or
    `await store.setup()`. A conversation expires as a whole: using one of its responses keeps all that it continues,
    and all that continues it. What has expired is unknown at once, and `prune()` makes the room free.

    Works on asyncio only, and on as many event loops as you like. Call `aclose()` in each of them at the end; where
    `asyncio.run` ends the loop, its connections are closed anyway.

    Example::

        store = SqlStore("postgresql://user:password@localhost/app")
        kit = ResponsesKit(backend, store=store)

    Args:
        source: A URL, `sqlite:///file.db` or `postgresql://...`, the latter with libpq's settings; or an
            `AsyncEngine`, which is used as it is, with its own timeouts and pool, and is yours to dispose of.
        ttl: Seconds after its last use at which a conversation is gone.
        log_ttl: Seconds after a response's end at which its events are gone.
        max_records: Most records that `prune()` leaves; the least recently used conversations go first.
        max_record_bytes: Most bytes of a record, and of what is appended to its log at once.
        clock: Seconds since the epoch, the same for all processes.

    Raises:
        ConfigurationError: The URL cannot be read or is of another database.
        ImportError: The driver is not installed; the message names the extra.
    """

    def __init__(
        self,
        source: str | AsyncEngine,
        *,
        ttl: float = 30 * 24 * 60 * 60,
        log_ttl: float = 60 * 60,
        max_records: int | None = None,
        max_record_bytes: int = 64 * 1024 * 1024,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engines = Engines(source)
        self._ttl, self._log_ttl, self._clock = ttl, log_ttl, clock
        self._max_records, self._max_record_bytes = max_records, max_record_bytes
        self._appends = GroupCommit(self._append_all, size=lambda piece: len(piece.log.data))

    async def setup(self) -> None:
        """Creates the tables, or brings them up to date. Does no harm where they are, nor where others do the same.

        Raises:
            ConfigurationError: The tables are of a newer version of responses-kit.
        """
        await self._engines.setup()

    async def aclose(self) -> None:
        """Closes this event loop's connections."""
        await self._appends.drain()
        await self._engines.aclose()

    @_writing
    async def create(self, owner: str, record: Record) -> Record | None:
        self._admit(record.size)
        for _ in range(_TRIES):
            try:
                return await self._create(owner, record)
            except IntegrityError:  # by somebody who came at the same time; its message has the ids
                continue
        raise StoreError("A response with this id, or for the same key, is being kept already. Try again.")

    async def _create(self, owner: str, record: Record) -> Record | None:
        now = self._clock()
        at, root, key = encode_key(owner), encode_key(record.id), None if record.key is None else encode_key(record.key)
        async with self._engines.transaction() as connection:
            if key is not None:
                holder = {"the_owner": at, "the_key": key, "now": now}
                if (row := (await connection.execute(sql.BY_KEY, holder)).first()) is not None:
                    await self._touch(connection, now, row)
                    return _record(row)
                await connection.execute(sql.FREE_KEY, holder)  # of what has expired
            continued = None
            if record.previous_id is not None:
                previous = {"the_owner": at, "the_id": encode_key(record.previous_id), "now": now}
                continued = (await connection.execute(sql.CONTINUE, {**previous, "until": now + self._ttl})).scalar()
            row_of = {
                **self._row(record, now),
                "owner": at,
                "id": root,
                "root": continued or root,
                "key": key,
                "head": json.dumps([owner, record.id, record.key, record.fingerprint]),
                "created": now,
            }
            await connection.execute(sql.CREATE, row_of)
            if continued is None:
                begun = {"owner": at, "root": root, "expires": now + self._ttl}
                await connection.execute(sql.BEGIN[connection.dialect.name], begun)
            await _hold(connection, at, root, record.item_ids)
        return None

    @_writing
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        self._admit(record.size)
        if log is not None:
            self._admit(len(log.data))
        now = self._clock()
        at, name = encode_key(owner), encode_key(record.id)
        that = {"the_owner": at, "the_id": name}
        async with self._engines.transaction() as connection:
            row = (await connection.execute(sql.LOCK, {**that, "now": now})).first()
            if row is None or row.final:
                return False
            if log is not None:
                piece = {"the_start": log.start, "the_count": log.count, "the_data": log.data}
                if (await connection.execute(sql.APPEND_AT_THE_END, {**that, **piece})).first() is None:
                    return False
            new = {f"new_{column}": value for column, value in self._row(record, now).items()}
            await connection.execute(sql.REPLACE, {**that, **new})
            _, old = json.loads(row.names)
            before, after = set(old), set(record.item_ids)
            if gone := before - after:
                which = {"the_id": name, "pairs": sql.as_pairs((at, encode_key(item_id)) for item_id in gone)}
                await connection.execute(sql.LET_ITEMS_GO, which)
            await _hold(connection, at, name, after - before)
            await self._touch(connection, now, row)
        return True

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        self._admit(len(log.data))
        return await self._appends.submit(_Piece(encode_key(owner), encode_key(response_id), log))

    async def _append_all(self, pieces: Sequence[_Piece]) -> list[bool]:
        for _ in range(_TRIES):
            try:
                return await self._append_once(pieces)
            except IntegrityError:  # another process appended at the same place between our looking and our writing
                continue
        raise StoreError("Others write the same response's events at the same time. Try again.")

    async def _append_once(self, pieces: Sequence[_Piece]) -> list[bool]:
        if len(pieces) == 1 and not self._engines.sqlite:
            return [await self._append_alone(*pieces)]
        pairs = sql.as_pairs({(owner, response_id): None for owner, response_id, _ in pieces})
        done, new = [], []
        async with self._engines.transaction() as connection:
            rows = (await connection.execute(sql.LOCK_LOGS, {"pairs": pairs})).all()
            ends = {(owner, response_id): end for owner, response_id, end in rows}
            for owner, response_id, log in pieces:
                goes_on = ends.get((owner, response_id)) == log.start
                done.append(goes_on)
                if goes_on:
                    ends[owner, response_id] = log.end
                    new.append(
                        {
                            "owner": owner,
                            "response_id": response_id,
                            "start": log.start,
                            "count": log.count,
                            "data": log.data,
                        }
                    )
            if new:
                await connection.execute(sql.APPEND, new)
        return done

    async def _append_alone(self, piece: _Piece) -> bool:
        owner, response_id, log = piece
        that = {"the_owner": owner, "the_id": response_id}
        async with self._engines.alone() as connection:
            row = {**that, "the_start": log.start, "the_count": log.count, "the_data": log.data}
            return (await connection.execute(sql.APPEND_ALONE, row)).first() is not None

    @_reading
    async def get(self, owner: str, response_id: str) -> Record | None:
        records = await self._records(sql.GET, {"the_owner": encode_key(owner), "the_id": encode_key(response_id)})
        return records[0] if records else None

    @_reading
    async def find(self, owner: str, key: str) -> Record | None:
        records = await self._records(sql.BY_KEY, {"the_owner": encode_key(owner), "the_key": encode_key(key)})
        return records[0] if records else None

    @_reading
    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        now = self._clock()
        where = {"the_owner": encode_key(owner), "the_id": encode_key(response_id), "next": after + 1, "now": now}
        async with self._engines.alone() as connection:
            rows = (await connection.execute(sql.READ_LOG, where)).all()
        await self._touch_later(now, rows)
        if not rows:
            return None
        return [Log(row.start, row.events, row.data) for row in rows if row.start is not None]

    @_reading
    async def chain(self, owner: str, response_id: str) -> list[Record]:
        found = await self._records(sql.CHAIN, {"the_owner": encode_key(owner), "the_id": encode_key(response_id)})
        by_id = {record.id: record for record in found}
        records: list[Record] = []
        following: str | None = response_id
        while following is not None and (record := by_id.pop(following, None)) is not None:
            records.append(record)
            following = record.previous_id
        records.reverse()
        return records

    @_reading
    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        if not item_ids:
            return {}
        at, wanted = encode_key(owner), set(item_ids)
        pairs = sql.as_pairs((at, encode_key(item_id)) for item_id in wanted)
        found: dict[str, Record] = {}
        for record in await self._records(sql.HOLDERS, {"the_owner": at, "pairs": pairs}):
            for item_id in wanted.intersection(record.item_ids):
                found[item_id] = record
        return found

    @_writing
    async def delete(self, owner: str, response_id: str) -> bool:
        that = {"the_owner": encode_key(owner), "the_id": encode_key(response_id)}
        async with self._engines.transaction() as connection:
            if (await connection.execute(sql.LOCK, {**that, "now": self._clock()})).first() is None:
                return False
            await _forget(connection, [(that["the_owner"], that["the_id"])])
        return True

    @_writing
    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        that = {"the_owner": encode_key(owner), "the_id": encode_key(response_id), "until": until, "now": self._clock()}
        async with self._engines.transaction() as connection:
            return (await connection.execute(sql.CANCEL, that)).rowcount > 0

    @_writing
    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        by_key = {(encode_key(owner), encode_key(response_id)): (owner, response_id) for owner, response_id in runs}
        keys, now = [*by_key], self._clock()
        alive: set[tuple[str, str]] = set()
        for first in range(0, len(keys), _MOST_RENEWED):
            given = {"pairs": sql.as_pairs(keys[first : first + _MOST_RENEWED]), "now": now}
            if until is None:
                async with self._engines.alone() as connection:
                    rows = (await connection.execute(sql.AT_WORK, given)).all()
            else:
                async with self._engines.transaction() as connection:
                    rows = (await connection.execute(sql.LOCK_AT_WORK, given)).all()
                    renewed = {"pairs": sql.as_pairs((row.owner, row.id) for row in rows), "until": until}
                    await connection.execute(sql.RENEW, renewed)
                    await self._touch(connection, now, *rows)
            alive.update(by_key[row.owner, row.id] for row in rows)
        return alive

    @_reading
    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        overdue = {"until": now, "most": limit, "now": self._clock()}
        async with self._engines.alone() as connection:
            rows = (await connection.execute(sql.OVERDUE, overdue)).all()
        return [(json.loads(row.head)[0], _record(row)) for row in rows]

    async def prune(self) -> int:
        now = self._clock()
        while await self._drop_logs(now):
            pass
        gone = await self._sweep(now)
        while self._max_records is not None and await self._end_oldest(now, self._max_records):
            gone += await self._sweep(now)
        return gone

    @_writing
    async def _drop_logs(self, now: float) -> int:
        async with self._engines.transaction() as connection:
            rows = (await connection.execute(sql.LOGGED, {"now": now, "most": _AT_ONCE})).all()
            if rows:
                pairs = {"pairs": sql.as_pairs((row.owner, row.id) for row in rows)}
                await connection.execute(sql.FORGET_LOGS, pairs)
                await connection.execute(sql.UNLOG, pairs)
        return len(rows)

    async def _sweep(self, now: float) -> int:
        """Clears away what has expired; nobody sees any of it, so that it may go piece by piece."""
        gone = 0
        while some := await self._drop_dead(now):
            gone += some
        while await self._drop_empty(now):
            pass
        return gone

    @_writing
    async def _drop_dead(self, now: float) -> int:
        async with self._engines.transaction() as connection:
            rows = (await connection.execute(sql.DEAD, {"now": now, "most": _AT_ONCE})).all()
            await _forget(connection, [(row.owner, row.id) for row in rows])
        return len(rows)

    @_writing
    async def _drop_empty(self, now: float) -> int:
        async with self._engines.transaction() as connection:
            return (await connection.execute(sql.FORGET_EMPTY, {"now": now, "most": _AT_ONCE})).rowcount

    @_writing
    async def _end_oldest(self, now: float, most: int) -> bool:
        """Lets the least recently used conversations expire, as many as hold the records that are too many."""
        async with self._engines.alone() as connection:
            excess = (await connection.execute(sql.COUNT)).scalar_one() - most
            rows = (await connection.execute(sql.OLDEST, {"now": now, "most": _AT_ONCE})).all() if excess > 0 else []
        last = None
        for row in rows:
            last = row
            excess -= row.held
            if excess <= 0:
                break
        if last is None:
            return False
        ended = {"until": last.expires, "the_owner": last.owner, "the_root": last.root, "now": now}
        async with self._engines.transaction() as connection:
            await connection.execute(sql.END, ended)
        return True

    async def _records(self, statement: Any, where: dict[str, Any]) -> list[Record]:
        now = self._clock()
        async with self._engines.alone() as connection:
            rows = (await connection.execute(statement, {**where, "now": now})).all()
        await self._touch_later(now, rows)
        return [_record(row) for row in rows]

    def _stale(self, now: float, rows: Sequence[Any]) -> set[tuple[str, str]]:
        return {(row.owner, row.root) for row in rows if row.expires < now + self._ttl * (1 - _SLACK)}

    async def _touch(self, connection: AsyncConnection, now: float, *rows: Any) -> None:
        if stale := self._stale(now, rows):
            touched = {"pairs": sql.as_pairs(stale), "until": now + self._ttl, "now": now}
            await connection.execute(sql.TOUCH, touched)

    async def _touch_later(self, now: float, rows: Sequence[Any]) -> None:
        if self._stale(now, rows):
            async with self._engines.transaction() as connection:
                await self._touch(connection, now, *rows)

    def _row(self, record: Record, now: float) -> dict[str, Any]:
        """The columns that an update replaces."""
        return {
            "previous": None if record.previous_id is None else encode_key(record.previous_id),
            "names": json.dumps([record.previous_id, record.item_ids]),
            "final": record.final,
            "cancelled": record.cancelled,
            "lease": record.lease,
            "logged_until": now + self._log_ttl if record.final else None,
            "events": record.events,
            "input": record.input,
            "response": record.response,
            "request": record.request,
        }

    def _admit(self, size: int) -> None:
        if size > self._max_record_bytes:
            raise StoreError("The response is larger than the server's store takes. Send store: false.")


def _record(row: Any) -> Record:
    _, response_id, key, fingerprint = json.loads(row.head)
    previous_id, item_ids = json.loads(row.names)
    return Record(
        id=response_id,
        previous_id=previous_id,
        input=row.input,
        response=row.response,
        item_ids=tuple(item_ids),
        final=row.final,
        events=row.events,
        lease=row.lease,
        cancelled=row.cancelled,
        request=row.request,
        key=key,
        fingerprint=fingerprint,
    )


async def _hold(connection: AsyncConnection, owner: str, response_id: str, item_ids: Collection[str]) -> None:
    if item_ids:
        rows = [{"owner": owner, "item_id": encode_key(item_id), "response_id": response_id} for item_id in {*item_ids}]
        await connection.execute(sql.HOLD_ITEMS, rows)


async def _forget(connection: AsyncConnection, pairs: Sequence[tuple[str, str]]) -> None:
    if pairs:
        for statement in sql.FORGET:
            await connection.execute(statement, {"pairs": sql.as_pairs(pairs)})
