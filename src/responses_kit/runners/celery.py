"""Background responses on Celery workers."""

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
    """Sends background responses to Celery workers, which import the module that creates the kit.

    All processes must share the kit's store: a task holds only an owner and an id. Any process can follow or cancel a
    response. Each worker process runs its responses on one event loop.

    Args:
        app: Your Celery app.
        name: The task's name.
        queue_timeout: Seconds that a response may wait for a worker.
        options: Passed to `apply_async`, such as `queue="responses"`.
    """

    is_out_of_process = True

    def __init__(
        self, app: Celery, *, name: str = "responses_kit.work", queue_timeout: float = 3600.0, **options: Any
    ) -> None:
        self.queue_timeout = queue_timeout
        self._app, self._name, self._options = app, name, options
        self._task: Any = None
        self._dispatch = WorkerDispatch()

    def bind(self, work: Work) -> None:
        """Register the task once, and set the function that it calls; see `Runner.bind`."""
        self._work = work
        if self._task is not None:
            return

        def task(owner: str, response_id: str) -> None:
            call(self._work, owner, response_id)

        register = self._app.task(
            name=self._name,
            ignore_result=True,
            # Acknowledged late, so that another worker gets the tasks that a dying worker has not started.
            acks_late=True,
            reject_on_worker_lost=True,
            autoretry_for=(StoreError,),
            max_retries=None,
            retry_backoff=1,
            retry_backoff_max=30,
        )
        self._task = register(task)

    async def submit(self, run: Run) -> None:
        """Send a response to the broker; see `Runner.submit`.

        Raises:
            ServerError: The broker cannot be reached.
        """
        send = functools.partial(
            self._task.apply_async, (run.owner, run.id), expires=self.queue_timeout, retry=False, **self._options
        )
        await self._dispatch.send(run, send)
