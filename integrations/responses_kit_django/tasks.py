"""What the workers of a queue import: those of Django's tasks framework, and Celery's by `app.autodiscover_tasks()`.

No kit is made here, so that processes may be forked after it: each makes its own once it is given a response.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import anyio.to_thread

from responses_kit import blocking
from responses_kit.errors import StoreError
from responses_kit.kit import ResponsesKit
from responses_kit.runners import Runner, Work
from responses_kit.runs import Run

from .conf import Conf, kit

__all__ = ["elsewhere", "generate", "work"]

logger = logging.getLogger("responses_kit")

_PAUSES: Final = (1.0, 5.0, 15.0, 30.0)
"""Seconds after which a store that has failed is tried again. Django's tasks are not repeated."""


async def generate(owner: str, response_id: str) -> None:
    """As `ResponsesKit.work` of the project's kit, which lives on this process's event loop from then on."""
    found = await anyio.to_thread.run_sync(_living)
    await found.work(owner, response_id)


def _living() -> ResponsesKit:
    found = kit()
    blocking.enter(found)
    return found


def work(owner: str, response_id: str) -> None:
    """Generates a response that waits in the store: what a worker of Django's tasks framework calls.

    Args:
        owner: Whose response it is.
        response_id: Its id.

    Raises:
        StoreError: The store is out of reach, and stays so.
    """
    for pause in _PAUSES:
        try:
            return blocking.call(generate, owner, response_id)
        except StoreError as error:
            logger.warning("response %s is tried again in %s s: %s", response_id, pause, error)
            time.sleep(pause)
    return blocking.call(generate, owner, response_id)


function = work
"""The same, of which a task with other options can be made."""


def elsewhere(runner: Any) -> Any:
    """A runner whose workers import this module, as the kit gets it."""
    return runner if hasattr(runner, "as_task") else _Elsewhere(runner)


class _Elsewhere:
    """Tells a runner once what its workers are to call, whether there is a kit yet or not."""

    leaves_the_process = True

    def __init__(self, runner: Runner) -> None:
        self.patience = runner.patience
        self._runner = runner

    def bind(self, work: Work) -> None:
        """As `Runner.bind`."""
        if self._runner not in _bound:
            _bound.append(self._runner)
            self._runner.bind(generate)

    async def submit(self, run: Run) -> None:
        """As `Runner.submit`."""
        await self._runner.submit(run)


_bound: list[Runner] = []


_runner: Any = Conf().runner()
if hasattr(_runner, "as_task"):
    work = _runner.as_task(work)  # by this name it is looked for
elif getattr(_runner, "leaves_the_process", False):
    elsewhere(_runner).bind(generate)
