"""The life of one response: the backend's outputs through the machine, kept, then told."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from secrets import randbelow
from typing import Any, Literal

import anyio
import anyio.lowlevel
from pydantic_core import from_json

from .backend import Backend
from .companion import Bell, is_cancelled
from .context import Context
from .encoding import encode, events_in
from .errors import APIError, ClientGone, IllegalOutput, ModelError, ServerError, StoreError, recalled
from .generation import Generation
from .leases import Leases
from .machine import TERMINAL, Event, Machine
from .records import Records, logged
from .schema.items import ITEMS
from .stores import Log, Record, stored

__all__ = ["OpenRuns", "Run", "Tell"]

logger = logging.getLogger("responses_kit")

Tell = Callable[[list[Event]], Awaitable[None]]
"""Takes events as they happen; returns once they are on their way."""

_CLEANUP_SECONDS = 5.0
"""What a cancelled run may still spend on closing its backend and its record."""

_SHUTTING_DOWN = "The server is shutting down. Try again."

_UNDISTURBED_SECONDS = 0.5
"""What is left, once a response is to end, for what must not be cut off in the middle: a tell, or the final save."""

_PAUSES = (0.1, 0.5, 1.0)
"""Seconds between the tries to begin what waits in a store that fails."""

_LARGEST_LOG = 256 * 1024 * 1024
"""Bytes of events that are kept of one response."""


class Taken(Exception):
    """The record is not this run's any more: it was ended by somebody else, is worked on by another, or was deleted."""


