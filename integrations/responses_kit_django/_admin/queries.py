"""The admin's database queries, which read no more than a page can show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import Case, F, Func, IntegerField, Q, QuerySet, TextField, Value, When
from django.db.models.functions import Left, Right
from django.db.models.lookups import GreaterThan
from django.utils.text import smart_split, unescape_string_literal

from responses_kit.stores.key_encoding import encode_key

from ..models import Response
from .transcript import Excerpt, extract_preview

__all__ = [
    "MAX_SEARCHED_RESPONSES",
    "Ancestry",
    "load_ancestry",
    "load_continuations",
    "load_excerpts",
    "load_previews",
    "search",
]

_MAX_TURNS: Final = 50
"""Turns that a page shows. It links to earlier ones."""

_MAX_DEPTH: Final = 10_000
"""Responses that are followed and counted from one response to the beginning of its conversation."""

_MAX_READ_BYTES: Final = 16 * 1024 * 1024
"""Bytes of JSON that are read completely for one page. Further inputs and responses are truncated."""

_EXCERPT_LENGTH: Final = 64 * 1024
"""Characters of a truncated input or response."""

_PREVIEW_LENGTH: Final = 4 * 1024
"""Characters at either end of an input in which the last user message is looked for."""

_MAX_TAIL_BYTES: Final = 1024 * 1024
"""Bytes of an input above which its end is not read: the database would decompress all of it for that."""

_MAX_SEARCHED_LENGTH: Final = 256 * 1024
"""Characters of an input, and of a response, that are searched."""

MAX_SEARCHED_RESPONSES: Final = 10_000
"""Newest responses that are searched."""

_MAX_WORDS: Final = 10
"""Words of a search; further ones are ignored."""

_MAX_WORD_LENGTH: Final = 200
"""Characters of a word; further ones are ignored."""


# The list.


def search(queryset: QuerySet[Response], terms: str) -> QuerySet[Response]:
    """Return the responses with this id or owner, or else the newest that contain all words.

    Args:
        queryset: The responses to search.
        terms: An id, an owner, or words. Quoted words are searched as one phrase.
    """
    key = encode_key(terms.strip())
    matches = queryset.filter(Q(response_id=key) | Q(owner=key))
    if matches.exists():
        return matches
    # The search for words scans rows without an index, so their number and length are limited.
    for oldest in queryset.order_by("-created").values_list("created", flat=True)[
        MAX_SEARCHED_RESPONSES - 1 : MAX_SEARCHED_RESPONSES
    ]:
        queryset = queryset.filter(created__gte=oldest)
    queryset = queryset.alias(
        searched_input=Left("input", _MAX_SEARCHED_LENGTH), searched_response=Left("response", _MAX_SEARCHED_LENGTH)
    )
    for word in list(smart_split(terms))[:_MAX_WORDS]:
        if word[0] in "\"'" and word[0] == word[-1] and len(word) > 1:
            word = unescape_string_literal(word)
        queryset = queryset.filter(_contains_word(word[:_MAX_WORD_LENGTH]))
    return queryset


def _contains_word(word: str) -> Q:
    """Return a condition for JSON that contains a word, regardless of case.

    Non-ASCII characters may be escaped in JSON, and databases do not ignore the case of escapes, so common cases of the
    word are searched in both forms.
    """
    cases = (word, word.lower(), word.upper(), word.capitalize())
    encoded = (json.dumps(one, ensure_ascii=escaped)[1:-1] for one in cases for escaped in (True, False))
    condition = Q()
    for form in {"".join(char.lower() if char.isascii() else char for char in one) for one in encoded}:
        condition |= Q(searched_input__icontains=form) | Q(searched_response__icontains=form)
    return condition


def load_previews(queryset: QuerySet[Response], rows: Iterable[Response]) -> dict[int, str]:
    """Return the preview of each response by primary key."""
    found = queryset.filter(pk__in=[row.pk for row in rows]).values_list(
        "pk", Left("input", _PREVIEW_LENGTH), _tail("input"), _Bytes("input")
    )
    return {
        pk: extract_preview(head, tail, _full_size(head, stored, _PREVIEW_LENGTH))
        for pk, head, tail, stored in found.order_by()
    }


# A conversation.


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The responses that a response continues.

    Attributes:
        pks: The primary keys of the newest ones and of the response itself, oldest first.
        earlier: The number of responses before these.
        before: The primary key of the last response before these, if any.
        missing: The id of the response that the very first one continued, if it is no longer stored.
    """

    pks: list[int]
    earlier: int
    before: int | None
    missing: str | None


