"""What the workers of a queue import: those of Django's tasks framework, and Celery's by `app.autodiscover_tasks()`.

No kit is made here, so that processes may be forked after it: each makes its own once it is given a response.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from responses_kit._concurrency import loop_thread
from responses_kit.errors import StoreError

from .conf import Conf, elsewhere, generate

__all__ = ["elsewhere", "generate", "work"]

logger = logging.getLogger("responses_kit")

_PAUSES: Final = (1.0, 5.0, 15.0, 30.0)
"""Seconds after which a store that has failed is tried again. Django's tasks are not repeated."""


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
            return loop_thread.call(generate, owner, response_id)
        except StoreError as error:
            logger.warning("response %s is tried again in %s s: %s", response_id, pause, error)
            time.sleep(pause)
    return loop_thread.call(generate, owner, response_id)


function = work
"""The same, of which a task with other options can be made."""


_runner: Any = Conf().runner()
if hasattr(_runner, "as_task"):
    work = _runner.as_task(work)  # by this name it is looked for
elif getattr(_runner, "is_out_of_process", False):
    elsewhere(_runner).bind(generate)
