"""Leases of the runs and queued responses of this process.

The renewer also detects responses that other processes have cancelled or ended, and sweeps orphaned responses.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
import anyio.lowlevel

from .._concurrency.tasks import spawn
from ..errors import StoreError
from ..stores.protocol import call_store
from .repository import Repository

__all__ = ["LeaseHolder", "LeaseRenewer"]

logger = logging.getLogger("responses_kit")

_CHECK_INTERVAL: Final = 0.5
"""Seconds between checks of the records, so that a response cancelled elsewhere frees its slot within a second."""

_RUN_VAR_NUMBERS = itertools.count()
"""anyio identifies a `RunVar` by its name, so that each instance needs its own."""

Key = tuple[str, str]
"""A response's owner and id."""


class LeaseHolder(Protocol):
    """A run or a queued response that holds the lease of a record."""

    @property
    def key(self) -> Key:
        """The owner and the id of the response."""

    def cancel(self) -> None:
        """Stop the work, because the response was cancelled, or another process has ended it."""


@dataclass(slots=True)
class _LoopState:
    """The leases on one event loop, and whether its tasks for renewing and sweeping are running."""

    # Weak, because a host may drop a run before executing it, and such a run is never discarded.
    holders: weakref.WeakValueDictionary[Key, LeaseHolder] = field(default_factory=weakref.WeakValueDictionary)
    is_renewing: bool = False
    is_sweeping: bool = False


class LeaseRenewer:
    """Renews the leases of runs and queued responses, separately on each event loop.

    Args:
        repository: Holds the records; learns from here which responses are local.
        duration: Seconds until a lease expires.
        clock: Seconds since the epoch.
    """

    def __init__(self, repository: Repository, *, duration: float, clock: Callable[[], float] = time.time) -> None:
        self.duration = duration
        self._repository, self._clock = repository, clock
        repository.is_local = lambda key: self.find(key) is not None
        self._loops: anyio.lowlevel.RunVar[_LoopState] = anyio.lowlevel.RunVar(
            f"responses_kit.engine.leases.{next(_RUN_VAR_NUMBERS)}"
        )

    def next_expiry(self) -> float:
        """Return the time, in seconds since the epoch, at which a lease taken now expires."""
        return self._clock() + self.duration

    def find(self, key: Key) -> LeaseHolder | None:
        """Return the holder of a response's lease on this event loop, if any."""
        return self._state().holders.get(key)

    def add(self, holder: LeaseHolder) -> None:
        """Start to renew a lease that was just taken; `discard` stops it."""
        state = self._state()
        state.holders[holder.key] = holder
        if not state.is_renewing:
            state.is_renewing = True
            spawn(self._renew_periodically, state)

    def discard(self, holder: LeaseHolder) -> None:
        """Stop renewing a lease."""
        self._state().holders.pop(holder.key, None)

    def _state(self) -> _LoopState:
        state = self._loops.get(None)
        if state is None:
            self._loops.set(state := _LoopState())
        return state

    async def _renew_periodically(self, state: _LoopState) -> None:
        renewed_at = self._clock()
        try:
            while state.holders:
                await anyio.sleep(_CHECK_INTERVAL)
                now = self._clock()
                is_due = now - renewed_at >= self.duration / 3
                if await self._check(dict(state.holders), state, now + self.duration if is_due else None) and is_due:
                    renewed_at = now
        finally:
            state.is_renewing = False

    async def _check(self, holders: dict[Key, LeaseHolder], state: _LoopState, until: float | None) -> bool:
        """Renew the leases and stop the holders of responses that were cancelled or ended elsewhere.

        Args:
            holders: The holders at the time of the check.
            state: The state of this event loop.
            until: Expiry of the renewed leases, in seconds since the epoch; None to check without renewing.

        Returns:
            Whether the store answered.
        """
        try:
            alive = await call_store(self._repository.store.renew(holders.keys(), until)) if holders else set()
            for key, holder in holders.items():
                if key not in alive and state.holders.get(key) is holder:
                    holder.cancel()
        except StoreError:
            return False  # already logged; retried at the next check
        if until is not None and not state.is_sweeping:
            state.is_sweeping = True
            spawn(self._sweep, state)  # in its own task, because many orphaned responses must not delay renewals
        return True

    async def _sweep(self, state: _LoopState) -> None:
        try:
            with suppress(StoreError):  # already logged
                await self._repository.sweep()
        finally:
            state.is_sweeping = False
