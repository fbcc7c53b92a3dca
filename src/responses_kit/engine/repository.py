"""The store as the engine uses it: orphaned responses are ended when they are read or swept.

Every record that is not final has a lease, which its worker renews. An expired lease means that the worker died. The
next process that reads or sweeps the record rebuilds the state machine from the event log and ends the log legally.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import anyio
import anyio.lowlevel
from pydantic_core import from_json

from .._concurrency.tasks import Notifier
from ..errors import APIError, NotFound, ServerError, StoreError
from ..protocol.ids import new_id
from ..protocol.recovery import recover
from ..protocol.sse import decode_events, encode_json, encode_sse
from ..protocol.state_machine import TERMINAL_EVENT_TYPES, Event, StateMachine
from ..stores.protocol import Log, Record, ResponseStore, call_store
from .hooks import CompletionHook
from .registry import SHUTTING_DOWN

__all__ = ["LayeredRepository", "Repository", "ShuttingDown", "encode_log", "response_not_found"]

logger = logging.getLogger("responses_kit")

_POLL_INTERVALS: Final = (0.02, 0.5)
"""Shortest and longest seconds between two reads of a watched record; doubled while the record does not change."""

_MAX_END_ATTEMPTS: Final = 10
"""Attempts to end an orphaned response while other processes write to it."""

_WORKER_LOST: Final = "The worker that generated this response was lost. Create a new response."


class ShuttingDown(ServerError):
    """The server is shutting down, and another process may still generate the awaited response."""


class Repository:
    """A store that ends orphaned responses when they are read, and notifies watchers of changes.

    Args:
        store: Holds the records.
        clock: Seconds since the epoch.
        completion_hook: Notified of the responses that are ended here.

    Attributes:
        is_closed: Whether the server has shut down, so that watching ends.
        is_local: Returns whether this event loop holds the lease of a response (owner, id). If the process was
            suspended, such leases may have expired; they are renewed then.
    """

    def __init__(
        self,
        store: ResponseStore,
        *,
        clock: Callable[[], float] = time.time,
        completion_hook: CompletionHook | None = None,
    ) -> None:
        self.store = store
        self._completion_hook = completion_hook or CompletionHook()
        self._clock = clock
        self._notifiers: defaultdict[tuple[str, str], Notifier] = defaultdict(Notifier)
        self.is_closed = False
        self.is_local: Callable[[tuple[str, str]], bool] = lambda key: False

    def close(self) -> None:
        """End all watching, because the server has shut down."""
        self.is_closed = True
        for notifier in self._notifiers.values():
            notifier.notify_all()

    # Writing. All methods but `create` notify the watchers in this process.

    async def create(self, owner: str, record: Record) -> Record | None:
        """Create a record; see `ResponseStore.create`."""
        return await call_store(self.store.create(owner, record))

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        """Update a record; see `ResponseStore.update`."""
        is_updated = await call_store(self.store.update(owner, record, log))
        self._notify(owner, record.id)
        return is_updated

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        """Append events to a log; see `ResponseStore.append`."""
        is_appended = await call_store(self.store.append(owner, response_id, log))
        self._notify(owner, response_id)
        return is_appended

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a record; see `ResponseStore.delete`."""
        is_deleted = await call_store(self.store.delete(owner, response_id))
        self._notify(owner, response_id)
        return is_deleted

    def _notify(self, owner: str, response_id: str) -> None:
        notifier = self._notifiers.get((owner, response_id))
        if notifier is not None:
            notifier.notify_all()

    # Reading.

    async def get(self, owner: str, response_id: str) -> Record | None:
        """Return a record, or None; see `ResponseStore.get`."""
        return await self._end_if_orphaned(owner, await call_store(self.store.get(owner, response_id)))

    async def find(self, owner: str, key: str) -> Record | None:
        """Return the record of an idempotency key, or None; see `ResponseStore.find`."""
        return await self._end_if_orphaned(owner, await call_store(self.store.find(owner, key)))

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """Return a response and the ones before it, oldest first; see `ResponseStore.chain`."""
        records = await call_store(self.store.chain(owner, response_id))
        if records and self._is_orphaned(owner, records[-1]):  # only ended responses can be continued
            last = await self.end(owner, records.pop())
            return [] if last is None else [*records, last]
        return records

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """Return records by the ids of their items; see `ResponseStore.items`."""
        return await call_store(self.store.items(owner, item_ids))

    async def _end_if_orphaned(self, owner: str, record: Record | None) -> Record | None:
        return await self.end(owner, record) if record is not None and self._is_orphaned(owner, record) else record

    def _is_orphaned(self, owner: str, record: Record) -> bool:
        return not record.final and record.lease < self._clock() and not self.is_local((owner, record.id))

    async def wait(self, owner: str, response_id: str) -> Record:
        """Return the record once it is final.

        Raises:
            NotFound: This owner has no such response, or it was deleted meanwhile.
            ShuttingDown: The server is shutting down.
        """
        async with aclosing(self.watch(owner, response_id)) as snapshots:
            async for record, _ in snapshots:
                if record.final:
                    return record
        raise response_not_found()

    async def watch(self, owner: str, response_id: str) -> AsyncGenerator[tuple[Record, Callable[[], None]]]:
        """Yield the record whenever it may have changed, until it is deleted.

        Each item also has a function that the caller calls if it has found a change; polling is fast again then.

        Raises:
            ShuttingDown: The server shuts down.
        """
        key = (owner, response_id)
        interval, max_interval = _POLL_INTERVALS

        def reset_interval() -> None:
            nonlocal interval
            interval = _POLL_INTERVALS[0]

        try:
            while True:
                is_closed = (
                    self.is_closed
                )  # read first, so that a response that ended before the shutdown is still yielded
                with self._notifiers[key].subscribe() as notified:
                    record = await self.get(owner, response_id)
                    if record is None:
                        return
                    yield record, reset_interval
                    if is_closed:
                        raise ShuttingDown(SHUTTING_DOWN)
                    with anyio.move_on_after(interval):
                        await notified.wait()
                        reset_interval()
                    interval = min(2 * interval, max_interval)
        finally:
            if not self._notifiers[key].has_subscribers:
                del self._notifiers[key]

    # Orphaned responses.

    async def end(
        self, owner: str, record: Record, error: APIError | None = None, *, only_queued: bool = False
    ) -> Record | None:
        """End a response that has no live worker: as cancelled if that was requested, else as failed.

        Args:
            owner: The owner of the response.
            record: Its record.
            error: The error of the failed response; by default `worker_lost`.
            only_queued: End the response only while it is still queued.

        Returns:
            The current record, whichever process has ended it; None if it was deleted.

        Raises:
            StoreError: The store failed.
        """
        found: Record | None = record
        for _ in range(_MAX_END_ATTEMPTS):
            if found is None or found.final:
                break
            if only_queued and not found.request:
                break
            state_machine, has_log = await self._recover(owner, found)
            # Another process has ended or claimed it since the record was read.
            if state_machine is None or (only_queued and state_machine.state != "queued"):
                found = await call_store(self.store.get(owner, record.id))
                continue
            if found.cancelled and error is None:
                events = state_machine.cancel()
            else:
                events = state_machine.fail(error or ServerError(_WORKER_LOST, code="worker_lost"))
            known_ids = set(found.item_ids)
            output_ids = (item["id"] for item in state_machine.response["output"])
            final = replace(
                found,
                response=encode_json(state_machine.response),
                item_ids=(*found.item_ids, *(item_id for item_id in output_ids if item_id not in known_ids)),
                final=True,
                request=b"",
            )
            try:
                if await self.update(owner, final, encode_log(events) if has_log else None):
                    await self._completion_hook.notify(owner, state_machine.response)
                    return final
            except StoreError as refusal:
                if refusal.__cause__ is not None:
                    raise  # the store is down, and a later attempt may succeed
                # The store refuses the record itself, for example as too large: save it without its output.
                empty = encode_json(state_machine.response | {"output": []})
                bare = replace(found, response=empty, final=True, request=b"")
                if await self.update(owner, bare):
                    await self._completion_hook.notify(owner, state_machine.response)
                    return bare
            # The worker is alive and has renewed its lease, or another process has ended the response.
            found = await call_store(self.store.get(owner, record.id))
            if found is not None and not found.final and error is None and not self._is_orphaned(owner, found):
                break
        return found

    async def _recover(self, owner: str, record: Record) -> tuple[StateMachine | None, bool]:
        """Return the state machine rebuilt from the log, or None if the log has ended, and whether there is a log."""
        response = from_json(record.response)
        if record.events == "logged":
            pieces = await call_store(self.store.events(owner, record.id, -1))
            try:
                events = [event for piece in pieces or () for event in decode_events(piece.data)]
                if events and events[-1]["type"] in TERMINAL_EVENT_TYPES:
                    return None, True
                return recover(response, events, new_id=new_id), pieces is not None
            except (KeyError, TypeError, ValueError) as error:
                logger.error("the log of response %s cannot be read: %s", record.id, error)
        return recover(from_json(record.response), [], new_id=new_id), False

    async def sweep(self) -> int:
        """End the orphaned responses of all owners; return how many have ended or were deleted meanwhile.

        Raises:
            StoreError: The store failed.
        """
        count = 0
        while found := await call_store(self.store.expired(self._clock())):
            ended_count = 0
            for owner, record in found:
                if self.is_local((owner, record.id)):
                    continue
                try:
                    ended = await self.end(owner, record)
                except StoreError:
                    raise
                except Exception as error:  # a damaged record must not prevent the end of the other responses
                    logger.error("response %s cannot be ended", record.id, exc_info=error)
                else:
                    ended_count += ended is None or ended.final
            count += ended_count
            if not ended_count:
                break
        return count

    async def prune(self) -> tuple[int, int]:
        """Delete expired records, and end orphaned responses.

        Returns:
            The number of deleted records and the number of ended responses.

        Raises:
            StoreError: The store failed.
        """
        removed = await call_store(self.store.prune())
        return removed, await self.sweep()


class LayeredRepository:
    """Two stores read as one: the upper one is searched first, and its chains continue in the lower one."""

    def __init__(self, upper: Repository, lower: Repository) -> None:
        self._upper, self._lower = upper, lower

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """Return a response and the ones before it, oldest first; see `ResponseStore.chain`."""
        records = await self._upper.chain(owner, response_id)
        before = records[0].previous_id if records else response_id
        return records if before is None else [*await self._lower.chain(owner, before), *records]

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """Return records by the ids of their items; see `ResponseStore.items`."""
        found = await self._upper.items(owner, item_ids)
        missing = set(item_ids).difference(found)
        return {**await self._lower.items(owner, missing), **found} if missing else found


def encode_log(events: list[Event]) -> Log:
    """Return events, at least one, as a piece of a log."""
    return Log(events[0]["sequence_number"], len(events), b"".join(map(encode_sse, events)))


def response_not_found() -> NotFound:
    """Return the error for an id that is unknown to the owner."""
    return NotFound("No response with this id exists.", code="response_not_found")
