"""Engines for one model, lent to one answer at a time, and the queue in front of them."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from ....errors import ServerError, TooManyRequests
from .engine import Engine, shared

__all__ = ["Pool", "Ticket"]

_LOOK = 0.1
"""Seconds between two looks at whether somebody who waits has gone."""


class Ticket:
    """The right to acquire an engine, in time; it lapses when it is dropped."""

    __slots__ = ("__weakref__",)


class _Place:
    """A place in the queue."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.engine: Engine | None = None


class Pool:
    """Lends engines, first come, first served; thread-safe.

    Args:
        engines: All engines of one model.
        queue: How many may wait while all engines are lent.
    """

    def __init__(self, engines: Sequence[Engine], *, queue: int) -> None:
        self._lock = threading.Lock()
        self._idle = list(engines)  # the one idle for longest first
        self._count = len(engines)
        self._queue = queue
        self._waiting: deque[_Place] = deque()
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._lent_at: dict[int, float] = {}
        self._usual = 1.0  # seconds that an engine is lent for, a moving average
        self._closed = False

    def admit(self, *, always: bool = False) -> Ticket:
        """Reserves an engine or a place in the queue for somebody who will `acquire` it soon.

        Args:
            always: Make a place where there is none, for somebody who is in the middle of something.

        Raises:
            TooManyRequests: All engines are lent or reserved, and so are all places in the queue.
        """
        with self._lock:
            if not always:
                self._check_room()
            ticket = Ticket()
            self._tickets.add(ticket)
            return ticket

    def acquire(
        self, tokens: Sequence[int], cancelled: Callable[[], bool], ticket: Ticket | None = None
    ) -> Engine | None:
        """Waits for an engine; among idle ones, that whose state the prompt makes most use of.

        Args:
            tokens: The prompt.
            cancelled: Asked several times a second whether there still is a need.
            ticket: What `admit` gave; it is used up. Without one there must be room now.

        Returns:
            An engine to be given back with `release`, or None if there is no need any more.

        Raises:
            TooManyRequests: All engines are lent and the queue is full.
            ServerError: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise ServerError("The model is being shut down.")
            if ticket is None:
                self._check_room()
            else:
                self._tickets.discard(ticket)
            if self._idle:
                engine = max(self._idle, key=lambda idle: _match(idle, tokens))
                self._idle.remove(engine)
                self._lent_at[id(engine)] = time.monotonic()
                return engine
            place = _Place()
            self._waiting.append(place)
        try:
            while not place.called.wait(_LOOK):
                if cancelled():
                    self._leave(place)
                    return None
        except BaseException:
            self._leave(place)
            raise
        if place.engine is None:
            raise ServerError("The model is being shut down.")
        return place.engine

    def release(self, engine: Engine) -> None:
        """Gives an engine back; who waits longest gets it."""
        with self._lock:
            now = time.monotonic()
            self._usual += (now - self._lent_at.pop(id(engine), now) - self._usual) * 0.2
            if self._closed:
                engine.close()
            elif self._waiting:
                place = self._waiting.popleft()
                self._lent_at[id(engine)] = now
                place.engine = engine
                place.called.set()
            else:
                self._idle.append(engine)

    def close(self) -> None:
        """Frees all engines, those that are lent as soon as they come back, and sends away who waits."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            while self._waiting:
                self._waiting.popleft().called.set()

    def _leave(self, place: _Place) -> None:
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
            engine, place.engine = place.engine, None
        if engine is not None:  # it was called in the very moment it left
            self.release(engine)

    def _check_room(self) -> None:
        ahead = len(self._waiting) + len(self._tickets)
        if ahead >= len(self._idle) + self._queue:
            seconds = min(60, max(1, math.ceil(self._usual * (ahead + 1) / self._count)))
            raise TooManyRequests("The model is busy and its queue is full. Try again later.", retry_after=seconds)


def _match(engine: Engine, tokens: Sequence[int]) -> int:
    """Tokens that need no evaluation; 0 where more would be thrown away than kept.

    Otherwise the few words that every prompt of an app begins with would draw each new conversation onto the
    engine that holds a long one, while another stands idle.
    """
    kept = shared(engine.tokens, tokens)
    return kept if 2 * kept >= len(engine.tokens) else 0