class OpenRuns:
    """The runs that are not over, to be stopped together. Once closed, it takes no more.

    Attributes:
        closing: Rings when it is closed.
    """

    def __init__(self) -> None:
        # Weak, for a run that its host drops before it is executed never says that it is over.
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._empty: anyio.Event | None = None
        self._closed_at = math.inf
        self.closing = Bell()

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._empty is not None

    def add(self, run: Run) -> None:
        """A run begins.

        Raises:
            ServerError: No more are taken.
        """
        self.check()
        self._runs.add(run)

    def check(self) -> None:
        """Whether there may be more.

        Raises:
            ServerError: No more are taken.
        """
        if self.closed:
            raise ServerError(_SHUTTING_DOWN)

    def discard(self, run: Run) -> None:
        """A run is over, and its record is final."""
        self._runs.discard(run)
        if self._empty is not None and not self._runs:
            self._empty.set()

    async def close(self, grace: float = 0.0) -> None:
        """Takes no more runs, lets those that there are come to their ends, and stops those that have not.

        It waits for the end of those, too, but not for ever.

        Args:
            grace: Seconds that they have, from the first call on.
        """
        if self._empty is None:
            self._empty = anyio.Event()
            self._closed_at = anyio.current_time()
            self.closing.ring()
        with anyio.CancelScope(deadline=self._closed_at + grace):
            if self._runs:
                await self._empty.wait()
        for run in list(self._runs):
            run.stop()
        with anyio.move_on_after(2 * _CLEANUP_SECONDS):
            if self._runs:
                await self._empty.wait()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """One response in the making.

    Attributes:
        machine: Holds the response object.
        records: Where its record is; None if it has none.
        leases: Keeps the record's lease; None where nobody else could see the record anyway.
        open: The runs that are not over; this one is among them from `create` on.
        events: What becomes of its events; see `Record.events`.
        generate: False if the backend is not to be asked at all.
        request: What another worker needs to make the response; see `Record.request`.
        idempotency_key: What it was asked for with, if anything.
        fingerprint: What the request was, for comparison.
        error: Why the response failed, once it has.
    """

    backend: Backend
    context: Context
    machine: Machine
    records: Records | None
    leases: Leases | None
    threads: Callable[[], anyio.CapacityLimiter]
    tool_threads: Callable[[], anyio.CapacityLimiter]
    open: OpenRuns
    clock: Callable[[], float] = time.time
    events: Literal["kept", "told", "none"] = "none"
    generate: bool = True
    request: bytes = b""
    idempotency_key: str | None = None
    fingerprint: str = ""
    error: APIError | None = None
    _input: bytes = field(default=b"")
    _encoded: bytes = field(default=b"")
    _logged: int = field(default=0)
    _untold: list[Event] = field(default_factory=list)
    _begun: bool = field(default=False)
    _mark: float | None = field(default=None)
    _kept: bool = field(default=False)
    _finished: bool = field(default=False)
    _ending: Literal["", "stop", "cancel", "abandon"] = field(default="")
    _busy: bool = field(default=False)
    _tell: Tell = field(init=False)
    _generation: Generation = field(init=False)
    _next: int = field(default=0)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def __post_init__(self) -> None:
        self._tell = _nobody
        self._generation = Generation(self.backend, self.context, self.machine, self.threads, self.tool_threads)

    @property
    def response(self) -> dict[str, Any]:
        """The response object as far as it has come."""
        return self.machine.response

    @property
    def owner(self) -> str:
        """Whose response it is."""
        return self.context.turn.owner

    @property
    def id(self) -> str:
        """The response's id."""
        return self.context.turn.response_id

    @property
    def key(self) -> tuple[str, str]:
        """Whose record it makes, and its id."""
        return self.owner, self.id

    @property
    def over(self) -> bool:
        """Whether the response has ended."""
        return self.machine.state == "ended"

    def encoded(self) -> bytes:
        """The final response object as JSON, encoded once for the store and the client."""
        return self._encoded

    async def create(self) -> Record | None:
        """Has the turn admitted, and writes the record: the response exists before anybody hears of it.

        Returns:
            None; or the record of an earlier request with the same idempotency key, and this run is none.

        Raises:
            APIError: The backend refused the turn, or the server is shutting down.
            StoreError: The store could not take it.
        """
        self.open.add(self)
        try:
            await self._admit()
            if self.records is not None:
                self._input = ITEMS.dump_json(self.context.input)
                earlier = await self.records.create(self.owner, self._record(encode(self.response), final=False))
                if earlier is not None:
                    self.open.discard(self)
                    return earlier
                if self.leases is not None:
                    self.leases.add(self)
        except BaseException:
            if is_cancelled():
                await self._abandon()
            self._leave()
            raise
        return None

    async def queue(self, lease: float) -> Record:
        """Writes the record of a response that waits for a worker, which may be this run or another process's.

        Args:
            lease: Seconds since the epoch until which a worker has to begin.

        Returns:
            The record; or that of an earlier request with the same idempotency key, and this run is none.

        Raises:
            ServerError: The server is shutting down.
            StoreError: The store could not take it.
        """
        assert self.records is not None
        self.open.check()
        self._input = ITEMS.dump_json(self.context.input)
        queued = self.machine.queue()
        record = replace(self._record(encode(self.response), final=False), lease=lease)
        earlier = await self.records.create(self.owner, record)
        if earlier is None:
            await self._log(queued)
            self._next = len(queued)
        return earlier or record

    def requeue(self, record: Record) -> None:
        """Goes on from a record that `queue` has written, in whatever process it did."""
        self._input = record.input
        self._next = len(self.machine.queue())

    def hold(self) -> None:
        """This process works on the response, or will.

        Raises:
            ServerError: The server is shutting down.
        """
        self.open.add(self)
        if self.leases is not None:
            self.leases.add(self)

    async def _admit(self) -> None:
        if not self.generate:
            return
        try:
            await self._generation.admit()
        except APIError:
            raise
        except Exception as error:
            raise self._public(error) from error

    async def execute(self, tell: Tell, *, place: AbstractAsyncContextManager[Any] | None = None) -> None:
        """Generates to the end. Failures end up in the events and in `error`, never as exceptions.

        If the surrounding scope is cancelled, or `tell` raises anything, the backend is closed, the record
        says cancelled, and nothing more is told.

        Args:
            tell: Takes the events.
            place: Entered first, for as long as it takes, and left at the end; whoever waits there can be cancelled.
        """
        self._tell = tell
        try:
            with self._scope:
                async with contextlib.AsyncExitStack() as stack:
                    await self._execute(contextlib.nullcontext() if place is None else place, stack)
        finally:
            self._tell = _nobody  # what it tells may hold us
            self._leave()

    def cancel(self) -> None:
        """Ends the response as cancelled, as soon as its backend waits for something or yields; its client is told."""
        self._end("cancel")

    def abandon(self) -> None:
        """Ends the response as cancelled, and tells nobody: its client has left."""
        self._end("abandon")

    def stop(self) -> None:
        """Ends the response as failed, since the server is going down; its client is told."""
        self._end("stop")

    def _end(self, ending: Literal["stop", "cancel", "abandon"]) -> None:
        if self._kept:
            return  # it has ended already, and shall be told so
        self._ending = self._ending or ending
        self._generation.stop()
        if self._busy and ending != "abandon":
            # What is cut off in the middle is neither done nor undone.
            self._scope.deadline = min(self._scope.deadline, anyio.current_time() + _UNDISTURBED_SECONDS)
        else:
            self._scope.cancel()

    async def _say_now(self, events: list[Event]) -> None:
        """Tells. Whoever does not take it in time, once the response is to end, is told no more at all."""
        self._busy = True
        try:
            await _told(self._tell, events)
        except BaseException:
            self._tell = _nobody  # there would be a gap
            raise
        finally:
            self._busy = False
        self._finished = self._finished or (bool(events) and events[-1]["type"] in TERMINAL)
        if self._ending and not self._kept and not self._finished:
            self._scope.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()

    def _leave(self) -> None:
        self.open.discard(self)
        if self.leases is not None:
            self.leases.discard(self)

    async def _execute(self, place: AbstractAsyncContextManager[Any], stack: contextlib.AsyncExitStack) -> None:
        try:
            try:
                await stack.enter_async_context(place)
                await self._begin()
                if self.generate:
                    await self._generation.run(self._say)
                await self._say(self.machine.close(self.clock()))
                await self._save(self.machine.ending())
            except (ClientGone, Taken):
                raise
            except BaseException as error:
                # Of whatever kind: only what really comes from outside may leave here, or a backend could end its host.
                if isinstance(error, KeyboardInterrupt) or is_cancelled(error):
                    raise
                await self._fail(error)
            else:
                await self._say_now(self.machine.end())
        except ClientGone:
            await self._abandon()
        except Taken:
            await self._give_way()
        except BaseException as error:
            with anyio.move_on_after(_CLEANUP_SECONDS, shield=True), contextlib.suppress(ClientGone):
                await self._end_early()
            if not isinstance(error, Exception):
                raise
            # A backend that failed on its way out; the cancellation itself comes up at the next wait.
            logger.warning("response %s: the backend failed while it was closed", self.id, exc_info=error)

    async def _begin(self) -> None:
        if self.machine.state != "queued":
            self._begun = True
            await self._say(self.machine.start())
            return
        self._untold = started = self.machine.start()
        self.request = b""
        if not await self._is_mine(started):
            raise Taken
        self._begun = True
        self._untold = []
        self._next = started[-1]["sequence_number"] + 1
        await self._say_now(started)
        await self._admit()

    async def _is_mine(self, started: list[Event]) -> bool:
        """Whoever gets these events into the log is the one who works on the response."""
        assert self.records is not None
        record = self._record(encode(self.response), final=False)
        # By which ours is told from another's.
        self._mark = record.lease + randbelow(2**20) / 2**20
        record = replace(record, lease=self._mark)
        for pause in _PAUSES:
            try:
                return await self.records.update(self.owner, record, logged(started))
            except StoreError:
                found = await self._found()
                if found is not None and not found.request:  # that came through: was it ours?
                    return not found.final and found.lease == self._mark
            await anyio.sleep(pause)
        found = await self._found()
        if found is not None and found.request:  # a record that can't be made final goes altogether
            with contextlib.suppress(StoreError):
                await self.records.delete(self.owner, self.id)
        return False

    async def _end_early(self) -> None:
        """Ends what was cancelled: by the API, since the server goes down, or with whatever is around us."""
        if self._kept:
            return
        try:
            if self.machine.state == "closed" and await self._was_saved():
                self._kept = True
                if self._ending in ("stop", "cancel"):
                    await self._say_now(self.machine.end())
            elif self.over:
                await self._keep(self._untold)
                if self._ending in ("stop", "cancel") and not self._finished:
                    await self._say_now(self._untold)
            elif self._ending == "stop":
                await self._fail(ServerError(_SHUTTING_DOWN))
            elif self._ending == "cancel":
                if await self._is_taken():  # it is not asked to end: it was ended
                    raise Taken
                self._untold = events = [*self._untold, *self.machine.cancel()]
                await self._keep(events)
                await self._say_now(events)
            else:
                await self._abandon()
        except Taken:
            await self._give_way()

    async def collect(self) -> None:
        """Generates to the end and tells nobody.

        Raises:
            APIError: The response failed.
        """
        await self.execute(_nobody)
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame: a cycle that would keep the whole input alive

    async def _say(self, events: list[Event]) -> None:
        """Logs, where events are kept, and then tells."""
        if not events:
            return
        if self._ending:
            self._untold = [*self._untold, *events]
            await anyio.lowlevel.checkpoint_if_cancelled()  # before they are half told
        if self.events == "kept":
            await self._log(events)
        self._next = events[-1]["sequence_number"] + 1
        await self._say_now(events)

    async def _log(self, events: list[Event]) -> None:
        assert self.records is not None
        self._untold = events  # until it is sure that they are kept
        log = logged(events)
        self._logged += len(log.data)
        if self._logged > _LARGEST_LOG:
            raise StoreError("The response has more events than this server keeps.")
        if not await self.records.append(self.owner, self.id, log):
            raise Taken
        self._untold = []

    # Endings.

    async def _fail(self, error: BaseException) -> None:
        self.error = self._public(error).with_traceback(None)
        self._untold = events = [*self._untold, *self.machine.fail(self.error)]
        await self._keep(events)
        await self._say_now(events)

    async def _abandon(self) -> None:
        self._generation.stop()
        if not self.over:
            self._untold = [*self._untold, *self.machine.cancel()]
        with anyio.CancelScope(shield=True), contextlib.suppress(Taken):
            await self._keep(self._untold)

    async def _keep(self, events: list[Event]) -> None:
        """Saves an unhappy ending as well as it can; a record that can't be made final goes altogether."""
        if self._kept or self.records is None:
            return
        with anyio.move_on_after(_CLEANUP_SECONDS) as saving:
            try:
                await self._save(events)
            except StoreError:
                with contextlib.suppress(StoreError):
                    await self.records.delete(self.owner, self.id)
            except Taken:
                if self.events == "kept":
                    raise
        if saving.cancelled_caught:
            logger.error("response %s could not be kept: the store does not answer", self.id)

    async def _save(self, events: list[Event]) -> None:
        """Makes the record final, with the last events in its log.

        Raises:
            StoreError: The store could not take it.
            Taken: Somebody else has ended the response.
        """
        self._encoded = encode(self.response)
        if self.records is not None:
            record = self._record(self._encoded, final=True)
            self._busy = True
            try:
                if not await self._is_saved(record, events):
                    await self._save_again(record, events)
            finally:
                self._busy = False
        self._kept = True
        self._scope.deadline = math.inf  # it has ended by itself, whoever wanted to end it meanwhile

    async def _is_saved(self, record: Record, events: list[Event]) -> bool:
        assert self.records is not None
        try:
            return await self.records.update(self.owner, record, self._last(events))
        except StoreError:
            if not await self._was_saved():
                raise
            return True

    async def _was_saved(self) -> bool:
        """Whether a final save that broke off had come through after all."""
        found = await self._found() if self._encoded else None
        return found is not None and found.final and found.response == self._encoded

    async def _is_taken(self) -> bool:
        if self.records is None:
            return False
        found = await self._found()
        return found is not None and found.final

    async def _found(self) -> Record | None:
        """The record, where it is there and the store tells; if not, there is nothing to keep to."""
        with contextlib.suppress(StoreError):
            return None if self.records is None else await self.records.get(self.owner, self.id)
        return None

    async def _save_again(self, record: Record, events: list[Event]) -> None:
        assert self.records is not None
        found = await self.records.get(self.owner, self.id)
        if found is None:
            return  # it was deleted meanwhile: nothing is kept, and its client has its answer
        if found.final or not (self._begun or found.lease == self._mark):
            raise Taken
        # An append that broke off had come through after all.
        start = events[0]["sequence_number"] if events else 0
        pieces = await stored(self.records.store.events(self.owner, self.id, start - 1))
        end = pieces[-1].end if pieces else start
        events = [event for event in events if event["sequence_number"] >= end]
        if not await self.records.update(self.owner, record, self._last(events)):
            raise Taken

    def _last(self, events: list[Event]) -> Log | None:
        return logged(events) if self.events == "kept" and events else None

    async def _give_way(self) -> None:
        """Somebody else ended the response, or works on it: what is told is what the record says."""
        assert self.records is not None
        self._generation.stop()
        with anyio.move_on_after(_CLEANUP_SECONDS, shield=True), contextlib.suppress(ClientGone):
            try:
                record = await self.records.get(self.owner, self.id)
                if record is not None and not record.final:
                    return  # another worker's; this one never began
                events = await self._ending_of(record)
            except StoreError as error:
                self.error = error
                events = self._own_ending()
            await self._say_now(events)

    async def _ending_of(self, record: Record | None) -> list[Event]:
        """The rest of the events of a response that somebody else has ended, or deleted."""
        assert self.records is not None
        self._kept = True
        ended = None if record is None else from_json(record.response)
        self.error = recalled(**ended["error"]) if ended is not None and ended["status"] == "failed" else None
        if ended is None or self.events != "kept":
            return self._own_ending()
        pieces = await stored(self.records.store.events(self.owner, self.id, self._next - 1))
        if pieces is None:
            return self._own_ending()
        self._encoded, self.machine.response = encode(ended), ended
        told = (event for piece in pieces for event in events_in(piece.data))
        return [event for event in told if event["sequence_number"] >= self._next]

    def _own_ending(self) -> list[Event]:
        if self.over:
            return self._untold
        return [*self._untold, *(self.machine.cancel() if self.error is None else self.machine.fail(self.error))]

    def _public(self, error: BaseException) -> APIError:
        """What the client may know of an error; the rest goes to the log."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, IllegalOutput):
            logger.error("response %s: the backend's output is illegal: %s", self.id, error)
        else:
            logger.error("response %s: the backend failed", self.id, exc_info=error)
        return ModelError("The model failed to answer. The server's log has the reason.")

    def _record(self, response: bytes, *, final: bool) -> Record:
        return Record(
            id=self.id,
            previous_id=self.response["previous_response_id"],
            input=self._input,
            response=response,
            item_ids=tuple(_ids(self.context.input, self.response["output"])),
            final=final,
            events=self.events,
            lease=math.inf if self.leases is None else self.leases.until(),
            request=self.request,
            key=self.idempotency_key,
            fingerprint=self.fingerprint,
        )


def _ids(given: Iterable[Any], output: Iterable[dict[str, Any]]) -> Iterable[str]:
    yield from (item.id for item in given)
    yield from (item["id"] for item in output)


async def _told(tell: Tell, events: list[Event]) -> None:
    """Tells; whatever goes wrong there is the reader's trouble and not the backend's."""
    if not events:
        return
    try:
        await tell(events)
    except ClientGone:
        raise
    except Exception as error:
        logger.warning("a client could not be told", exc_info=error)
        raise ClientGone from error


async def _nobody(events: list[Event]) -> None:
    pass
