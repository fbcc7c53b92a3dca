"""The requirements of `OrmStore` on its database, and the translation of database errors."""

from __future__ import annotations

import re
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.db.migrations.executor import MigrationExecutor
from django.utils.connection import ConnectionDoesNotExist

from responses_kit.errors import ConfigurationError

from ..models import Conversation, Item, Piece, Response

__all__ = ["check_database", "check_tables", "is_conflict", "to_safe_error"]

_SAFE_SQLSTATE_CLASSES: Final = frozenset(
    {"08", "0A", "25", "28", "3D", "3F", "40", "42", "53", "54", "55", "57", "58"}
)
"""Classes of SQLSTATE with messages about the server, a table or a lock, which quote no values."""

_CONFLICT_SQLSTATES: Final = frozenset({"40001", "40P01"})
"""SQLSTATEs of serialization failures and deadlocks."""

_SQLITE_MISSING_TABLE: Final = re.compile(r"no such (table|column): |table \w+ has no column ")
"""Messages of SQLite, which has no error codes for missing tables."""


def check_database(using: str) -> str:
    """Return the vendor of a database, "postgresql" or "sqlite".

    Raises:
        ConfigurationError: The database is unknown, or does not meet the requirements of the store.
    """
    try:
        connection = connections[using]
    except (ConnectionDoesNotExist, ImproperlyConfigured) as error:
        raise ConfigurationError(f"the database {using!r} cannot be used: {error}") from error
    if connection.vendor not in ("postgresql", "sqlite"):
        # The default collations of MySQL and Oracle ignore case, so owners that differ in case would be one.
        raise ConfigurationError(
            f"an OrmStore needs PostgreSQL or SQLite, but the database {using!r} uses {connection.vendor}: choose"
            " another one of DATABASES, or use a SqlStore or a RedisStore"
        )
    if not connection.settings_dict["AUTOCOMMIT"]:
        raise ConfigurationError(f"an OrmStore needs AUTOCOMMIT, which is off for the database {using!r}")
    if not connection.features.can_return_rows_from_bulk_insert:
        raise ConfigurationError("an OrmStore needs SQLite 3.35 or newer")
    if connection.settings_dict["NAME"] == ":memory:":
        raise ConfigurationError(
            f"an OrmStore needs a database file, but the database {using!r} is in memory, one for each connection: set"
            " its NAME to a path, or use a MemoryStore"
        )
    return connection.vendor


def check_tables(using: str) -> None:
    """Check that all migrations have been applied.

    Raises:
        ConfigurationError: A table is missing or out of date.
    """
    connection = connections[using]
    executor = MigrationExecutor(connection)
    newest = [node for node in executor.loader.graph.leaf_nodes() if node[0] == Response._meta.app_label]
    tables = {model._meta.db_table for model in (Conversation, Response, Item, Piece)}
    if executor.migration_plan(newest) or not tables.issubset(connection.introspection.table_names()):
        raise _missing_tables_error(using)


def is_conflict(error: Error) -> bool:
    """Return whether a transaction was rolled back because of a concurrent one, so that a retry may work."""
    return _sqlstate(error) in _CONFLICT_SQLSTATES


def to_safe_error(error: Error, using: str) -> Exception:
    """Return an error that can be logged: without stored values, which PostgreSQL quotes in its messages."""
    return _missing_tables_error(using) if _is_missing_table(error) else _redact(error)


def _missing_tables_error(using: str) -> ConfigurationError:
    command = "manage.py migrate" + ("" if using == DEFAULT_DB_ALIAS else f" --database {using}")
    allowed = router.allow_migrate_model(using, Response)
    routers = "" if allowed else ", once your DATABASE_ROUTERS allow the app responses_kit_django there"
    return ConfigurationError(
        f"the store's tables are missing or out of date in the database {using!r}: run `{command}`{routers}"
    )


def _redact(error: Error) -> Error:
    """Return the error without stored values in its message, and without the driver's error as its cause."""
    message, state = str(error), _sqlstate(error)
    if state is not None:
        cause: Any = error.__cause__
        detail = cause.diag.message_primary if state[:2] in _SAFE_SQLSTATE_CLASSES else type(cause).__name__
        message = f"{detail} ({state})"
    return type(error)(message).with_traceback(error.__traceback__)


def _is_missing_table(error: Error) -> bool:
    """Return whether a table or a column is missing."""
    state = _sqlstate(error)
    if state is not None:
        return state in ("42P01", "42703")
    return _SQLITE_MISSING_TABLE.match(str(error)) is not None


def _sqlstate(error: Error) -> str | None:
    cause = error.__cause__
    state: str | None = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)  # psycopg, psycopg2
    return state
