"""Background responses on Celery workers: any of them may work on one, any process may follow or cancel it."""

from __future__ import annotations

import functools
from typing import Any

try:
    from celery import Celery
except ModuleNotFoundError as missing:
    raise ImportError('Celery is missing: pip install "responses-kit[celery]"') from missing

from .._concurrency.loop_thread import call
from ..engine.run import Run
from ..errors import StoreError
from .base import Work, WorkerDispatch

__all__ = ["CeleryRunner"]


class CeleryRunner:
    """Gives background responses to Celery workers, which import the module that makes the kit.

    The kit's store has to be one that all processes share. What a worker was given is only an owner and an id; all
    else is in the store. Each worker process runs one event loop for all that it works on.

    Args:
        app: Your Celery app.
        name: The task's name.
        queue_timeout: Seconds that a response may wait for a worker.
        options: Passed on to `apply_async`, such as `queue="responses"`.
    """

    is_out_of_process = True

    def __init__(
        self, app: Celery, *, name: str = "responses_kit.work", queue_timeout: float = 3600.0, **options: Any
    ) -> None:
        self.queue_timeout = queue_timeout
        self._app, self._name, self._options = app, name, options
        self._task: Any = None
        self._handover = WorkerDispatch()

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
            self._task.apply_async, (run.owner, run.id), expires=self.queue_timeout, retry=False, **self._options
        )
        await self._handover.send(run, send)
