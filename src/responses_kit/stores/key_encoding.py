"""Owners and ids as keys of databases, which do not take any text."""

from __future__ import annotations

import hashlib
import re
from typing import Final
from urllib.parse import quote

__all__ = ["encode_key"]

_SAFE: Final = " !$&'()*+,/:;<=>?@[]^`{|}"
"""What stays as it is, beside letters, digits and `_.-~`."""

_LONGEST: Final = 240
"""Characters of a key; an index of PostgreSQL takes some 2,700 bytes for all keys of a row."""

_KEY: Final = re.compile(rf"[A-Za-z0-9_.~{re.escape(_SAFE)}-]{{0,{_LONGEST}}}")
"""What is a key as it is, as nearly all text is."""


def encode_key(text: str) -> str:
    """Text as databases take it everywhere, still readable: different for different texts, and never long."""
    if _KEY.fullmatch(text):
        return text
    escaped = quote(text, safe=_SAFE, errors="surrogatepass")
    if len(escaped) <= _LONGEST:
        return escaped
    digest = hashlib.sha256(escaped.encode()).hexdigest()
    return f"{escaped[: _LONGEST - 1 - len(digest)]}#{digest}"  # no short one has a "#"
