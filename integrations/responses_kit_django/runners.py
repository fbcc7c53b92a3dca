"""Background responses on the workers of Django's tasks framework: `django.tasks`, or for Django 5 `django_tasks`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from responses_kit.engine.run import Run
from responses_kit.errors import ConfigurationError
from responses_kit.runners.base import LocalRunner, Work, WorkerDispatch

from .scope import DatabaseScope

if TYPE_CHECKING or find_spec("django.tasks"):
    from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, DEFAULT_TASK_QUEUE_NAME, task, task_backends
    from django.tasks.backends.immediate import ImmediateBackend
else:
    try:
        from django_tasks import DEFAULT_TASK_BACKEND_ALIAS, DEFAULT_TASK_QUEUE_NAME, task, task_backends
        from django_tasks.backends.immediate import ImmediateBackend
    except ModuleNotFoundError as missing:
        raise ImportError("Before Django 6, its tasks are a package: pip install django-tasks") from missing

__all__ = ["TaskRunner"]


class TaskRunner:
    """Gives background responses to workers of Django's tasks framework, such as `manage.py db_worker`.

    They make the kit of the setting `RESPONSES_KIT` themselves, and the store has to be one that all processes share.
    What a worker is given is only an owner and an id. The `ImmediateBackend`, which is there for development and has
    no workers, leaves the responses to this process, as if there were no runner.

    Args:
        queue_timeout: Seconds that a response may wait for a worker.
        backend: Which of the setting `TASKS`.
        queue_name: That of the tasks, one of the backend's `QUEUES`.
        priority: That of the tasks, where the backend knows any.
    """

    is_out_of_process = True

    def __init__(
        self,
        *,
        queue_timeout: float = 3600.0,
        backend: str = DEFAULT_TASK_BACKEND_ALIAS,
        queue_name: str = DEFAULT_TASK_QUEUE_NAME,
        priority: int = 0,
    ) -> None:
        self.queue_timeout = queue_timeout
        self._options: dict[str, Any] = {"backend": backend, "queue_name": queue_name, "priority": priority}
        self._here = LocalRunner()
        self._handover = WorkerDispatch()

    @property
    def has_workers(self) -> bool:
        """Whether there are other processes that work."""
        return not isinstance(task_backends[self._options["backend"]], ImmediateBackend)

    def as_task(self, function: Callable[[str, str], None]) -> Any:
        """A function, as the task that is handed over.

        Raises:
            ConfigurationError: The setting `TASKS` has no such backend, or queue.
        """
        try:
            return task(**self._options)(function)
        except Exception as error:  # of the framework's, whose names differ
            raise ConfigurationError(f"the options of TaskRunner do not fit the setting TASKS: {error}") from error

    def bind(self, work: Work) -> None:
        """As `Runner.bind`. Workers have no use for it: they import `tasks`.

        Raises:
            ConfigurationError: The setting `TASKS` has no such backend, or queue.
        """
        self._here.bind(work)
        _task(self)

    async def submit(self, run: Run) -> None:
        """As `Runner.submit`.

        Raises:
            ServerError: The queue cannot be reached.
        """
        if not self.has_workers:
            await self._here.submit(run)
            return
        await self._handover.send(run, functools.partial(self._enqueue, run.owner, run.id))

    def _enqueue(self, owner: str, response_id: str) -> None:
        with DatabaseScope().thread_scope():
            _task(self).enqueue(owner, response_id)


def _task(runner: TaskRunner) -> Any:
    from . import tasks  # which asks the settings for a runner itself

    return runner.as_task(tasks.function)
