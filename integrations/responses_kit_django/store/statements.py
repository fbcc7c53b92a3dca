"""How `OrmStore` speaks to its database: bounded statements, transactions that can be relied on, and SQL of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import connections, transaction
from django.db.models import Exists, F, OuterRef, Subquery
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce

from ..models import Conversation, Item, Piece, Response

__all__ = [
    "APPEND", "CHAIN", "LOCKED", "READ_LOG", "alive", "alone", "append_all", "each", "holders", "log_end", "named",
    "whole",
]  # fmt: skip

STATEMENT_TIMEOUT: Final = 10.0
"""Seconds for one statement on PostgreSQL."""


_RESPONSES, _CONVERSATIONS = Response._meta.db_table, Conversation._meta.db_table
_ITEMS, _PIECES = Item._meta.db_table, Piece._meta.db_table

# Statements and transactions.

_LOCK: Final = f"UPDATE {_CONVERSATIONS} SET expires = 0 WHERE id = 0"  # noqa: S608  # there is none
"""Takes the lock of an SQLite file: who reads first and then writes is refused where another has written meanwhile."""


@contextmanager
def alone(using: str) -> Iterator[None]:
    """Statements of which each is a transaction by itself."""
    connection: Any = connections[using]
    if connection.vendor != "postgresql":
        yield
    elif connection.features.uses_server_side_binding:  # which takes one statement at a time
        with whole(using):
            yield
    else:
        with connection.execute_wrapper(_limited):
            yield


@contextmanager
def whole(using: str) -> Iterator[None]:
    """A transaction that may write."""
    connection: Any = connections[using]
    with transaction.atomic(using=using, durable=True):
        if connection.vendor != "postgresql":
            _execute(connection, _LOCK)
            yield
        elif connection.features.uses_server_side_binding:
            _execute(connection, *_limits())
            yield
        else:
            with connection.execute_wrapper(_first_limited()):
                yield


def _execute(connection: Any, *statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def _limits() -> tuple[str, str]:
    return (
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",  # whatever the project has its connections begin with
        f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT * 1000:.0f}",
    )


def _limited(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Sends the limits along with a statement, which costs no round trip, and holds for its transaction alone."""
    limits = _limits()
    answer = execute("; ".join([*limits, sql]), params, many, context)
    if _answers_each(context["connection"]):
        for _ in limits:
            context["cursor"].nextset()
    return answer


def _first_limited() -> Callable[..., Any]:
    """The same for a transaction of several statements."""
    limited = False

    def limit(execute: Callable[..., Any], *statement: Any) -> Any:
        nonlocal limited
        if limited:
            return execute(*statement)
        limited = True
        return _limited(execute, *statement)

    return limit


def _answers_each(connection: Any) -> bool:
    """Whether the driver gives the answers of all statements, as psycopg does; psycopg2 gives the last one's."""
    return bool(connection.Database.__name__ == "psycopg")


# Parts of queries.


def alive(now: float) -> Exists:
    """Whether the conversation of a response has not expired."""
    return Exists(Conversation.objects.filter(pk=OuterRef("conversation_id"), expires__gt=now))


def log_end() -> Coalesce:
    """The number that comes next in a response's log."""
    ends = Piece.objects.filter(response=OuterRef("pk")).order_by("-start").values(end=F("start") + F("count"))
    return Coalesce(Subquery(ends[:1]), 0)


# Lists of owners and ids go in as one parameter, a JSON array: no database takes any number of them.

_EACH: Final = {
    "postgresql": "json_array_elements_text(CAST(%s AS json)) AS given (value)",
    "sqlite": "json_each(%s) AS given",
}

_EACH_PAIR: Final = {
    "postgresql": "json_array_elements(CAST(%s AS json)) AS given (value)",
    "sqlite": "json_each(%s) AS given",
}

_OWNER_AND_ID: Final = {
    "postgresql": ("given.value ->> 0", "given.value ->> 1"),
    "sqlite": ("json_extract(given.value, '$[0]')", "json_extract(given.value, '$[1]')"),
}


