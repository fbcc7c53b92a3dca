"""Ids: unguessable, and made by the server alone; and what tells requests apart."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Final

from ..schema.request import CreateRequest

__all__ = ["fingerprint", "is_id", "new_id"]

_FORM: Final = re.compile(r"[a-z]{2,4}_[0-9a-f]{32}")


def new_id(prefix: str) -> str:
    """An id such as `resp_…` with 128 random bits, in characters that need no escape anywhere."""
    return f"{prefix}_{os.urandom(16).hex()}"


def is_id(text: str) -> bool:
    """Whether this has the form of our ids. Clients send our items back; they keep their ids, foreign ones get ours."""
    return _FORM.fullmatch(text) is not None


def fingerprint(request: CreateRequest) -> str:
    """Tells requests apart; what the specification does not know makes no difference."""
    said = json.dumps(request.model_dump(mode="json", by_alias=True), sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()
