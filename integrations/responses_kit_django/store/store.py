"""Responses in a database of the Django project, by its ORM."""
# what a protocol's methods do is said at the protocol

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, ParamSpec, TypeVar

from django.db import Error, router

from responses_kit.errors import StoreError
from responses_kit.stores.group_commit import GroupCommit
from responses_kit.stores.key_encoding import encode_key
from responses_kit.stores.protocol import Log, Record

from ..models import Response
from . import pruning
from .database import check_tables, told, vendor_of, was_undone
from .queries import Addition, Queries
from .threads import Threads, running_loop

__all__ = ["OrmStore"]

_MOST_RENEWED: Final = 5000
"""Most runs of one statement."""

_TRIES: Final = 3
"""How often what others' transactions have got in the way of is done anew."""

T = TypeVar("T")
_Args = ParamSpec("_Args")


class OrmStore:
    """Keeps responses in a database of the Django project, PostgreSQL or SQLite, for any number of processes.

    Its tables are models of the app `responses_kit_django`: `manage.py migrate` makes them, and brings them up to date
    after an upgrade. A conversation expires as a whole: using one of its responses keeps all that it continues, and
    all that continues it. What has expired is unknown at once, and `prune()` makes the room free.

    Works on asyncio only, and on as many event loops as you like. The ORM is used in threads of the store's own, each
    with a connection of its own: what a request's own transaction has not committed is not seen. Call `aclose()` at
    the end; threads and connections that have nothing to do go by themselves, too.

    Example::

        store = OrmStore()
        kit = ResponsesKit(backend, store=store)

    Args:
        using: The database's alias. None is the one that the project's routers write responses to; they are read from
            there, too, as a replica may not have them yet.
        ttl: Seconds after its last use at which a conversation is gone.
        log_ttl: Seconds after a response's end at which its events are gone.
        max_records: Most records that `prune()` leaves; the least recently used conversations go first.
        max_record_bytes: Most bytes of a record, and of what is appended to its log at once.
        threads: Most threads, and with them connections, in one process; on SQLite it is one.
        clock: Seconds since the epoch, the same for all processes.

    Raises:
        ConfigurationError: There is no such database, or it cannot be used for this.
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        ttl: float = 30 * 24 * 60 * 60,
        log_ttl: float = 60 * 60,
        max_records: int | None = None,
        max_record_bytes: int = 64 * 1024 * 1024,
        threads: int = 10,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._using = router.db_for_write(Response) if using is None else using
        vendor = vendor_of(self._using)
        self._queries = Queries(self._using, vendor, ttl=ttl, log_ttl=log_ttl, clock=clock)
        self._clock, self._max_records, self._max_record_bytes = clock, max_records, max_record_bytes
        # One writes at a time there anyway: in a queue here rather than by SQLite's own waiting, which knows no order.
        self._threads = Threads(self._using, 1 if vendor == "sqlite" else max(1, threads))
        self._appends = GroupCommit(self._append_all, size=lambda addition: len(addition.log.data))

    async def setup(self) -> None:
        """Looks whether the tables are there and up to date.

        Raises:
            ConfigurationError: They are not.
        """
        await self._run(check_tables, self._using)

    async def aclose(self) -> None:
        """Waits for what this event loop has begun, and closes the connections that are idle then."""
        await self._appends.drain()
        await self._threads.aclose()

    async def create(self, owner: str, record: Record) -> Record | None:
        self._admit(record.size)
        return await self._run(self._queries.create, owner, record)

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        self._admit(record.size)
        if log is not None:
            self._admit(len(log.data))
        return await self._run(self._queries.update, encode_key(owner), record, log)

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        running_loop()  # or else it would not be told what is missing
        self._admit(len(log.data))
        return await self._appends.submit(Addition(encode_key(owner), encode_key(response_id), log))

    async def _append_all(self, additions: Sequence[Addition]) -> list[bool]:
        return await self._run(self._queries.append, additions)

    async def get(self, owner: str, response_id: str) -> Record | None:
        return await self._run(self._queries.find, owner=encode_key(owner), response_id=encode_key(response_id))

    async def find(self, owner: str, key: str) -> Record | None:
        return await self._run(self._queries.find, owner=encode_key(owner), key=encode_key(key))

    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        return await self._run(self._queries.events, encode_key(owner), encode_key(response_id), after)

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        return await self._run(self._queries.chain, encode_key(owner), response_id)

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        return await self._run(self._queries.items, encode_key(owner), {*item_ids}) if item_ids else {}

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._run(self._queries.delete, encode_key(owner), encode_key(response_id))

    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        return await self._run(self._queries.cancel, encode_key(owner), encode_key(response_id), until)

    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        by_key = {(encode_key(owner), encode_key(response_id)): (owner, response_id) for owner, response_id in runs}
        keys, alive = [*by_key], set[tuple[str, str]]()
        for first in range(0, len(keys), _MOST_RENEWED):
            alive |= await self._run(self._queries.renew, keys[first : first + _MOST_RENEWED], until)
        return {by_key[key] for key in alive}

    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        return await self._run(self._queries.expired, now, limit)

    async def prune(self) -> int:
        now = self._clock()
        while await self._run(pruning.drop_logs, self._using, now):
            pass
        gone = await self._sweep(now)
        most = self._max_records
        while most is not None and await self._run(pruning.end_oldest, self._using, now, most):
            gone += await self._sweep(now)
        return gone

    async def _sweep(self, now: float) -> int:
        """Clears away what has expired; nobody sees any of it, so that it may go piece by piece."""
        gone = 0
        while some := await self._run(pruning.drop_dead, self._using, now):
            gone += some
        while await self._run(pruning.drop_empty, self._using, now):
            pass
        return gone

    async def _run(self, work: Callable[_Args, T], *args: _Args.args, **kwargs: _Args.kwargs) -> T:
        """What a function returns that uses the database."""
        return await self._threads.run(partial(self._do, partial(work, *args, **kwargs)))

    def _do(self, work: Callable[[], T]) -> T:
        for tries_left in reversed(range(_TRIES)):
            try:
                return work()
            except Error as error:
                # The admin's deletions, and the project's own, take locks in an order of theirs.
                if tries_left and was_undone(error):
                    continue
                failure = told(error, self._using)
            break
        raise failure  # out here, so that the driver's own, with what it quotes, is not behind it

    def _admit(self, size: int) -> None:
        if size > self._max_record_bytes:
            raise StoreError("The response is larger than the server's store takes. Send store: false.")
