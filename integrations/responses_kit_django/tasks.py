"""The entry points of queue workers: Django's tasks framework, and Celery by `app.autodiscover_tasks()`.

Importing this module creates no kit, so that workers can be forked afterwards. Each creates its own when it receives
its first response.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from responses_kit._concurrency import loop_thread
from responses_kit.errors import StoreError

from .conf import Conf, bind_runner, run_queued

__all__ = ["work", "work_function"]

logger = logging.getLogger("responses_kit")

_RETRY_DELAYS: Final = (1.0, 5.0, 15.0, 30.0)
"""Seconds before each further attempt if the store fails. Django's tasks framework does not retry by itself."""


def work(owner: str, response_id: str) -> None:
    """Run a queued response in a worker of Django's tasks framework.

    Args:
        owner: The owner of the response.
        response_id: The id of the response.

    Raises:
        StoreError: The store failed at every attempt.
    """
    for delay in _RETRY_DELAYS:
        try:
            return loop_thread.call(run_queued, owner, response_id)
        except StoreError as error:
            logger.warning("response %s: retrying in %s s: %s", response_id, delay, error)
            time.sleep(delay)
    return loop_thread.call(run_queued, owner, response_id)


work_function = work
"""The plain function, from which `TaskRunner` makes tasks with its own options."""


_runner: Any = Conf().get_runner()
if hasattr(_runner, "as_task"):
    work = _runner.as_task(work)  # workers look the task up by this name
elif getattr(_runner, "is_out_of_process", False):
    bind_runner(_runner)
