"""Who works on background responses: this process, or a fleet of workers behind a small seam."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.lowlevel

from ..companion import detach
from ..context import Context
from ..errors import TooManyRequests
from ..runs import Run
from ..schema.request import CreateRequest

__all__ = ["LocalRunner", "Runner", "Work", "for_workers"]

Work = Callable[[str, str], Awaitable[None]]
"""`ResponsesKit.work`: generates the response of this owner and id, which waits in the store."""


class Runner(Protocol):
    """Sees to it that a queued response is worked on.

    Attributes:
        patience: Seconds that a response may wait for a worker; then it has failed.
    """

    patience: float

    def bind(self, work: Work) -> None:
        """Called once, by the kit that the runner is given to.

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


_NUMBERS = itertools.count()


class LocalRunner:
    """Works in this process, on the event loop that was asked. What it works on ends with the process.

    Args:
        at_once: Most responses that are worked on at the same time.
        waiting: Most responses that wait for their turn; beyond it the client is told of too many requests.
    """

    patience = 60.0  # of no matter, for this process holds the leases of what waits in it

    def __init__(self, *, at_once: int = 64, waiting: int = 1000) -> None:
        self._at_once, self._waiting = at_once, waiting
        self._rooms: anyio.lowlevel.RunVar[_Room] = anyio.lowlevel.RunVar(
            f"responses_kit.runner.{next(_NUMBERS)}"  # anyio knows them by name
        )

    def bind(self, work: Work) -> None:
        """Needs nothing: the run itself is executed."""

    async def submit(self, run: Run) -> None:
        """As `Runner.submit`.

        Raises:
            TooManyRequests: As many wait as may.
        """
        room = self._rooms.get(None)
        if room is None:
            self._rooms.set(room := _Room(anyio.Semaphore(self._at_once)))
        if room.taken >= self._at_once + self._waiting:
            raise TooManyRequests("Too many background responses are waiting.", retry_after=10)
        run.hold()
        room.taken += 1
        detach(self._execute, run, room)

    async def _execute(self, run: Run, room: _Room) -> None:
        try:
            await run.execute(_nobody, place=room.places)
        finally:
            room.taken -= 1


async def _nobody(events: object) -> None:
    pass


def for_workers(request: CreateRequest, context: Context) -> bytes:
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
