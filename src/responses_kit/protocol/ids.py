"""Unguessable ids, and fingerprints of requests."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Final

from ..schema.request import CreateRequest

__all__ = ["fingerprint", "is_id", "new_id"]

_ID_PATTERN: Final = re.compile(r"[a-z]{2,4}_[0-9a-f]{32}")


def new_id(prefix: str) -> str:
    """Return an id such as `resp_…` with 128 random bits, in characters that need no escaping in URLs or JSON."""
    return f"{prefix}_{os.urandom(16).hex()}"


def is_id(text: str) -> bool:
    """Return whether the text has the form of an id of this server.

    Items with such ids keep them when clients send them back; other items get a new id.
    """
    return _ID_PATTERN.fullmatch(text) is not None


def fingerprint(request: CreateRequest) -> str:
    """Return a digest of the request's known members, as hexadecimal digits; unknown members are ignored."""
    members = json.dumps(request.model_dump(mode="json", by_alias=True), sort_keys=True)
    return hashlib.sha256(members.encode()).hexdigest()
