"""The SQL of `OrmStore`: transactions, statement timeouts, and queries beyond the ORM."""

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
    "APPEND_PIECE",
    "LOCK_CLAUSE",
    "READ_CHAIN",
    "READ_LOG",
    "atomic",
    "autocommit",
    "insert_pieces",
    "is_unexpired",
    "item_holder_pks",
    "log_end",
    "response_pks",
    "text_values",
]  # fmt: skip

STATEMENT_TIMEOUT: Final = 10.0
"""Seconds after which PostgreSQL aborts a statement, and the call fails."""

_RESPONSES, _CONVERSATIONS = Response._meta.db_table, Conversation._meta.db_table
_ITEMS, _PIECES = Item._meta.db_table, Piece._meta.db_table

# Statements and transactions.

_LOCK_SQLITE: Final = f"UPDATE {_CONVERSATIONS} SET expires = 0 WHERE id = 0"  # noqa: S608  # no row has the id 0
"""Locks an SQLite file for writing. A transaction that reads first fails when it writes, if another wrote meanwhile."""


@contextmanager
def autocommit(using: str) -> Iterator[None]:
    """Run each statement in its own transaction, with the statement timeout."""
    connection: Any = connections[using]
    if connection.vendor != "postgresql":
        yield
    elif connection.features.uses_server_side_binding:  # takes one statement at a time, so limits need a transaction
        with atomic(using):
            yield
    else:
        with connection.execute_wrapper(_execute_limited):
            yield


@contextmanager
def atomic(using: str) -> Iterator[None]:
    """Run statements in one transaction that may write, with the statement timeout."""
    connection: Any = connections[using]
    with transaction.atomic(using=using, durable=True):
        if connection.vendor != "postgresql":
            _execute(connection, _LOCK_SQLITE)
            yield
        elif connection.features.uses_server_side_binding:
            _execute(connection, *_limit_statements())
            yield
        else:
            with connection.execute_wrapper(_limit_first_statement()):
                yield


def _execute(connection: Any, *statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def _limit_statements() -> tuple[str, str]:
    return (
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",  # the project may have configured another level
        f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT * 1000:.0f}",
    )


