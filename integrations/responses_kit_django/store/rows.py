"""Records as rows, and rows as records."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from django.conf import settings
from django.utils import timezone
from pydantic_core import from_json

from responses_kit.errors import StoreError
from responses_kit.stores.key_encoding import encode_key
from responses_kit.stores.protocol import Record

__all__ = ["columns_of", "moment", "record_of"]

_LARGEST: Final = 2**63 - 1
"""What a column of numbers takes."""


def columns_of(record: Record, logged_until: float | None) -> dict[str, Any]:
    """The columns that an update replaces.

    Raises:
        StoreError: It has bytes that no text column takes; in JSON there are none.
    """
    return {
        "previous": None if record.previous_id is None else encode_key(record.previous_id),
        "names": json.dumps([record.previous_id, record.item_ids]),
        "final": record.final,
        "cancelled": record.cancelled,
        "lease": record.lease,
        "logged_until": logged_until,
        "events": record.events,
        "input": _text(record.input),
        "response": _text(record.response),
        "request": record.request,
        **_looked_for(record.response),
    }


def record_of(row: Any) -> Record:
    """The record that a row was made of."""
    _, response_id, key, fingerprint = json.loads(row.head)
    previous_id, item_ids = json.loads(row.names)
    return Record(
        id=response_id,
        previous_id=previous_id,
        input=row.input.encode(),
        response=row.response.encode(),
        item_ids=tuple(item_ids),
        final=row.final,
        events=row.events,
        lease=row.lease,
        cancelled=row.cancelled,
        request=bytes(row.request),
        key=key,
        fingerprint=fingerprint,
    )


def moment(seconds: float) -> datetime:
    """A time as the project's databases have them."""
    there = datetime.fromtimestamp(seconds, UTC)
    return there if settings.USE_TZ else timezone.make_naive(there)


def _text(data: bytes) -> str:
    """JSON as a column takes it."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise StoreError("The response is no JSON, and the server's store keeps nothing else.")
    return text


def _looked_for(response: bytes) -> dict[str, Any]:
    """What stands in the response and has a column of its own, as far as it is what it should be."""
    try:
        told = from_json(response)
    except ValueError:
        told = None
    told = told if isinstance(told, dict) else {}
    usage = told["usage"] if isinstance(told.get("usage"), dict) else {}
    columns = {
        "status": _name(told.get("status"), 20),
        "model": _name(told.get("model"), 255),
        "background": told.get("background") is True,
        "input_tokens": _count(usage.get("input_tokens")),
        "output_tokens": _count(usage.get("output_tokens")),
    }
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        columns["created"] = moment(told["created_at"])
    return columns


def _name(value: Any, longest: int) -> str:
    return value.replace("\0", "")[:longest] if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _LARGEST else None
