"""Records as the kit reads and writes them: what a dead worker left open is ended by whoever looks at it.

Every record that is not final has a lease, which its worker renews. Where that has run out the worker is gone, and the
response is ended in its stead: the machine is restored from the event log, so that the log gets a legal ending too.
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
from ..errors import APIError, EventsUnavailable, NotFound, ServerError, StoreError, error_from_code
from ..protocol.ids import new_id
from ..protocol.recovery import RecoveredStateMachine, recover
from ..protocol.sse import decode_events, encode_json, encode_sse
from ..protocol.state_machine import TERMINAL, Event, StateMachine
from ..protocol.synthesis import synthesize_events
from ..stores.protocol import Log, Record, ResponseStore, call_store
from .hooks import CompletionHook
from .registry import SHUTTING_DOWN

__all__ = ["EventFollower", "LayeredRepository", "Repository", "encode_log", "response_not_found"]

logger = logging.getLogger("responses_kit")

_POLL_SECONDS: Final = (0.02, 0.5)
"""How soon a follower looks again at what another process makes: at first, and after it has found nothing often."""

_MOST_TRIES: Final = 10

_PATIENCE: Final = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between a follower's looks into a store that fails."""

_WORKER_LOST: Final = "The server that worked on this response has gone away. Create a new response."


class _GoingDown(ServerError):
    """The server ends; what it waits for does not."""