def each(vendor: str, texts: Iterable[str]) -> RawSQL:
    """These texts, as a subquery."""
    return RawSQL(f"SELECT given.value FROM {_EACH[vendor]}", [json.dumps([*texts])])  # noqa: S608, S611  # constants


def named(vendor: str, pairs: Iterable[tuple[str, str]]) -> RawSQL:
    """Primary keys of the responses that have these owners and ids, as a subquery."""
    owner, response_id = _OWNER_AND_ID[vendor]
    return RawSQL(  # noqa: S611  # constants
        f"SELECT r.id FROM {_EACH_PAIR[vendor]} CROSS JOIN {_RESPONSES} r"  # noqa: S608
        f" WHERE r.owner = {owner} AND r.response_id = {response_id}",
        [json.dumps([*pairs])],
    )


def holders(vendor: str, owner: str, item_ids: Iterable[str], now: float) -> RawSQL:
    """Primary keys of responses that hold these items, one for each, as a subquery."""
    return RawSQL(  # noqa: S611  # constants
        f"SELECT (SELECT i.response_id FROM {_ITEMS} i JOIN {_RESPONSES} r ON r.id = i.response_id"  # noqa: S608
        f" JOIN {_CONVERSATIONS} c ON c.id = r.conversation_id AND c.expires > %s"
        " WHERE i.owner = %s AND i.item_id = given.value LIMIT 1)"
        f" FROM {_EACH[vendor]}",
        [now, owner, json.dumps([*item_ids])],
    )


# Whole queries that the ORM cannot say.

CHAIN: Final = f"""
WITH RECURSIVE ids (id, previous) AS (
    SELECT id, previous FROM {_RESPONSES} WHERE owner = %(owner)s AND response_id = %(id)s
    UNION -- and not UNION ALL, which in a circle has no end
    SELECT r.id, r.previous FROM {_RESPONSES} r JOIN ids ON r.owner = %(owner)s AND r.response_id = ids.previous
)
SELECT r.*, c.expires FROM {_RESPONSES} r JOIN {_CONVERSATIONS} c ON c.id = r.conversation_id
WHERE r.id IN (SELECT id FROM ids) AND c.expires > %(now)s
"""  # noqa: S608
"""A response and all that it continues."""

READ_LOG: Final = f"""
SELECT r.id, r.conversation_id, c.expires, p."start" AS piece_start, p."count" AS piece_count, p.data AS piece_data
FROM {_RESPONSES} r
JOIN {_CONVERSATIONS} c ON c.id = r.conversation_id AND c.expires > %(now)s
LEFT JOIN {_PIECES} p ON p.response_id = r.id AND p."start" + p."count" > %(next)s AND p."start" >= COALESCE(
    (SELECT MAX(q."start") FROM {_PIECES} q WHERE q.response_id = r.id AND q."start" <= %(next)s), 0
)
WHERE r.owner = %(owner)s AND r.response_id = %(id)s AND (NOT r.final OR r.logged_until > %(now)s)
ORDER BY p."start"
"""  # noqa: S608
"""A row for each piece that has what comes next, or one of nulls where none has; no row where the log is not kept."""

APPEND: Final = f"""
INSERT INTO {_PIECES} (response_id, "start", "count", data)
SELECT r.id, %(start)s, %(count)s, %(data)s FROM {_RESPONSES} r
WHERE r.owner = %(owner)s AND r.response_id = %(id)s AND NOT r.final AND %(start)s = COALESCE(
    (SELECT p."start" + p."count" FROM {_PIECES} p WHERE p.response_id = r.id ORDER BY p."start" DESC LIMIT 1), 0
)
"""  # noqa: S608
"""A piece, where the log goes on with it."""

LOCKED: Final = {"postgresql": " FOR NO KEY UPDATE OF r", "sqlite": ""}
"""What has `APPEND` wait for those who end the response at this moment."""


def append_all(count: int) -> str:
    """Keeps so many pieces. A statement for each of them, or a model, would cost as much as all the rest."""
    rows = ", ".join(["(%s, %s, %s, %s)"] * count)
    return f'INSERT INTO {_PIECES} (response_id, "start", "count", data) VALUES {rows}'  # noqa: S608
