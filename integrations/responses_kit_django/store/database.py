"""What `OrmStore` needs its database to be, and what it tells of its failures."""

from __future__ import annotations

import re
from typing import Final

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.db.migrations.executor import MigrationExecutor
from django.utils.connection import ConnectionDoesNotExist

from responses_kit.errors import ConfigurationError

from ..models import Conversation, Item, Piece, Response

__all__ = ["check_tables", "told", "vendor_of", "was_undone"]

_TELLING: Final = frozenset({"08", "0A", "25", "28", "3D", "3F", "40", "42", "53", "54", "55", "57", "58"})
"""Classes of SQLSTATE whose messages are about the server, a table or a lock, and not about a value."""

_UNDONE: Final = frozenset({"40001", "40P01"})
"""SQLSTATEs of transactions that could not be told from each other's, or have waited for each other."""

_MISSING: Final = re.compile(r"no such (table|column): |table \w+ has no column ")
"""What SQLite says, which has no codes for it."""


def vendor_of(using: str) -> str:
    """The vendor of a database.

    Raises:
        ConfigurationError: It cannot be used for a store.
    """
    try:
        connection = connections[using]
    except (ConnectionDoesNotExist, ImproperlyConfigured) as error:
        raise ConfigurationError(f"the database {using!r} cannot be used: {error}") from error
    if connection.vendor not in ("postgresql", "sqlite"):
        # Their collations would have one owner see what another's is, where names differ in case alone.
        raise ConfigurationError(
            f"an OrmStore is for PostgreSQL and SQLite, and the database {using!r} is none of them: name another one of"
            " DATABASES that is, or use a SqlStore or a RedisStore"
        )
    if not connection.settings_dict["AUTOCOMMIT"]:
        raise ConfigurationError(f"an OrmStore needs AUTOCOMMIT, and the database {using!r} has it off")
    if not connection.features.can_return_rows_from_bulk_insert:
        raise ConfigurationError("an OrmStore needs SQLite 3.35 or newer")
    if connection.settings_dict["NAME"] == ":memory:":
        raise ConfigurationError(
            f"the database {using!r} is in memory, where each connection has one of its own: give it a file,"
            " or use a MemoryStore"
        )
    return connection.vendor


def check_tables(using: str) -> None:
    """Looks whether all migrations have been applied.

    Raises:
        ConfigurationError: They have not.
    """
    connection = connections[using]
    executor = MigrationExecutor(connection)
    newest = [node for node in executor.loader.graph.leaf_nodes() if node[0] == Response._meta.app_label]
    tables = {model._meta.db_table for model in (Conversation, Response, Item, Piece)}
    if executor.migration_plan(newest) or not tables.issubset(connection.introspection.table_names()):
        raise _no_tables(using)


def was_undone(error: Error) -> bool:
    """Whether the database has undone a transaction for the sake of others that it stood in the way of."""
    return _state(error) in _UNDONE


def told(error: Error, using: str) -> Exception:
    """What may be known of a failure: nothing of what was to be stored, which PostgreSQL likes to quote."""
    return _no_tables(using) if _is_missing(error) else _discreet(error)


def _no_tables(using: str) -> ConfigurationError:
    command = "manage.py migrate" + ("" if using == DEFAULT_DB_ALIAS else f" --database {using}")
    allowed = router.allow_migrate_model(using, Response)
    routers = "" if allowed else ", once your DATABASE_ROUTERS allow the app responses_kit_django there"
    return ConfigurationError(
        f"the store's tables are missing or out of date in the database {using!r}: run `{command}`{routers}"
    )


def _discreet(error: Error) -> Error:
    """The same error without what was to be stored, which PostgreSQL likes to quote, and without the driver's own."""
    message, state = str(error), _state(error)
    if state is not None:
        told = error.__cause__.diag.message_primary if state[:2] in _TELLING else type(error.__cause__).__name__  # type: ignore[union-attr]  # each of the driver's errors has it
        message = f"{told} ({state})"
    return type(error)(message).with_traceback(error.__traceback__)


def _is_missing(error: Error) -> bool:
    """Whether a table, or a column, is not there."""
    state = _state(error)
    if state is not None:
        return state in ("42P01", "42703")
    return _MISSING.match(str(error)) is not None


def _state(error: Error) -> str | None:
    cause = error.__cause__
    state: str | None = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)  # psycopg, psycopg2
    return state
