"""The store for PostgreSQL and SQLite."""

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

_MAX_ATTEMPTS: Final = 3
"""Attempts before a write that conflicts with another process fails."""

_EXPIRY_TOLERANCE: Final = 0.01
"""Share of the ttl by which an expiry may lag behind the last use, so that reads rarely write."""

_MAX_PRUNED_ROWS: Final = 500
"""Rows that one transaction of `prune` deletes."""

_MAX_RENEWED_RUNS: Final = 5000
"""Runs that one statement renews."""


T = TypeVar("T")
_Args = ParamSpec("_Args")
_Method = Callable[Concatenate["SqlStore", _Args], Coroutine[Any, Any, T]]


class _Piece(NamedTuple):
    owner: str
    response_id: str
    log: Log


def _reads(method: _Method[_Args, T]) -> _Method[_Args, T]:
    """Decorate a reading method: once started, it continues if its caller is cancelled."""

    @functools.wraps(method)
    async def call(self: SqlStore, /, *args: _Args.args, **kwargs: _Args.kwargs) -> T:
        return await self._engines.run_shielded(functools.partial(method, self, *args, **kwargs), writes=False)

    return call


def _writes(method: _Method[_Args, T]) -> _Method[_Args, T]:
    """Decorate a writing method; see `_reads`."""

    @functools.wraps(method)
    async def call(self: SqlStore, /, *args: _Args.args, **kwargs: _Args.kwargs) -> T:
        return await self._engines.run_shielded(functools.partial(method, self, *args, **kwargs), writes=True)

    return call


