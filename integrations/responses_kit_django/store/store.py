"""The store of responses in a database of the Django project."""
# The methods of `ResponseStore` are documented there.

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
from .database import check_database, check_tables, is_conflict, to_safe_error
from .queries import PendingAppend, Queries
from .thread_pool import ThreadPool, get_event_loop

__all__ = ["OrmStore"]

_MAX_RENEWALS: Final = 5000
"""Leases that one statement renews."""

_MAX_ATTEMPTS: Final = 3
"""Attempts before a call fails because the database rolls its transactions back."""

T = TypeVar("T")
_Args = ParamSpec("_Args")


class OrmStore:
    """A store in a database of the Django project, PostgreSQL or SQLite, that any number of processes can share.

    Its tables are models of the app `responses_kit_django`, which `manage.py migrate` creates and upgrades. A
    conversation expires as a whole: using one of its responses extends the lifetime of all of them. Expired responses
    are unknown at once; `prune()` deletes their rows.

    The store needs asyncio, and may be used on several event loops. It uses the ORM in its own threads, each with its
    own connection, so it does not see uncommitted changes of a request's transaction. Call `aclose()` at the end; idle
    threads and connections are also closed after a while.

    Example::

        store = OrmStore()
        kit = ResponsesKit(backend, store=store)

    Args:
        using: The database's alias. None is the one to which the project's routers write responses. It is also used for
            reading, because replicas lag behind.
        ttl: Seconds after its last use at which a conversation expires.
        log_ttl: Seconds after a response's end at which its events expire.
        max_records: Records that `prune()` leaves; it deletes the least recently used conversations first. None for no
            limit.
        max_record_bytes: Bytes of a record, and of events that are appended at once. Larger ones fail.
        threads: Threads, and so connections, of one process; always 1 on SQLite.
        clock: Seconds since the epoch, the same for all processes.

    Raises:
        ConfigurationError: The database is unknown, or is neither PostgreSQL nor SQLite in a file.
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
        vendor = check_database(self._using)
        self._queries = Queries(self._using, vendor, ttl=ttl, log_ttl=log_ttl, clock=clock)
        self._clock, self._max_records, self._max_record_bytes = clock, max_records, max_record_bytes
        # SQLite has one writer at a time. A queue here is fair, unlike SQLite's own waiting for locks.
        self._pool = ThreadPool(self._using, 1 if vendor == "sqlite" else max(1, threads))
        self._appends = GroupCommit(self._append_all, size=lambda addition: len(addition.log.data))

    async def setup(self) -> None:
        """Check that the tables exist and are up to date.

        Raises:
            ConfigurationError: A table is missing or out of date.
        """
        await self._run(check_tables, self._using)

    async def aclose(self) -> None:
        """Wait for this event loop's calls, and close their connections and the idle ones."""
        await self._appends.drain()
        await self._pool.aclose()

    async def create(self, owner: str, record: Record) -> Record | None:
        self._check_size(record.size)
        return await self._run(self._queries.create, owner, record)

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        self._check_size(record.size)
        if log is not None:
            self._check_size(len(log.data))
        return await self._run(self._queries.update, encode_key(owner), record, log)

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        get_event_loop()  # raises under trio, where GroupCommit would fail without a clear message
        self._check_size(len(log.data))
        return await self._appends.submit(PendingAppend(encode_key(owner), encode_key(response_id), log))

    async def _append_all(self, additions: Sequence[PendingAppend]) -> list[bool]:
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
        for first in range(0, len(keys), _MAX_RENEWALS):
            alive |= await self._run(self._queries.renew, keys[first : first + _MAX_RENEWALS], until)
        return {by_key[key] for key in alive}

    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        return await self._run(self._queries.expired, now, limit)

    async def prune(self) -> int:
        now = self._clock()
        while await self._run(pruning.delete_logs, self._using, now):
            pass
        deleted = await self._delete_expired(now)
        limit = self._max_records
        while limit is not None and await self._run(pruning.expire_oldest, self._using, now, limit):
            deleted += await self._delete_expired(now)
        return deleted

    async def _delete_expired(self, now: float) -> int:
        """Delete expired responses and conversations in batches, and return how many responses."""
        deleted = 0
        while count := await self._run(pruning.delete_expired_responses, self._using, now):
            deleted += count
        while await self._run(pruning.delete_empty_conversations, self._using, now):
            pass
        return deleted

    async def _run(self, function: Callable[_Args, T], *args: _Args.args, **kwargs: _Args.kwargs) -> T:
        """Call a function that uses the database in a thread of the pool, and return its result."""
        return await self._pool.run(partial(self._execute, partial(function, *args, **kwargs)))

    def _execute(self, function: Callable[[], T]) -> T:
        for attempts_left in reversed(range(_MAX_ATTEMPTS)):
            try:
                return function()
            except Error as error:
                # Deletions by the admin or the project lock rows in another order, so deadlocks are possible.
                if attempts_left and is_conflict(error):
                    continue
                failure = to_safe_error(error, self._using)
            break
        raise failure  # outside the except block: __context__ must not refer to the driver's error, which quotes values

    def _check_size(self, size: int) -> None:
        if size > self._max_record_bytes:
            raise StoreError("The response is too large for the server's store. Set 'store' to false.")
