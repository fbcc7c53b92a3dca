"""The engines of one model, each used for one answer at a time, and the queue of requests for them."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from ....errors import ServerError, TooManyRequests
from .engine import Engine, common_prefix_length

__all__ = ["EnginePool", "Reservation"]

_CANCELLATION_POLL_INTERVAL = 0.1
"""Seconds between two checks whether a waiting request was cancelled."""


class Reservation:
    """The right to acquire an engine later. It expires when it is garbage-collected."""

    __slots__ = ("__weakref__",)


class _Waiter:
    """A call of `acquire` in the queue.

    Attributes:
        ready: Set when the wait is over.
        engine: The acquired engine, or None if the pool was closed.
    """

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.engine: Engine | None = None


class EnginePool:
    """A thread-safe pool of engines with a first-in, first-out queue.

    Args:
        engines: All engines of one model.
        queue: The maximum number of requests that wait while all engines are in use.
    """

    def __init__(self, engines: Sequence[Engine], *, queue: int) -> None:
        self._lock = threading.Lock()
        self._idle = list(engines)  # the engine that has been idle the longest comes first
        self._engine_count = len(engines)
        self._queue = queue
        self._waiters: deque[_Waiter] = deque()
        self._reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()
        self._acquired_at: dict[int, float] = {}
        self._average_use = 1.0  # seconds, a moving average
        self._closed = False

    def reserve(self, *, force: bool = False) -> Reservation:
        """Reserve an engine or a place in the queue for a later call of `acquire`.

        Args:
            force: Succeed even if the queue is full.

        Raises:
            TooManyRequests: All engines and all places in the queue are in use or reserved.
        """
        with self._lock:
            if not force:
                self._check_capacity()
            reservation = Reservation()
            self._reservations.add(reservation)
            return reservation

    def acquire(
        self, tokens: Sequence[int], is_cancelled: Callable[[], bool], reservation: Reservation | None = None
    ) -> Engine | None:
        """Wait for an engine. Among idle engines, prefer the one with the longest prefix of the prompt in its state.

        Args:
            tokens: The prompt.
            is_cancelled: Returns whether the request was cancelled; called several times a second during the wait.
            reservation: The result of `reserve`, which this call consumes. Without it, the queue must have a free
                place.

        Returns:
            An engine to be returned with `release`, or None if the request was cancelled.

        Raises:
            TooManyRequests: All engines are in use and the queue is full.
            ServerError: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise _shutting_down()
            if reservation is None:
                self._check_capacity()
            else:
                self._reservations.discard(reservation)
            if self._idle:
                engine = max(self._idle, key=lambda idle: _count_reusable(idle, tokens))
                self._idle.remove(engine)
                self._acquired_at[id(engine)] = time.monotonic()
                return engine
            waiter = _Waiter()
            self._waiters.append(waiter)
        try:
            while not waiter.ready.wait(_CANCELLATION_POLL_INTERVAL):
                if is_cancelled():
                    self._remove(waiter)
                    return None
        except BaseException:
            self._remove(waiter)
            raise
        if waiter.engine is None:
            raise _shutting_down()
        return waiter.engine

    def release(self, engine: Engine) -> None:
        """Return an engine, which goes to the request that has waited the longest."""
        with self._lock:
            now = time.monotonic()
            self._average_use += (now - self._acquired_at.pop(id(engine), now) - self._average_use) * 0.2
            if self._closed:
                engine.close()
            elif self._waiters:
                waiter = self._waiters.popleft()
                self._acquired_at[id(engine)] = now
                waiter.engine = engine
                waiter.ready.set()
            else:
                self._idle.append(engine)

    def close(self) -> None:
        """Free idle engines now and the rest when they are released, and fail all waiting requests."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            while self._waiters:
                self._waiters.popleft().ready.set()

    def _remove(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            engine, waiter.engine = waiter.engine, None
        if engine is not None:  # `release` chose this waiter at the same moment
            self.release(engine)

    def _check_capacity(self) -> None:
        ahead = len(self._waiters) + len(self._reservations)
        if ahead >= len(self._idle) + self._queue:
            seconds = min(60, max(1, math.ceil(self._average_use * (ahead + 1) / self._engine_count)))
            raise TooManyRequests("The model is busy and its queue is full. Try again later.", retry_after=seconds)


def _shutting_down() -> ServerError:
    return ServerError("The model is shutting down.")


def _count_reusable(engine: Engine, tokens: Sequence[int]) -> int:
    """Return the number of tokens that need no evaluation, or 0 if most of the engine's state would be discarded.

    Otherwise the short prefix that all prompts of an app share would send each new conversation to an engine with a
    long one, while another engine is idle.
    """
    reusable = common_prefix_length(engine.tokens, tokens)
    return reusable if 2 * reusable >= len(engine.tokens) else 0
