"""What the admin reads of the database: in a few queries, and never more of it than a page can show."""

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
from .transcript import Excerpt, preview

__all__ = ["MOST_SEARCHED", "Ancestry", "ancestry", "excerpts", "following", "matching", "previews"]

_MOST_TURNS: Final = 50

_DEEPEST: Final = 10_000
"""Responses before one that are counted."""

_MOST_READ: Final = 16 * 1024 * 1024
"""Bytes of JSON that are read whole for a page. Of what does not fit, each has its beginning read."""

_BEGINNING: Final = 64 * 1024

_GLIMPSE: Final = 4 * 1024
"""Characters at either end of an input, of which its preview is made."""

_LONG: Final = 1024 * 1024
"""Bytes of a text beyond which no end of it is looked at: a database unpacks all of it for that."""

_SEARCHED: Final = 256 * 1024
"""Characters of a text in which words are looked for."""

MOST_SEARCHED: Final = 10_000
"""The newest responses, in which words are looked for."""

_MOST_WORDS: Final = 10

_LONGEST_WORD: Final = 200


# The list.


def matching(queryset: QuerySet[Response], terms: str) -> QuerySet[Response]:
    """Those with this id or owner, or else the newest that hold all the words; quotes make one word of several."""
    key = encode_key(terms.strip())
    named = queryset.filter(Q(response_id=key) | Q(owner=key))
    if named.exists():
        return named
    # No index knows the words, and each row may be long.
    for oldest in queryset.order_by("-created").values_list("created", flat=True)[MOST_SEARCHED - 1 : MOST_SEARCHED]:
        queryset = queryset.filter(created__gte=oldest)
    queryset = queryset.alias(asked=Left("input", _SEARCHED), answered=Left("response", _SEARCHED))
    for word in list(smart_split(terms))[:_MOST_WORDS]:
        if word[0] in "\"'" and word[0] == word[-1] and len(word) > 1:
            word = unescape_string_literal(word)
        queryset = queryset.filter(_holds(word[:_LONGEST_WORD]))
    return queryset


def _holds(word: str) -> Q:
    """Whether the word stands in JSON: what is not ASCII as it is, or escaped, which no database knows the case of."""
    cases = (word, word.lower(), word.upper(), word.capitalize())
    written = (json.dumps(one, ensure_ascii=escaped)[1:-1] for one in cases for escaped in (True, False))
    found = Q()
    for form in {"".join(char.lower() if char.isascii() else char for char in one) for one in written}:
        found |= Q(asked__icontains=form) | Q(answered__icontains=form)
    return found


def previews(queryset: QuerySet[Response], rows: Iterable[Response]) -> dict[int, str]:
    """For each response, what the user said last."""
    found = queryset.filter(pk__in=[row.pk for row in rows]).values_list(
        "pk", Left("input", _GLIMPSE), _tail("input"), _Bytes("input")
    )
    return {pk: preview(head, tail, _size(head, stored, _GLIMPSE)) for pk, head, tail, stored in found.order_by()}


# A conversation.


@dataclass(frozen=True, slots=True)
class Ancestry:
    """What a response continues.

    Attributes:
        pks: The newest of them, oldest first, and the response itself.
        earlier: How many come before these.
        before: The one before these, if any.
        missing: The id of what the very first one continued, if that is not kept any more.
    """

    pks: list[int]
    earlier: int
    before: int | None
    missing: str | None


def ancestry(queryset: QuerySet[Response], response: Response) -> Ancestry:
    """Finds what a response continues, however long that is, in one query."""
    table = connections[queryset.db].ops.quote_name(Response._meta.db_table)
    with connections[queryset.db].cursor() as cursor:
        cursor.execute(_CHAIN.format(table=table), [response.pk, response.owner, _DEEPEST])
        chain = dict(cursor.fetchall())  # in a circle, too, each stands once
    pks = list(chain)
    shown, rest = pks[:_MOST_TURNS], pks[_MOST_TURNS:]
    return Ancestry(shown[::-1], len(rest), rest[0] if rest else None, None if rest else chain[pks[-1]])


_CHAIN: Final = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM {table} WHERE id = %s
    UNION ALL
    SELECT earlier.id, earlier.previous, chain.depth + 1
    FROM {table} earlier JOIN chain ON earlier.owner = %s AND earlier.response_id = chain.previous
    WHERE chain.depth < %s
)
SELECT id, previous FROM chain ORDER BY depth
"""


def excerpts(queryset: QuerySet[Response], pks: Sequence[int]) -> list[Excerpt]:
    """What is read of responses, in the order of their keys; where not all can be read whole, the last ones are."""
    rows = queryset.filter(pk__in=pks).order_by()
    sizes = {pk: (given, made) for pk, given, made in rows.values_list("pk", _Bytes("input"), _Bytes("response"))}
    left = _MOST_READ
    whole: tuple[list[int], list[int]] = ([], [])
    for pk in [pk for pk in reversed(pks) if pk in sizes]:
        for field in (1, 0):  # the answer first: the question may be a picture
            if sizes[pk][field] <= left:
                whole[field].append(pk)
                left -= sizes[pk][field]
    texts = rows.values_list("pk", _read("input", whole[0]), _read("response", whole[1]))
    read = {pk: (given, made) for pk, given, made in texts}
    found = rows.in_bulk([pk for pk in read if pk in sizes])
    return [
        Excerpt(found[pk], given, _size(given, bytes_given, _BEGINNING), made, _size(made, bytes_made, _BEGINNING))
        for pk, (given, made), (bytes_given, bytes_made) in ((pk, read[pk], sizes[pk]) for pk in pks if pk in found)
    ]


def _size(text: str, stored: int, most: int) -> int:
    """The size of what may be the beginning of a longer text."""
    return len(text) if len(text) != most else stored


def following(queryset: QuerySet[Response], response: Response, most: int) -> list[Response]:
    """Those that continue a response, the newest first."""
    found = queryset.filter(conversation=response.conversation_id, previous=response.response_id)
    return list(found.order_by("-pk")[:most])


class _Bytes(Func):
    """The length of a text, which PostgreSQL knows without unpacking it, as it does not know that in characters."""

    function = "OCTET_LENGTH"
    output_field = IntegerField()

    def as_sqlite(self, compiler: Any, connection: Any, **more: Any) -> Any:
        """In the words of those before 3.43."""
        return self.as_sql(compiler, connection, template="LENGTH(CAST(%(expressions)s AS BLOB))", **more)


def _tail(field: str) -> Case:
    long = When(GreaterThan(_Bytes(field), Value(_LONG)), then=Value(""))
    return Case(long, default=Right(field, _GLIMPSE), output_field=TextField())


def _read(field: str, whole: Sequence[int]) -> Case:
    return Case(When(pk__in=whole, then=F(field)), default=Left(field, _BEGINNING), output_field=TextField())
