"""Runners of background responses, in this process or on other workers."""

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
"""`ResponseService.run_queued`: generates the queued response with this owner and id."""


class Runner(Protocol):
    """Assigns queued responses to workers.

    Attributes:
        queue_timeout: Seconds that a response may wait for a worker; after that it fails.
    """

    queue_timeout: float

    def bind(self, work: Work) -> None:
        """Set the function that workers call. A kit calls this when it is created; the latest function is used.

        Args:
            work: Generates a response; workers in any process call it with the owner and the id.
        """

    async def submit(self, run: Run) -> None:
        """Accept a response that is queued in the store, and return without waiting for it.

        A worker may receive the same response several times; all calls of `work` except the first one do nothing. A
        runner may also `claim` and `execute` the run in this process.

        Raises:
            APIError: The queue is full or cannot be reached.
        """


@dataclass(slots=True)
class _LoopState:
    """The responses on one event loop: free slots, and the number of running and waiting responses."""

    slots: anyio.Semaphore
    count: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class _QueuedResponse:
    """A response that waits for a slot. Its request is read from the store then, to save memory here."""

    key: tuple[str, str]
    repository: Repository
    leases: LeaseRenewer | None
    registry: RunRegistry
    is_stopped: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def cancel(self) -> None:
        """Stop waiting, because the response was cancelled, or another process has ended it."""
        self.scope.cancel()

    def stop(self) -> None:
        """Stop waiting and fail the response, because the server shuts down."""
        self.is_stopped = True
        self.scope.cancel()

    def register(self) -> None:
        """Register the response and its lease in this process."""
        self.registry.add(self)
        if self.leases is not None:
            self.leases.add(self)

    def unregister(self) -> None:
        """Undo `register`."""
        self.registry.discard(self)
        if self.leases is not None:
            self.leases.discard(self)

    async def fail(self) -> None:
        """End the response as failed because the server shuts down."""
        owner, response_id = self.key
        with anyio.CancelScope(shield=True), suppress(StoreError):
            record = await self.repository.get(owner, response_id)
            if record is not None:
                await self.repository.end(owner, record, ServerError(SHUTTING_DOWN), only_queued=True)


_RUN_VAR_NUMBERS = itertools.count()
"""anyio identifies a `RunVar` by its name, so that each instance needs its own."""


class LocalRunner:
    """Runs background responses in this process, on the event loop of their requests. They end with the process.

    Args:
        max_concurrent: Responses that run at the same time on one event loop.
        max_queued: Responses that wait for a slot on one event loop. Further ones get a 429.
    """

    queue_timeout = 60.0  # does not apply: this process renews the leases of queued responses

    def __init__(self, *, max_concurrent: int = 64, max_queued: int = 1000) -> None:
        self._max_concurrent, self._max_queued = max_concurrent, max_queued
        self._work: Work | None = None
        self._loops: anyio.lowlevel.RunVar[_LoopState] = anyio.lowlevel.RunVar(
            f"responses_kit.runner.{next(_RUN_VAR_NUMBERS)}"
        )

    def bind(self, work: Work) -> None:
        """Set the function that generates queued responses; see `Runner.bind`."""
        self._work = work

    async def submit(self, run: Run) -> None:
        """Run a response now, or once a slot is free; see `Runner.submit`.

        Raises:
            TooManyRequests: The queue is full.
        """
        state = self._loops.get(None)
        if state is None:
            self._loops.set(state := _LoopState(anyio.Semaphore(self._max_concurrent)))
        repository = run.recorder.repository
        assert repository is not None
        # A run that is not queued in the store holds its whole conversation in memory while it waits.
        max_queued = self._max_queued if run.is_queued else min(self._max_queued, self._max_concurrent)
        if state.count >= self._max_concurrent + max_queued:
            raise TooManyRequests("Too many responses are waiting.", retry_after=10)
        if state.count < self._max_concurrent or not run.is_queued:
            run.register()
            work = functools.partial(run.execute, discard_events, slot=state.slots)
        else:
            queued = _QueuedResponse(run.key, repository, run.recorder.leases, run.registry)
            queued.register()
            work = functools.partial(self._run_when_free, queued, state)
        state.count += 1
        spawn(self._execute, work, state)

    async def _execute(self, work: Callable[[], Awaitable[None]], state: _LoopState) -> None:
        try:
            await work()
        finally:
            state.count -= 1

    async def _run_when_free(self, queued: _QueuedResponse, state: _LoopState) -> None:
        assert self._work is not None
        try:
            with queued.scope:
                async with state.slots:
                    queued.unregister()
                    if not queued.registry.is_closed:
                        await self._work(*queued.key)
                        return
                    queued.is_stopped = True
            if queued.is_stopped:
                await queued.fail()
        finally:
            queued.unregister()


_SEND_TIMEOUT: Final = 10.0
"""Seconds that sending a task to a queue may take; after that the submission fails."""

_MAX_SEND_THREADS: Final = 16
"""Tasks that are sent at the same time."""


class WorkerDispatch:
    """Sends responses to a task queue with a blocking client, which is called in threads."""

    def __init__(self) -> None:
        self._threads = ThreadLimiter(_MAX_SEND_THREADS)

    async def send(self, run: Run, send: Callable[[], object]) -> None:
        """Send a response to the queue.

        Args:
            run: The run of the response.
            send: Sends the task; called in a thread.

        Raises:
            ServerError: The queue cannot be reached.
        """
        try:
            # If the queue does not answer, the thread is abandoned: the client must not wait for it.
            with anyio.fail_after(_SEND_TIMEOUT):
                await anyio.to_thread.run_sync(send, abandon_on_cancel=True, limiter=self._threads.current())
        except Exception as error:
            logger.error("response %s could not be sent to a worker: %s", run.id, error or type(error).__name__)
            raise ServerError("The server's task queue is out of reach. Try again.") from error


def encode_request(request: CreateRequest, context: Context) -> bytes:
    """Return a request without its input as JSON, for a worker.

    Parameters that the request leaves open are filled in from its context, because the queued response shows them.
    """
    turn = context.turn
    resolved = {
        "model": turn.model,
        "temperature": turn.temperature,
        "top_p": turn.top_p,
        "presence_penalty": turn.presence_penalty,
        "frequency_penalty": turn.frequency_penalty,
        "max_output_tokens": turn.max_output_tokens,
    }
    return request.model_copy(update=resolved).model_dump_json(exclude={"input"}, by_alias=True).encode()
