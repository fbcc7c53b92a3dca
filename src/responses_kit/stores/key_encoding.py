"""Encoding of owners and ids as database keys."""

from __future__ import annotations

import hashlib
import re
from typing import Final
from urllib.parse import quote

__all__ = ["encode_key"]

_UNESCAPED: Final = " !$&'()*+,/:;<=>?@[]^`{|}"
"""Characters that stay unescaped, in addition to letters, digits and `_.-~`."""

_MAX_KEY_LENGTH: Final = 240
"""Characters of a key; a PostgreSQL index entry holds about 2,700 bytes for all keys of a row."""

_KEY: Final = re.compile(rf"[A-Za-z0-9_.~{re.escape(_UNESCAPED)}-]{{0,{_MAX_KEY_LENGTH}}}")
"""Text that is its own key, as nearly all text is."""


def encode_key(text: str) -> str:
    """Return text as a readable database key, distinct for distinct texts and of bounded length."""
    if _KEY.fullmatch(text):
        return text
    escaped = quote(text, safe=_UNESCAPED, errors="surrogatepass")
    if len(escaped) <= _MAX_KEY_LENGTH:
        return escaped
    digest = hashlib.sha256(escaped.encode()).hexdigest()
    return f"{escaped[: _MAX_KEY_LENGTH - 1 - len(digest)]}#{digest}"  # "#" never occurs in shorter keys
