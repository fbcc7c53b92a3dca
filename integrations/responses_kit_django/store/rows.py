"""The conversion of records to rows, and of rows to records."""

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

__all__ = ["record_to_columns", "row_to_record", "to_datetime"]

_MAX_INTEGER: Final = 2**63 - 1
"""The largest value of an integer column."""


def record_to_columns(record: Record, logged_until: float | None) -> dict[str, Any]:
    """Return the columns of a record that an update replaces.

    Args:
        record: The record.
        logged_until: Seconds since the epoch at which its log expires, or None.

    Raises:
        StoreError: The record is not valid JSON text.
    """
    return {
        "previous": None if record.previous_id is None else encode_key(record.previous_id),
        "names": json.dumps([record.previous_id, record.item_ids]),
        "final": record.final,
        "cancelled": record.cancelled,
        "lease": record.lease,
        "logged_until": logged_until,
        "events": record.events,
        "input": _to_text(record.input),
        "response": _to_text(record.response),
        "request": record.request,
        **_searchable_columns(record.response),
    }


def row_to_record(row: Any) -> Record:
    """Return the record that is stored in a row."""
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


def to_datetime(seconds: float) -> datetime:
    """Return a time in seconds since the epoch as a datetime, naive unless `USE_TZ` is on."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment if settings.USE_TZ else timezone.make_naive(moment)


def _to_text(data: bytes) -> str:
    """Return JSON as text; PostgreSQL refuses null characters in text columns."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise StoreError("The response cannot be stored, because it is not valid JSON.")
    return text


def _searchable_columns(response: bytes) -> dict[str, Any]:
    """Return the columns that copy members of the response, with defaults for members of the wrong type."""
    try:
        value = from_json(response)
    except ValueError:
        value = None
    members = value if isinstance(value, dict) else {}
    usage = members["usage"] if isinstance(members.get("usage"), dict) else {}
    columns = {
        "status": _to_name(members.get("status"), 20),
        "model": _to_name(members.get("model"), 255),
        "background": members.get("background") is True,
        "input_tokens": _to_count(usage.get("input_tokens")),
        "output_tokens": _to_count(usage.get("output_tokens")),
    }
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        columns["created"] = to_datetime(members["created_at"])
    return columns


def _to_name(value: Any, max_length: int) -> str:
    return value.replace("\0", "")[:max_length] if isinstance(value, str) else ""


def _to_count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _MAX_INTEGER else None
