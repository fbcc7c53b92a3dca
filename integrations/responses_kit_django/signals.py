"""What the project can listen to. Receivers may be plain functions, which run in a thread, or async ones.

Both signals are sent once for each response that has ended, by the process that has ended it, with

* `owner`: whose it is, as the setting `OWNER` named them,
* `response`: the response object, with its usage, as clients see it.

The ORM can be used in receivers. What one of them raises is logged; the end of an answer waits for them, but no more
than some seconds. A process that is killed in that very moment sends nothing: what counts is what the store says.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from responses_kit.kit import ResponsesKit

from .scope import DatabaseScope

__all__ = ["announce", "response_completed", "response_failed"]

response_completed = Signal()
"""A response has come to its end, be it whole or `incomplete`."""

response_failed = Signal()
"""A response has failed, or was cancelled; it may have cost tokens all the same."""


async def announce(owner: str, response: dict[str, Any]) -> None:
    """Sends the signal; see `ResponsesKit(on_response_end=...)`."""
    signal = response_completed if response["status"] in ("completed", "incomplete") else response_failed
    if signal.has_listeners(ResponsesKit):
        async with DatabaseScope().async_scope():
            await signal.asend_robust(ResponsesKit, owner=owner, response=response)  # which logs what goes wrong