class Repository:
    """The kit's side of a store: what is read is never in progress without somebody at work on it.

    Args:
        store: Where the records are.
        clock: Seconds since the epoch.
        completion_hook: Hears of the responses that are ended here.
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
        self._bells: defaultdict[tuple[str, str], Notifier] = defaultdict(Notifier)
        self.closed = False
        # A process that was suspended finds the leases of its own run out, and shall renew them.
        self.is_ours: Callable[[tuple[str, str]], bool] = lambda key: False

    def close(self) -> None:
        """Ends all waiting for responses, since the server has gone down."""
        self.closed = True
        for bell in self._bells.values():
            bell.notify_all()

    # Writing. Who follows a response in this process is woken.

    async def create(self, owner: str, record: Record) -> Record | None:
        """As `ResponseStore.create`."""
        return await call_store(self.store.create(owner, record))

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        """As `ResponseStore.update`."""
        done = await call_store(self.store.update(owner, record, log))
        self._ring(owner, record.id)
        return done

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        """As `ResponseStore.append`."""
        done = await call_store(self.store.append(owner, response_id, log))
        self._ring(owner, response_id)
        return done

    async def delete(self, owner: str, response_id: str) -> bool:
        """As `ResponseStore.delete`."""
        done = await call_store(self.store.delete(owner, response_id))
        self._ring(owner, response_id)
        return done

    def _ring(self, owner: str, response_id: str) -> None:
        bell = self._bells.get((owner, response_id))
        if bell is not None:
            bell.notify_all()

    # Reading.

    async def get(self, owner: str, response_id: str) -> Record | None:
        """The record, or None."""
        return await self._seen(owner, await call_store(self.store.get(owner, response_id)))

    async def find(self, owner: str, key: str) -> Record | None:
        """As `ResponseStore.find`."""
        return await self._seen(owner, await call_store(self.store.find(owner, key)))

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """As `ResponseStore.chain`."""
        records = await call_store(self.store.chain(owner, response_id))
        if records and self._left(owner, records[-1]):  # those before it had ended when they were continued
            last = await self.end(owner, records.pop())
            return [] if last is None else [*records, last]
        return records

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """As `ResponseStore.items`."""
        return await call_store(self.store.items(owner, item_ids))

    async def _seen(self, owner: str, record: Record | None) -> Record | None:
        return await self.end(owner, record) if record is not None and self._left(owner, record) else record

    def _left(self, owner: str, record: Record) -> bool:
        return not record.final and record.lease < self._clock() and not self.is_ours((owner, record.id))

    async def wait(self, owner: str, response_id: str) -> Record:
        """The record once it is final.

        Raises:
            NotFound: There is none, or it was deleted meanwhile.
        """
        async with aclosing(self._looks(owner, response_id)) as looks:
            async for record, _ in looks:
                if record.final:
                    return record
        raise response_not_found()

    async def _looks(self, owner: str, response_id: str) -> AsyncGenerator[tuple[Record, Callable[[], None]]]:
        """The record again and again: whenever it may have changed. The second value says that it has."""
        key = (owner, response_id)
        pause, longest = _POLL_SECONDS

        def changed() -> None:
            nonlocal pause
            pause = _POLL_SECONDS[0]

        try:
            while True:
                closed = self.closed  # what ended in order before that is seen by this look
                with self._bells[key].subscribe() as rung:
                    record = await self.get(owner, response_id)
                    if record is None:
                        return
                    yield record, changed
                    if closed:
                        raise _GoingDown(SHUTTING_DOWN)
                    with anyio.move_on_after(pause):
                        await rung.wait()
                        changed()
                    pause = min(2 * pause, longest)
        finally:
            if not self._bells[key].has_subscribers:
                del self._bells[key]

    # Endings in another's stead.

    async def end(
        self, owner: str, record: Record, error: APIError | None = None, *, queued: bool = False
    ) -> Record | None:
        """Ends a response whose worker is gone, or that has none yet: as cancelled where that was asked for, or failed.

        Args:
            owner: Whose response it is.
            record: Its record.
            error: What it fails with; by default that its worker was lost.
            queued: Whether it is to be left alone once a worker has begun.

        Returns:
            The record as it is then, whoever ended it; None if it was deleted.
        """
        found: Record | None = record
        for _ in range(_MOST_TRIES):
            if found is None or found.final:
                break
            if queued and not found.request:
                break
            machine, logs = await self._restored(owner, found)
            if machine is None or (queued and machine.state != "queued"):  # somebody else was faster
                found = await call_store(self.store.get(owner, record.id))
                continue
            if found.cancelled and error is None:
                events = machine.cancel()
            else:
                events = machine.fail(error or ServerError(_WORKER_LOST, code="worker_lost"))
            known = set(found.item_ids)
            made = (item["id"] for item in machine.response["output"])
            final = replace(
                found,
                response=encode_json(machine.response),
                item_ids=(*found.item_ids, *(item_id for item_id in made if item_id not in known)),
                final=True,
                request=b"",
            )
            try:
                if await self.update(owner, final, encode_log(events) if logs else None):
                    await self._completion_hook.notify(owner, machine.response)
                    return final
            except StoreError as refusal:
                if refusal.__cause__ is not None:
                    raise  # the store is out of reach; later it may not be
                # What is too large for it can still be known to have ended.
                bare = replace(found, response=encode_json(machine.response | {"output": []}), final=True, request=b"")
                if await self.update(owner, bare):
                    await self._completion_hook.notify(owner, machine.response)
                    return bare
            # Its worker lives after all, or somebody else who looked was faster.
            found = await call_store(self.store.get(owner, record.id))
            if found is not None and not found.final and error is None and not self._left(owner, found):
                break
        return found

    async def _restored(self, owner: str, record: Record) -> tuple[StateMachine | None, bool]:
        """The machine as its log tells, and whether there is one; None where the log has ended."""
        response = from_json(record.response)
        if record.events == "kept":
            pieces = await call_store(self.store.events(owner, record.id, -1))
            try:
                events = [event for piece in pieces or () for event in decode_events(piece.data)]
                if events and events[-1]["type"] in TERMINAL:
                    return None, True
                return recover(response, events, new_id=new_id), pieces is not None
            except (KeyError, TypeError, ValueError) as error:
                logger.error("the log of response %s cannot be read: %s", record.id, error)
        return recover(from_json(record.response), [], new_id=new_id), False

    async def sweep(self) -> int:
        """Ends the responses, of all owners, whose workers are gone; how many those were."""
        count = 0
        while found := await call_store(self.store.expired(self._clock())):
            progress = 0
            for owner, record in found:
                if self.is_ours((owner, record.id)):
                    continue
                try:
                    ended = await self.end(owner, record)
                except StoreError:
                    raise
                except Exception as error:  # of a record that is damaged; the others have to be ended, too
                    logger.error("response %s cannot be ended", record.id, exc_info=error)
                else:
                    progress += ended is None or ended.final
            count += progress
            if not progress:
                break
        return count

    async def prune(self) -> tuple[int, int]:
        """Removes what has outlived its time, and ends what has lost its worker.

        Returns:
            How many were removed, and how many were ended.
        """
        removed = await call_store(self.store.prune())
        return removed, await self.sweep()

    # Following.

    async def follow(
        self, owner: str, response_id: str, after: int | None = None, *, synthesize: bool = False
    ) -> EventFollower:
        """Finds a response whose events are to be told from the one after `after` on, or from the first.

        Args:
            owner: Whose it is.
            response_id: The response.
            after: The `sequence_number` of the last event that is known already.
            synthesize: If the log has expired, synthesize events that build the same response.

        Raises:
            NotFound: This owner has no such response.
            EventsGone: Its events are not kept, or not any more.
        """
        record = await self.get(owner, response_id)
        if record is None:
            raise response_not_found()
        idle = False
        if record.events == "kept":
            pieces = await call_store(self.store.events(owner, response_id, -1 if after is None else after))
            idle = after is not None and pieces is not None and not pieces and not record.final
            if pieces is None:
                if not synthesize or not record.final:
                    raise EventsUnavailable("The events of this response are not kept any more. GET it without stream.")
                record = replace(record, events="none")
        elif not record.final:
            raise EventsUnavailable("The events of this response are not kept while it is made. GET it without stream.")
        elif record.events == "told" and after is not None:
            raise EventsUnavailable(
                "The events of this response were not kept. GET it without stream.", param="starting_after"
            )
        return EventFollower(self, owner, record, -1 if after is None else after, idle=idle)


class EventFollower:
    """The events of one response as bytes, from a place on: those that are kept, then those that are made meanwhile.

    The events come in pieces of whole server-sent events, the last piece ends with the terminal one.

    Attributes:
        idle: Whether it may take a while until the first one comes.
        lost: Why what comes from now on is not in the log, and was made up so that the stream has an end: the server
            goes down, or the log, the response or the store is gone. The response itself may go on.
        whole: Whether what was made up is a whole stream, which builds the response as it has ended.
    """

    def __init__(self, records: Repository, owner: str, record: Record, after: int, *, idle: bool) -> None:
        self._records, self._owner, self._record, self._after = records, owner, record, after
        self.idle = idle
        self.lost: APIError | None = None
        self.whole = False

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The events' bytes, until the response has ended. What goes wrong meanwhile is told by events, too."""
        if self._record.events != "kept":
            # Nobody was told of any other events than these, which the response itself implies.
            events = synthesize_events(from_json(self._record.response))
            yield b"".join(encode_sse(event) for event in events if event["sequence_number"] > self._after)
            return
        # What an ending of its own would need to know, should the log be out of reach.
        machine = None if self._record.final else recover(from_json(self._record.response), [], new_id=new_id)
        known = self._after if machine is None else -1
        failures = 0
        while True:
            try:
                async with aclosing(self._records._looks(self._owner, self._record.id)) as looks:
                    async for record, changed in looks:
                        self._record = record
                        pieces = await call_store(self._records.store.events(self._owner, record.id, known))
                        if pieces is None:
                            raise EventsUnavailable("The events of this response are not kept any more.")
                        failures = 0
                        for piece in pieces:
                            changed()
                            last = _is_last(piece)
                            if machine is not None and not last:
                                machine.replay(decode_events(slice_log(piece, known).data))
                                await anyio.lowlevel.checkpoint()  # a long log holds nobody else up
                            if piece.end - 1 > self._after:
                                yield slice_log(piece, max(known, self._after)).data
                                self._after = piece.end - 1
                            known = piece.end - 1
                            if last:
                                return
                        if record.final and machine is None and not pieces:
                            return
                        if record.final:  # but its log could not be ended
                            ended = from_json(record.response)["error"]
                            raise (
                                error_from_code(**ended)
                                if ended
                                else EventsUnavailable("The last events were not kept.")
                            )
                raise response_not_found()
            except StoreError as error:
                if failures == len(_PATIENCE):
                    yield encode_log(self._own_ending(machine, error)).data
                    return
                await anyio.sleep(_PATIENCE[failures])  # the response goes on meanwhile, and so may its store
                failures += 1
            except APIError as error:
                if isinstance(error, _GoingDown):
                    # The response lives on elsewhere: this is the stream's end, and not its own.
                    self.lost = error
                    yield encode_sse({"type": "error", "sequence_number": self._after + 1, "error": error.payload()})
                else:
                    yield encode_log(self._own_ending(machine, error)).data
                return

    def _own_ending(self, machine: RecoveredStateMachine | None, error: APIError) -> list[Event]:
        """What is told where the events themselves can't be had any more."""
        self.lost = error
        response = from_json(self._record.response)
        if self._after < 0 and self._record.final:
            self.whole = True
            return synthesize_events(response)
        if machine is not None and machine.next_sequence_number > self._after:
            return machine.fail(error)
        # What was told before is not known.
        failed = response | {"status": "failed", "error": {"code": error.code, "message": error.message}}
        return [
            {"type": "error", "sequence_number": self._after + 1, "error": error.payload()},
            {"type": "response.failed", "sequence_number": self._after + 2, "response": failed},
        ]