def _execute_limited(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Execute a statement with the limits before it, which costs no round trip and affects its transaction only."""
    limits = _limit_statements()
    result = execute("; ".join([*limits, sql]), params, many, context)
    if _returns_every_result(context["connection"]):
        for _ in limits:
            context["cursor"].nextset()
    return result


def _limit_first_statement() -> Callable[..., Any]:
    """Return an execute wrapper that sends the limits with the first statement of a transaction."""
    limited = False

    def limit(execute: Callable[..., Any], *statement: Any) -> Any:
        nonlocal limited
        if limited:
            return execute(*statement)
        limited = True
        return _execute_limited(execute, *statement)

    return limit


def _returns_every_result(connection: Any) -> bool:
    """Return whether the driver returns the results of all statements, as psycopg does; psycopg2 returns the last."""
    return bool(connection.Database.__name__ == "psycopg")


# Parts of queries.


def is_unexpired(now: float) -> Exists:
    """Return an expression for whether the conversation of a response has not expired."""
    return Exists(Conversation.objects.filter(pk=OuterRef("conversation_id"), expires__gt=now))


def log_end() -> Coalesce:
    """Return an expression for the next `sequence_number` of a response's log."""
    ends = Piece.objects.filter(response=OuterRef("pk")).order_by("-start").values(end=F("start") + F("count"))
    return Coalesce(Subquery(ends[:1]), 0)


# Lists of owners and ids are passed as one JSON array: databases limit the number of parameters.

_TEXT_ARRAY: Final = {
    "postgresql": "json_array_elements_text(CAST(%s AS json)) AS given (value)",
    "sqlite": "json_each(%s) AS given",
}

_PAIR_ARRAY: Final = {
    "postgresql": "json_array_elements(CAST(%s AS json)) AS given (value)",
    "sqlite": "json_each(%s) AS given",
}

_OWNER_AND_ID: Final = {
    "postgresql": ("given.value ->> 0", "given.value ->> 1"),
    "sqlite": ("json_extract(given.value, '$[0]')", "json_extract(given.value, '$[1]')"),
}


def text_values(vendor: str, texts: Iterable[str]) -> RawSQL:
    """Return a subquery with one row for each text."""
    return RawSQL(f"SELECT given.value FROM {_TEXT_ARRAY[vendor]}", [json.dumps([*texts])])  # noqa: S608, S611  # constants


def response_pks(vendor: str, pairs: Iterable[tuple[str, str]]) -> RawSQL:
    """Return a subquery with the primary keys of the responses that have these owners and ids."""
    owner, response_id = _OWNER_AND_ID[vendor]
    return RawSQL(  # noqa: S611  # constants
        f"SELECT r.id FROM {_PAIR_ARRAY[vendor]} CROSS JOIN {_RESPONSES} r"  # noqa: S608
        f" WHERE r.owner = {owner} AND r.response_id = {response_id}",
        [json.dumps([*pairs])],
    )


def item_holder_pks(vendor: str, owner: str, item_ids: Iterable[str], now: float) -> RawSQL:
    """Return a subquery with the primary key, for each item, of one response that holds it."""
    return RawSQL(  # noqa: S611  # constants
        f"SELECT (SELECT i.response_id FROM {_ITEMS} i JOIN {_RESPONSES} r ON r.id = i.response_id"  # noqa: S608
        f" JOIN {_CONVERSATIONS} c ON c.id = r.conversation_id AND c.expires > %s"
        " WHERE i.owner = %s AND i.item_id = given.value LIMIT 1)"
        f" FROM {_TEXT_ARRAY[vendor]}",
        [now, owner, json.dumps([*item_ids])],
    )


# Queries that the ORM cannot express.

READ_CHAIN: Final = f"""
WITH RECURSIVE ids (id, previous) AS (
    SELECT id, previous FROM {_RESPONSES} WHERE owner = %(owner)s AND response_id = %(id)s
    UNION -- not UNION ALL, which would not end if responses continued each other in a circle
    SELECT r.id, r.previous FROM {_RESPONSES} r JOIN ids ON r.owner = %(owner)s AND r.response_id = ids.previous
)
SELECT r.*, c.expires FROM {_RESPONSES} r JOIN {_CONVERSATIONS} c ON c.id = r.conversation_id
WHERE r.id IN (SELECT id FROM ids) AND c.expires > %(now)s
"""  # noqa: S608
"""Selects a response and all responses that it continues."""

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
"""Selects the pieces of a log from an event on; one row with nulls if there are none, no row if the log is gone."""

APPEND_PIECE: Final = f"""
INSERT INTO {_PIECES} (response_id, "start", "count", data)
SELECT r.id, %(start)s, %(count)s, %(data)s FROM {_RESPONSES} r
WHERE r.owner = %(owner)s AND r.response_id = %(id)s AND NOT r.final AND %(start)s = COALESCE(
    (SELECT p."start" + p."count" FROM {_PIECES} p WHERE p.response_id = r.id ORDER BY p."start" DESC LIMIT 1), 0
)
"""  # noqa: S608
"""Appends a piece if it continues the log of a response that is not final."""

LOCK_CLAUSE: Final = {"postgresql": " FOR NO KEY UPDATE OF r", "sqlite": ""}
"""The end of `APPEND_PIECE` that makes it wait for a transaction which is ending the response."""


def insert_pieces(count: int) -> str:
    """Return a statement that inserts several pieces: one round trip, and no model instances."""
    rows = ", ".join(["(%s, %s, %s, %s)"] * count)
    return f'INSERT INTO {_PIECES} (response_id, "start", "count", data) VALUES {rows}'  # noqa: S608
