"""Runners of background responses."""

from typing import TYPE_CHECKING

from .._exports import lazy_exports
from .base import LocalRunner, Runner, Work, WorkerDispatch

if TYPE_CHECKING:
    from .celery import CeleryRunner
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"CeleryRunner": ".celery"})

__all__ = ["CeleryRunner", "LocalRunner", "Runner", "Work", "WorkerDispatch"]
