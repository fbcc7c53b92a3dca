"""Background responses on workers of Django's tasks framework: `django.tasks`, or `django_tasks` before Django 6."""

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
        raise ImportError("TaskRunner needs Django 6 or django-tasks: pip install django-tasks") from missing

__all__ = ["TaskRunner"]


class TaskRunner:
    """A runner that sends background responses to workers of Django's tasks framework, such as `manage.py db_worker`.

    A task carries only an owner and an id. Workers create their kit from the setting `RESPONSES_KIT`, so the store must
    be one that all processes share. With the `ImmediateBackend`, which has no workers, background responses run in this
    process as if there were no runner.

    Args:
        queue_timeout: Seconds that a response may wait for a worker before it fails.
        backend: The alias of a backend in the setting `TASKS`.
        queue_name: The queue of the tasks, one of the backend's `QUEUES`.
        priority: The priority of the tasks, if the backend supports priorities.
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
        self._local = LocalRunner()
        self._dispatch = WorkerDispatch()

    @property
    def has_workers(self) -> bool:
        """Whether the tasks backend has worker processes."""
        return not isinstance(task_backends[self._options["backend"]], ImmediateBackend)

    def as_task(self, function: Callable[[str, str], None]) -> Any:
        """Return a function as a task with this runner's options.

        Raises:
            ConfigurationError: The setting `TASKS` has no such backend or queue.
        """
        try:
            return task(**self._options)(function)
        except Exception as error:  # django.tasks and django_tasks raise different classes
            raise ConfigurationError(f"the options of TaskRunner do not match the setting TASKS: {error}") from error

    def bind(self, work: Work) -> None:
        """Bind the kit's function for runs in this process; see `Runner.bind`. Workers import `tasks` instead.

        Raises:
            ConfigurationError: The setting `TASKS` has no such backend or queue.
        """
        self._local.bind(work)
        _create_task(self)

    async def submit(self, run: Run) -> None:
        """Submit a run to the workers; see `Runner.submit`.

        Raises:
            ServerError: The queue cannot be reached.
        """
        if not self.has_workers:
            await self._local.submit(run)
            return
        await self._dispatch.send(run, functools.partial(self._enqueue, run.owner, run.id))

    def _enqueue(self, owner: str, response_id: str) -> None:
        with DatabaseScope().thread_scope():
            _create_task(self).enqueue(owner, response_id)


def _create_task(runner: TaskRunner) -> Any:
    from . import tasks  # late, because it creates the runner of the settings when it is imported

    return runner.as_task(tasks.work_function)
