"""Who works on background responses: this process, or a fleet of workers behind a small seam."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread

from .._concurrency.tasks import spawn
from .._concurrency.threads import ThreadLimiter
from ..context.builder import Context
from ..engine.leases import LeaseRenewer
from ..engine.registry import SHUTTING_DOWN, RunRegistry
from ..engine.repository import Repository
from ..engine.run import Run, discard_events
from ..errors import ServerError, StoreError, TooManyRequests
from ..schema.request import CreateRequest

__all__ = ["LocalRunner", "Runner", "Work", "WorkerDispatch", "encode_request"]

logger = logging.getLogger("responses_kit")

Work = Callable[[str, str], Awaitable[None]]
"""`ResponsesKit.work`: generates the response of this owner and id, which waits in the store."""


class Runner(Protocol):
    """Sees to it that a queued response is worked on.

    Attributes:
        queue_timeout: Seconds that a response may wait for a worker; then it has failed.
    """

    queue_timeout: float

    def bind(self, work: Work) -> None:
        """Called by the kit that the runner is given to. Where kits are made anew, the last one counts.

        Args:
            work: What a worker has to call, in whatever process it is, with the owner and the id.
        """

    async def submit(self, run: Run) -> None:
        """Takes over a response whose record is in the store, queued, and returns soon.

        A worker may be given the same response several times; all but the first call of `work` do nothing. A worker
        in this very process may `hold` and `execute` the run itself.

        Raises:
            APIError: There is no room, or no worker can be reached.
        """


@dataclass(slots=True)
class _Room:
    """What one event loop works on."""

    places: anyio.Semaphore
    taken: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Waiting:
    """A response that waits for a place. What it was asked for with is in the store; here it would only take room."""

    key: tuple[str, str]
    records: Repository
    leases: LeaseRenewer | None
    open: RunRegistry
    stopped: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def cancel(self) -> None:
        """Somebody else has ended it."""
        self.scope.cancel()

    def stop(self) -> None:
        """The server goes down."""
        self.stopped = True
        self.scope.cancel()

    def join(self) -> None:
        """It begins to wait."""
        self.open.add(self)
        if self.leases is not None:
            self.leases.add(self)

    def leave(self) -> None:
        """It waits no more."""
        self.open.discard(self)
        if self.leases is not None:
            self.leases.discard(self)

    async def give_up(self) -> None:
        """Ends it, for the server goes down before its turn has come."""
        owner, response_id = self.key
        with anyio.CancelScope(shield=True), suppress(StoreError):
            record = await self.records.get(owner, response_id)
            if record is not None:
                await self.records.end(owner, record, ServerError(SHUTTING_DOWN), queued=True)


_NUMBERS = itertools.count()


class LocalRunner:
    """Works in this process, on the event loop that was asked. What it works on ends with the process.

    Args:
        at_once: Most responses that are worked on at the same time.
        waiting: Most responses that wait for their turn; beyond it the client is told of too many requests.
    """

    queue_timeout = 60.0  # of no matter, for this process holds the leases of what waits in it

    def __init__(self, *, max_concurrent: int = 64, max_queued: int = 1000) -> None:
        self._at_once, self._waiting = max_concurrent, max_queued
        self._work: Work | None = None
        self._rooms: anyio.lowlevel.RunVar[_Room] = anyio.lowlevel.RunVar(
            f"responses_kit.runner.{next(_NUMBERS)}"  # anyio knows them by name
        )

    def bind(self, work: Work) -> None:
        """As `Runner.bind`."""
        self._work = work

    async def submit(self, run: Run) -> None:
        """As `Runner.submit`.

        Raises:
            TooManyRequests: As many wait as may.
        """
        room = self._rooms.get(None)
        if room is None:
            self._rooms.set(room := _Room(anyio.Semaphore(self._at_once)))
        records = run.recorder.repository
        assert records is not None
        # What is not queued can't be made anew from the store: each that waits takes all the room of its conversation.
        if room.taken >= self._at_once + (self._waiting if run.is_queued else min(self._waiting, self._at_once)):
            raise TooManyRequests("Too many responses are waiting.", retry_after=10)
        if room.taken < self._at_once or not run.is_queued:
            run.claim()
            work = functools.partial(run.execute, discard_events, place=room.places)
        else:
            waiting = _Waiting(run.key, records, run.recorder.leases, run.registry)
            waiting.join()
            work = functools.partial(self._wait, waiting, room)
        room.taken += 1
        spawn(self._execute, work, room)

    async def _execute(self, work: Callable[[], Awaitable[None]], room: _Room) -> None:
        try:
            await work()
        finally:
            room.taken -= 1

    async def _wait(self, waiting: _Waiting, room: _Room) -> None:
        assert self._work is not None
        try:
            with waiting.scope:
                async with room.places:
                    waiting.leave()
                    if not waiting.open.is_closed:
                        await self._work(*waiting.key)
                        return
                    waiting.stopped = True
            if waiting.stopped:
                await waiting.give_up()
        finally:
            waiting.leave()


_HANDOVER_SECONDS: Final = 10.0
"""How long a task may take to be handed to a queue."""

_MOST_SENDING: Final = 16
"""Threads that hand tasks over at the same time."""


class WorkerDispatch:
    """The way of a response to a queue of tasks, whose client waits in threads."""

    def __init__(self) -> None:
        self._threads = ThreadLimiter(_MOST_SENDING)

    async def send(self, run: Run, send: Callable[[], object]) -> None:
        """Hands a response over.

        Args:
            run: The response.
            send: Gives the queue its task; called in a thread.

        Raises:
            ServerError: The queue cannot be reached.
        """
        try:
            # A queue that does not answer may hold its thread, but not whoever waits, nor the threads of others.
            with anyio.fail_after(_HANDOVER_SECONDS):
                await anyio.to_thread.run_sync(send, abandon_on_cancel=True, limiter=self._threads.current())
        except Exception as error:
            logger.error("response %s could not be given to a worker: %s", run.id, error or type(error).__name__)
            raise ServerError("The server's task queue is out of reach. Try again.") from error


def encode_request(request: CreateRequest, context: Context) -> bytes:
    """The request for whoever generates the response, with what was promised where it leaves the choice."""
    turn = context.turn
    promised = {
        "model": turn.model,
        "temperature": turn.temperature,
        "top_p": turn.top_p,
        "presence_penalty": turn.presence_penalty,
        "frequency_penalty": turn.frequency_penalty,
        "max_output_tokens": turn.max_output_tokens,
    }
    return request.model_copy(update=promised).model_dump_json(exclude={"input"}, by_alias=True).encode()
