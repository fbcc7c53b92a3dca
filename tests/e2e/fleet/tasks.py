"""The fleet's Celery app for its workers: `celery -A tests.e2e.fleet.tasks worker`."""

from __future__ import annotations

import os

from celery import Celery

from responses_kit.runners.celery import CeleryRunner

from .kit import new_kit

app = Celery("fleet", broker=os.environ["FLEET_BROKER"])
app.conf.task_default_queue = os.environ["FLEET_QUEUE"]
app.conf.broker_connection_retry_on_startup = True
kit = new_kit(CeleryRunner(app, queue_timeout=20.0))