def load_ancestry(queryset: QuerySet[Response], response: Response) -> Ancestry:
    """Return the ancestry of a response, with one query."""
    table = connections[queryset.db].ops.quote_name(Response._meta.db_table)
    with connections[queryset.db].cursor() as cursor:
        cursor.execute(_ANCESTRY_QUERY.format(table=table), [response.pk, response.owner, _MAX_DEPTH])
        chain = dict(cursor.fetchall())  # a dict, because responses in a circle are selected repeatedly
    pks = list(chain)
    shown, rest = pks[:_MAX_TURNS], pks[_MAX_TURNS:]
    return Ancestry(shown[::-1], len(rest), rest[0] if rest else None, None if rest else chain[pks[-1]])


_ANCESTRY_QUERY: Final = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM {table} WHERE id = %s
    UNION ALL
    SELECT earlier.id, earlier.previous, chain.depth + 1
    FROM {table} earlier JOIN chain ON earlier.owner = %s AND earlier.response_id = chain.previous
    WHERE chain.depth < %s
)
SELECT id, previous FROM chain ORDER BY depth
"""


def load_excerpts(queryset: QuerySet[Response], pks: Sequence[int]) -> list[Excerpt]:
    """Return the excerpts of responses, in the order of their keys. The last ones are read completely first."""
    rows = queryset.filter(pk__in=pks).order_by()
    sizes = {
        pk: (input_bytes, response_bytes)
        for pk, input_bytes, response_bytes in rows.values_list("pk", _Bytes("input"), _Bytes("response"))
    }
    remaining = _MAX_READ_BYTES
    complete: tuple[list[int], list[int]] = ([], [])
    for pk in [pk for pk in reversed(pks) if pk in sizes]:
        for field in (1, 0):  # the response first, because the input may be a large image
            if sizes[pk][field] <= remaining:
                complete[field].append(pk)
                remaining -= sizes[pk][field]
    texts = {
        pk: (input_text, response_text)
        for pk, input_text, response_text in rows.values_list(
            "pk", _excerpt("input", complete[0]), _excerpt("response", complete[1])
        )
    }
    rows_by_pk = rows.in_bulk([pk for pk in texts if pk in sizes])
    excerpts = []
    for pk in pks:
        if pk in rows_by_pk:
            (input_text, response_text), (input_bytes, response_bytes) = texts[pk], sizes[pk]
            input_size = _full_size(input_text, input_bytes, _EXCERPT_LENGTH)
            response_size = _full_size(response_text, response_bytes, _EXCERPT_LENGTH)
            excerpts.append(Excerpt(rows_by_pk[pk], input_text, input_size, response_text, response_size))
    return excerpts


def _full_size(text: str, stored: int, limit: int) -> int:
    """Return the characters of a text, or its stored bytes if the text may be only its beginning."""
    return len(text) if len(text) != limit else stored


def load_continuations(queryset: QuerySet[Response], response: Response, limit: int) -> list[Response]:
    """Return the responses that continue a response, newest first."""
    found = queryset.filter(conversation=response.conversation_id, previous=response.response_id)
    return list(found.order_by("-pk")[:limit])


class _Bytes(Func):
    """The bytes of a text. Unlike its characters, PostgreSQL knows them without decompressing the text."""

    function = "OCTET_LENGTH"
    output_field = IntegerField()

    def as_sqlite(self, compiler: Any, connection: Any, **more: Any) -> Any:
        """Return the SQL for SQLite, which has OCTET_LENGTH since 3.43 only."""
        return self.as_sql(compiler, connection, template="LENGTH(CAST(%(expressions)s AS BLOB))", **more)


def _tail(field: str) -> Case:
    too_long = When(GreaterThan(_Bytes(field), Value(_MAX_TAIL_BYTES)), then=Value(""))
    return Case(too_long, default=Right(field, _PREVIEW_LENGTH), output_field=TextField())


def _excerpt(field: str, complete: Sequence[int]) -> Case:
    return Case(When(pk__in=complete, then=F(field)), default=Left(field, _EXCERPT_LENGTH), output_field=TextField())