class SqlStore:
    """A store in PostgreSQL or an SQLite file, for any number of processes.

    `responses-kit store setup URL` or `await store.setup()` creates the tables, and migrates them after an upgrade. A
    conversation expires as a whole: using one of its responses renews all of them. Expired responses are unknown
    immediately, and `prune()` deletes them.

    Requires asyncio. Several event loops may share the store. Before a loop ends, call `aclose()` on it; only
    `asyncio.run` closes the connections by itself.

    Example::

        store = SqlStore("postgresql://user:password@localhost/app")
        kit = ResponsesKit(backend, store=store)

    Args:
        source: A URL, `sqlite:///file.db` or `postgresql://...`, the latter with libpq settings; or an
            `AsyncEngine` with its own timeouts and pool, which the caller disposes of.
        ttl: Seconds from the last use of a conversation until it expires.
        log_ttl: Seconds from the end of a response until its log expires.
        max_records: Records that `prune()` leaves; the least recently used conversations are deleted first.
        max_record_bytes: Maximum bytes of a record, and of one append to its log.
        clock: Seconds since the epoch, the same for all processes.

    Raises:
        ConfigurationError: The URL is not valid, or names an unsupported database.
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
        """Create or migrate the tables. Idempotent, and safe when several processes do it at once.

        Raises:
            ConfigurationError: The tables belong to a newer version of responses-kit.
        """
        await self._engines.setup()

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self._appends.drain()
        await self._engines.aclose()

    @_writes
    async def create(self, owner: str, record: Record) -> Record | None:
        self._check_size(record.size)
        for _ in range(_MAX_ATTEMPTS):
            try:
                return await self._create(owner, record)
            except IntegrityError:  # a concurrent create; the message holds ids
                continue
        raise StoreError("A response with this id or key is being saved by another request. Try again.")

    async def _create(self, owner: str, record: Record) -> Record | None:
        now = self._clock()
        at, root, key = encode_key(owner), encode_key(record.id), None if record.key is None else encode_key(record.key)
        async with self._engines.transaction() as connection:
            if key is not None:
                holder = {"the_owner": at, "the_key": key, "now": now}
                if (row := (await connection.execute(sql.BY_KEY, holder)).first()) is not None:
                    await self._renew_conversations(connection, now, row)
                    return _record(row)
                await connection.execute(sql.FREE_KEY, holder)  # of an expired record
            continued = None
            if record.previous_id is not None:
                previous = {"the_owner": at, "the_id": encode_key(record.previous_id), "now": now}
                continued = (
                    await connection.execute(sql.RENEW_CONVERSATION, {**previous, "until": now + self._ttl})
                ).scalar()
            row_of = {
                **self._columns(record, now),
                "owner": at,
                "id": root,
                "root": continued or root,
                "key": key,
                "head": json.dumps([owner, record.id, record.key, record.fingerprint]),
                "created": now,
            }
            await connection.execute(sql.CREATE, row_of)
            if continued is None:
                conversation = {"owner": at, "root": root, "expires": now + self._ttl}
                await connection.execute(sql.START_CONVERSATION[connection.dialect.name], conversation)
            await _insert_items(connection, at, root, record.item_ids)
        return None

    @_writes
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        self._check_size(record.size)
        if log is not None:
            self._check_size(len(log.data))
        now = self._clock()
        at, name = encode_key(owner), encode_key(record.id)
        that = {"the_owner": at, "the_id": name}
        async with self._engines.transaction() as connection:
            row = (await connection.execute(sql.LOCK, {**that, "now": now})).first()
            if row is None or row.final:
                return False
            if log is not None:
                piece = {"the_start": log.start, "the_count": log.count, "the_data": log.data}
                if (await connection.execute(sql.APPEND_AT_END, {**that, **piece})).first() is None:
                    return False
            new = {f"new_{column}": value for column, value in self._columns(record, now).items()}
            await connection.execute(sql.REPLACE, {**that, **new})
            _, old = json.loads(row.names)
            before, after = set(old), set(record.item_ids)
            if removed := before - after:
                which = {"the_id": name, "pairs": sql.as_pairs((at, encode_key(item_id)) for item_id in removed)}
                await connection.execute(sql.DELETE_ITEMS, which)
            await _insert_items(connection, at, name, after - before)
            await self._renew_conversations(connection, now, row)
        return True

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        self._check_size(len(log.data))
        return await self._appends.submit(_Piece(encode_key(owner), encode_key(response_id), log))

    async def _append_all(self, pieces: Sequence[_Piece]) -> list[bool]:
        for _ in range(_MAX_ATTEMPTS):
            try:
                return await self._append_once(pieces)
            except IntegrityError:  # another process appended at the same position between the read and the write
                continue
        raise StoreError("Another process is writing the events of this response. Try again.")

    async def _append_once(self, pieces: Sequence[_Piece]) -> list[bool]:
        if len(pieces) == 1 and not self._engines.sqlite:
            return [await self._append_single(*pieces)]
        pairs = sql.as_pairs({(owner, response_id): None for owner, response_id, _ in pieces})
        done, new = [], []
        async with self._engines.transaction() as connection:
            rows = (await connection.execute(sql.LOCK_LOGS, {"pairs": pairs})).all()
            ends = {(owner, response_id): end for owner, response_id, end in rows}
            for owner, response_id, log in pieces:
                is_next = ends.get((owner, response_id)) == log.start
                done.append(is_next)
                if is_next:
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

    async def _append_single(self, piece: _Piece) -> bool:
        owner, response_id, log = piece
        that = {"the_owner": owner, "the_id": response_id}
        async with self._engines.statement() as connection:
            row = {**that, "the_start": log.start, "the_count": log.count, "the_data": log.data}
            return (await connection.execute(sql.APPEND_SINGLE, row)).first() is not None

    @_reads
    async def get(self, owner: str, response_id: str) -> Record | None:
        records = await self._read_records(sql.GET, {"the_owner": encode_key(owner), "the_id": encode_key(response_id)})
        return records[0] if records else None

    @_reads
    async def find(self, owner: str, key: str) -> Record | None:
        records = await self._read_records(sql.BY_KEY, {"the_owner": encode_key(owner), "the_key": encode_key(key)})
        return records[0] if records else None

    @_reads
    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        now = self._clock()
        where = {"the_owner": encode_key(owner), "the_id": encode_key(response_id), "next": after + 1, "now": now}
        async with self._engines.statement() as connection:
            rows = (await connection.execute(sql.READ_LOG, where)).all()
        await self._renew_conversations_if_stale(now, rows)
        if not rows:
            return None
        return [Log(row.start, row.events, row.data) for row in rows if row.start is not None]

    @_reads
    async def chain(self, owner: str, response_id: str) -> list[Record]:
        found = await self._read_records(sql.CHAIN, {"the_owner": encode_key(owner), "the_id": encode_key(response_id)})
        by_id = {record.id: record for record in found}
        records: list[Record] = []
        following: str | None = response_id
        while following is not None and (record := by_id.pop(following, None)) is not None:
            records.append(record)
            following = record.previous_id
        records.reverse()
        return records

    @_reads
    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        if not item_ids:
            return {}
        at, wanted = encode_key(owner), set(item_ids)
        pairs = sql.as_pairs((at, encode_key(item_id)) for item_id in wanted)
        found: dict[str, Record] = {}
        for record in await self._read_records(sql.HOLDERS, {"the_owner": at, "pairs": pairs}):
            for item_id in wanted.intersection(record.item_ids):
                found[item_id] = record
        return found

    @_writes
    async def delete(self, owner: str, response_id: str) -> bool:
        that = {"the_owner": encode_key(owner), "the_id": encode_key(response_id)}
        async with self._engines.transaction() as connection:
            if (await connection.execute(sql.LOCK, {**that, "now": self._clock()})).first() is None:
                return False
            await _delete_records(connection, [(that["the_owner"], that["the_id"])])
        return True

    @_writes
    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        that = {"the_owner": encode_key(owner), "the_id": encode_key(response_id), "until": until, "now": self._clock()}
        async with self._engines.transaction() as connection:
            return (await connection.execute(sql.CANCEL, that)).rowcount > 0

    @_writes
    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        by_key = {(encode_key(owner), encode_key(response_id)): (owner, response_id) for owner, response_id in runs}
        keys, now = [*by_key], self._clock()
        alive: set[tuple[str, str]] = set()
        for first in range(0, len(keys), _MAX_RENEWED_RUNS):
            given = {"pairs": sql.as_pairs(keys[first : first + _MAX_RENEWED_RUNS]), "now": now}
            if until is None:
                async with self._engines.statement() as connection:
                    rows = (await connection.execute(sql.IN_PROGRESS, given)).all()
            else:
                async with self._engines.transaction() as connection:
                    rows = (await connection.execute(sql.LOCK_IN_PROGRESS, given)).all()
                    renewed = {"pairs": sql.as_pairs((row.owner, row.id) for row in rows), "until": until}
                    await connection.execute(sql.RENEW, renewed)
                    await self._renew_conversations(connection, now, *rows)
            alive.update(by_key[row.owner, row.id] for row in rows)
        return alive

    @_reads
    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        overdue = {"until": now, "most": limit, "now": self._clock()}
        async with self._engines.statement() as connection:
            rows = (await connection.execute(sql.ORPHANED, overdue)).all()
        return [(json.loads(row.head)[0], _record(row)) for row in rows]

    async def prune(self) -> int:
        now = self._clock()
        while await self._delete_expired_logs(now):
            pass
        deleted = await self._delete_expired(now)
        while self._max_records is not None and await self._expire_oldest(now, self._max_records):
            deleted += await self._delete_expired(now)
        return deleted

    @_writes
    async def _delete_expired_logs(self, now: float) -> int:
        async with self._engines.transaction() as connection:
            rows = (await connection.execute(sql.EXPIRED_LOGS, {"now": now, "most": _MAX_PRUNED_ROWS})).all()
            if rows:
                pairs = {"pairs": sql.as_pairs((row.owner, row.id) for row in rows)}
                await connection.execute(sql.DELETE_LOGS, pairs)
                await connection.execute(sql.CLEAR_LOG_EXPIRY, pairs)
        return len(rows)

    async def _delete_expired(self, now: float) -> int:
        """Delete expired records in several transactions, which is safe because they are invisible."""
        deleted = 0
        while some := await self._delete_expired_records(now):
            deleted += some
        while await self._delete_empty_conversations(now):
            pass
        return deleted

    @_writes
    async def _delete_expired_records(self, now: float) -> int:
        async with self._engines.transaction() as connection:
            rows = (await connection.execute(sql.EXPIRED_RECORDS, {"now": now, "most": _MAX_PRUNED_ROWS})).all()
            await _delete_records(connection, [(row.owner, row.id) for row in rows])
        return len(rows)

    @_writes
    async def _delete_empty_conversations(self, now: float) -> int:
        async with self._engines.transaction() as connection:
            return (
                await connection.execute(sql.DELETE_EMPTY_CONVERSATIONS, {"now": now, "most": _MAX_PRUNED_ROWS})
            ).rowcount

    @_writes
    async def _expire_oldest(self, now: float, most: int) -> bool:
        """Expire the least recently used conversations with the excess records; return whether any were expired."""
        async with self._engines.statement() as connection:
            excess = (await connection.execute(sql.COUNT)).scalar_one() - most
            rows = (
                (await connection.execute(sql.OLDEST_CONVERSATIONS, {"now": now, "most": _MAX_PRUNED_ROWS})).all()
                if excess > 0
                else []
            )
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
            await connection.execute(sql.EXPIRE_CONVERSATIONS, ended)
        return True

    async def _read_records(self, statement: Any, where: dict[str, Any]) -> list[Record]:
        now = self._clock()
        async with self._engines.statement() as connection:
            rows = (await connection.execute(statement, {**where, "now": now})).all()
        await self._renew_conversations_if_stale(now, rows)
        return [_record(row) for row in rows]

    def _stale(self, now: float, rows: Sequence[Any]) -> set[tuple[str, str]]:
        return {(row.owner, row.root) for row in rows if row.expires < now + self._ttl * (1 - _EXPIRY_TOLERANCE)}

    async def _renew_conversations(self, connection: AsyncConnection, now: float, *rows: Any) -> None:
        if stale := self._stale(now, rows):
            touched = {"pairs": sql.as_pairs(stale), "until": now + self._ttl, "now": now}
            await connection.execute(sql.RENEW_CONVERSATIONS, touched)

    async def _renew_conversations_if_stale(self, now: float, rows: Sequence[Any]) -> None:
        if self._stale(now, rows):
            async with self._engines.transaction() as connection:
                await self._renew_conversations(connection, now, *rows)

    def _columns(self, record: Record, now: float) -> dict[str, Any]:
        """Return the columns that an update replaces."""
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

    def _check_size(self, size: int) -> None:
        if size > self._max_record_bytes:
            raise StoreError("The response is too large for the server's store. Set 'store' to false.")


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


async def _insert_items(connection: AsyncConnection, owner: str, response_id: str, item_ids: Collection[str]) -> None:
    if item_ids:
        rows = [{"owner": owner, "item_id": encode_key(item_id), "response_id": response_id} for item_id in {*item_ids}]
        await connection.execute(sql.INSERT_ITEMS, rows)


async def _delete_records(connection: AsyncConnection, pairs: Sequence[tuple[str, str]]) -> None:
    if pairs:
        for statement in sql.DELETE_RECORDS:
            await connection.execute(statement, {"pairs": sql.as_pairs(pairs)})
