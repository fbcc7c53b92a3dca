"""Background responses on Celery workers: any of them may work on one, any process may follow or cancel it."""

from __future__ import annotations

import functools
import logging
from typing import Any, Final

import anyio.to_thread

try:
    from celery import Celery
except ModuleNotFoundError as missing:
    raise ImportError('Celery is missing: pip install "responses-kit[celery]"') from missing

from ..blocking import call
from ..errors import ServerError, StoreError
from ..runs import Run
from ..worker import Limiter
from . import Work

__all__ = ["CeleryRunner"]

logger = logging.getLogger("responses_kit")

_BROKER_SECONDS: Final = 10.0
"""How long a task may take to be handed to the broker."""

_MOST_SENDING: Final = 16
"""Threads that hand tasks to the broker at the same time."""


class CeleryRunner:
    """Gives background responses to Celery workers, which import the module that makes the kit.

    The kit's store has to be one that all processes share. What a worker was given is only an owner and an id; all
    else is in the store. Each worker process runs one event loop for all that it works on.

    Args:
        app: Your Celery app.
        name: The task's name.
        patience: Seconds that a response may wait for a worker.
        options: Passed on to `apply_async`, such as `queue="responses"`.
    """

    leaves_the_process = True

    def __init__(
        self, app: Celery, *, name: str = "responses_kit.work", patience: float = 3600.0, **options: Any
    ) -> None:
        self.patience = patience
        self._app, self._name, self._options = app, name, options
        self._task: Any = None
        self._threads = Limiter(_MOST_SENDING)

    def bind(self, work: Work) -> None:
        """Registers the task, once; it calls what was bound last."""
        self._work = work
        if self._task is not None:
            return

        def task(owner: str, response_id: str) -> None:
            call(self._work, owner, response_id)

        register = self._app.task(
            name=self._name,
            ignore_result=True,
            # Acknowledged late, so that what a dying worker had not begun goes to another one.
            acks_late=True,
            reject_on_worker_lost=True,
            autoretry_for=(StoreError,),
            max_retries=None,
            retry_backoff=1,
            retry_backoff_max=30,
        )
        self._task = register(task)

    async def submit(self, run: Run) -> None:
        """As `Runner.submit`.

        Raises:
            ServerError: The broker cannot be reached.
        """
        send = functools.partial(
            self._task.apply_async, (run.owner, run.id), expires=self.patience, retry=False, **self._options
        )
        try:
            # A broker that does not answer may hold its thread, but not whoever waits, nor the threads of others.
            with anyio.fail_after(_BROKER_SECONDS):
                await anyio.to_thread.run_sync(send, abandon_on_cancel=True, limiter=self._threads.here())
        except Exception as error:
            logger.error("response %s could not be given to a worker: %s", run.id, error or type(error).__name__)
            raise ServerError("The server's task queue is out of reach. Try again.") from error
