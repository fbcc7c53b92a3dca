"""Signals about responses that have ended.

Both are sent once for each response, in the process that ended it, with these arguments:

* `owner`: the owner of the response, as the setting `OWNER` returned it,
* `response`: the response object with its usage, as clients see it.

Receivers are plain functions, which run in a thread, or async ones, and may use the ORM. Their exceptions are logged.
The end of the response waits some seconds for them. A process that is killed at that moment sends nothing, so treat
the store as the source of truth.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from responses_kit.kit import ResponsesKit

from .scope import DatabaseScope

__all__ = ["response_completed", "response_failed", "send_response_signal"]

response_completed = Signal()
"""Sent after a response has completed or become `incomplete`."""

response_failed = Signal()
"""Sent after a response has failed or was cancelled. It may have used tokens."""


async def send_response_signal(owner: str, response: dict[str, Any]) -> None:
    """Send the signal for a response that has ended; see `ResponsesKit(on_response_end=...)`."""
    signal = response_completed if response["status"] in ("completed", "incomplete") else response_failed
    if signal.has_listeners(ResponsesKit):
        async with DatabaseScope().async_scope():
            await signal.asend_robust(ResponsesKit, owner=owner, response=response)  # logs exceptions of receivers
