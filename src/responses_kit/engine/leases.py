"""The leases of the runs of this process: renewed while it lives, and the way to hear of a cancellation elsewhere."""

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

_LOOK_SECONDS: Final = 0.5
"""How often a run's record is looked at. A cancelled response shall free its slot within a second."""

_NUMBERS = itertools.count()

Key = tuple[str, str]
"""A response's owner and id."""


class LeaseHolder(Protocol):
    """What is at work on a record."""

    @property
    def key(self) -> Key:
        """Whose record it is, and its id."""

    def cancel(self) -> None:
        """The record is to be cancelled, or has been ended by somebody else."""


@dataclass(slots=True)
class _Here:
    """What is held on one event loop, and whether a task keeps it, and another one sweeps."""

    # Weak, for a run that its host drops before it is executed never says that it is over.
    held: weakref.WeakValueDictionary[Key, LeaseHolder] = field(default_factory=weakref.WeakValueDictionary)
    kept: bool = False
    swept: bool = False


class LeaseRenewer:
    """Keeps the leases of what is at work in this process, on each event loop for itself.

    Args:
        records: Where the records are.
        seconds: How long a lease is.
        clock: Seconds since the epoch.
    """

    def __init__(self, repository: Repository, *, duration: float, clock: Callable[[], float] = time.time) -> None:
        self.duration = duration
        self._repository, self._clock = repository, clock
        repository.is_ours = lambda key: self.find(key) is not None
        self._loops: anyio.lowlevel.RunVar[_Here] = anyio.lowlevel.RunVar(
            f"responses_kit.engine.leases.{next(_NUMBERS)}"  # anyio knows them by name
        )

    def next_expiry(self) -> float:
        """When a lease that is taken now ends."""
        return self._clock() + self.duration

    def find(self, key: Key) -> LeaseHolder | None:
        """What is at work on a record on this event loop."""
        return self._here().held.get(key)

    def add(self, held: LeaseHolder) -> None:
        """Work on a record begins, whose lease was just taken."""
        here = self._here()
        here.held[held.key] = held
        if not here.kept:
            here.kept = True
            spawn(self._keep, here)

    def discard(self, held: LeaseHolder) -> None:
        """The record is final, or somebody else's."""
        self._here().held.pop(held.key, None)

    def _here(self) -> _Here:
        here = self._loops.get(None)
        if here is None:
            self._loops.set(here := _Here())
        return here

    async def _keep(self, here: _Here) -> None:
        renewed = self._clock()
        try:
            while here.held:
                await anyio.sleep(_LOOK_SECONDS)
                now = self._clock()
                due = now - renewed >= self.duration / 3
                if await self._look(dict(here.held), here, now + self.duration if due else None) and due:
                    renewed = now
        finally:
            here.kept = False

    async def _look(self, looked: dict[Key, LeaseHolder], here: _Here, until: float | None) -> bool:
        """Renews, where a time is given, and cancels what is to be cancelled; whether the store did its part."""
        try:
            alive = await call_store(self._repository.store.renew(looked.keys(), until)) if looked else set()
            for key, held in looked.items():
                if key not in alive and here.held.get(key) is held:
                    held.cancel()
        except StoreError:
            return False  # it was logged; leases that can't be renewed run out
        if until is not None and not here.swept:
            here.swept = True
            spawn(self._sweep, here)  # which may take long, where a process has left much
        return True

    async def _sweep(self, here: _Here) -> None:
        try:
            with suppress(StoreError):  # it was logged
                await self._repository.sweep()
        finally:
            here.swept = False