class LayeredRepository:
    """What lies in one store before what lies in another, for reading; chains go on from the first into the second."""

    def __init__(self, upper: Repository, lower: Repository) -> None:
        self._upper, self._lower = upper, lower

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """As `ResponseStore.chain`."""
        records = await self._upper.chain(owner, response_id)
        before = records[0].previous_id if records else response_id
        return records if before is None else [*await self._lower.chain(owner, before), *records]

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """As `ResponseStore.items`."""
        found = await self._upper.items(owner, item_ids)
        missing = set(item_ids).difference(found)
        return {**await self._lower.items(owner, missing), **found} if missing else found


def encode_log(events: list[Event]) -> Log:
    """Events as a piece of a log."""
    return Log(events[0]["sequence_number"], len(events), b"".join(map(encode_sse, events)))


def _is_last(piece: Log) -> bool:
    # Only what JSON escapes comes behind a line's end: the last event's own head is what follows the last blank line.
    head = piece.data[:-2].rpartition(b"\n\n")[2].partition(b"\n")[0]
    return head.removeprefix(b"event: ").decode() in TERMINAL


def slice_log(piece: Log, after: int) -> Log:
    """What of a piece comes after the event with this `sequence_number`."""
    known = after + 1 - piece.start
    if known <= 0:
        return piece
    data = b"".join(event + b"\n\n" for event in piece.data.split(b"\n\n")[known:-1])
    return Log(after + 1, piece.count - known, data)


def response_not_found() -> NotFound:
    """What every path says of an id that its owner does not have."""
    return NotFound("No response with this id exists.", code="response_not_found")
