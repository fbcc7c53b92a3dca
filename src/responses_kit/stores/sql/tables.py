"""The tables of `SqlStore` and their migrations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    insert,
    inspect,
    select,
    text,
    update,
)

from ...errors import ConfigurationError

__all__ = ["MIGRATIONS", "check_version", "conversations", "items", "logs", "metadata", "migrate", "responses"]

metadata: Final = MetaData()
"""All tables of a `SqlStore`, for creation with Alembic; `setup()` then only records their version."""

# Bytewise collation: the fastest, and unaffected by upgrades of the system's collations.
_Key = Text().with_variant(Text(collation="C"), "postgresql")

conversations: Final = Table(
    "responses_kit_conversations",
    metadata,
    Column("owner", _Key, primary_key=True),
    Column("root", _Key, primary_key=True),  # the id of its first response
    Column("expires", Double, nullable=False),
    Index("responses_kit_conversations_by_expiry", "expires", "owner", "root"),
    sqlite_with_rowid=False,
)

responses: Final = Table(
    "responses_kit_responses",
    metadata,
    Column("owner", _Key, primary_key=True),
    Column("id", _Key, primary_key=True),
    Column("root", _Key, nullable=False),
    Column("previous", _Key),
    Column("key", _Key),
    Column("head", Text, nullable=False),  # JSON, never changed: unencoded [owner, id, key, fingerprint]
    Column("names", Text, nullable=False),  # JSON: unencoded [previous_id, [item id, ...]]
    Column("final", Boolean, nullable=False),
    Column("cancelled", Boolean, nullable=False),
    Column("lease", Double, nullable=False),
    Column("logged_until", Double),  # expiry of the log of a final record; null without a log
    Column("events", Text, nullable=False),
    Column("input", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("created", Double, nullable=False),
)
Index("responses_kit_responses_by_root", responses.c.owner, responses.c.root)
Index(
    "responses_kit_responses_by_key",
    responses.c.owner,
    responses.c.key,
    unique=True,
    postgresql_where=responses.c.key.is_not(None),
    sqlite_where=responses.c.key.is_not(None),
)
Index(
    "responses_kit_responses_by_lease",
    responses.c.lease,
    postgresql_where=~responses.c.final,
    sqlite_where=~responses.c.final,
)
Index(
    "responses_kit_responses_by_log",
    responses.c.logged_until,
    postgresql_where=responses.c.logged_until.is_not(None),
    sqlite_where=responses.c.logged_until.is_not(None),
)

items: Final = Table(
    "responses_kit_items",
    metadata,
    Column("owner", _Key, primary_key=True),
    Column("item_id", _Key, primary_key=True),
    Column("response_id", _Key, primary_key=True),
    Index("responses_kit_items_by_response", "owner", "response_id"),
    sqlite_with_rowid=False,
)

logs: Final = Table(
    "responses_kit_logs",
    metadata,
    Column("owner", _Key, primary_key=True),
    Column("response_id", _Key, primary_key=True),
    Column("start", BigInteger, primary_key=True),
    Column("count", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

_versions: Final = Table("responses_kit_version", metadata, Column("version", Integer, primary_key=True))

MIGRATIONS: Final[list[Callable[[Connection], object]]] = []
"""Migrations from version n+1 to n+2, by index n; all run in one transaction."""

_SETUP_LOCK: Final = 0x5E590CE5
"""Key of the PostgreSQL advisory lock for setup; an arbitrary unused number."""

_RUN_SETUP: Final = (
    "run `responses-kit store setup URL`, in a Flask app `flask responses setup`, or `await store.setup()`"
)


def migrate(connection: Connection) -> None:
    """Create or migrate the tables in the connection's transaction.

    Raises:
        ConfigurationError: The tables have a newer version.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SETUP_LOCK})
    version = _version(connection)
    newest = 1 + len(MIGRATIONS)
    if version is None:
        metadata.create_all(connection)
        connection.execute(insert(_versions).values(version=newest))
        return
    _refuse_newer(version, newest)
    for step in MIGRATIONS[version - 1 :]:
        step(connection)
    if version < newest:
        connection.execute(update(_versions).values(version=newest))


def check_version(connection: Connection) -> None:
    """Check that the tables exist and have the current version.

    Raises:
        ConfigurationError: The tables are missing, outdated or newer.
    """
    version = _version(connection)
    newest = 1 + len(MIGRATIONS)
    if version is None:
        raise ConfigurationError(f"the database has no tables for the store: {_RUN_SETUP}")
    if version < newest:
        raise ConfigurationError(f"the store's tables have version {version} instead of {newest}: {_RUN_SETUP}")
    _refuse_newer(version, newest)


def _refuse_newer(version: int, newest: int) -> None:
    if version > newest:
        raise ConfigurationError(
            f"the store's tables have version {version}, newer than {newest}: upgrade responses-kit"
        )


def _version(connection: Connection) -> int | None:
    if not inspect(connection).has_table(_versions.name):
        return None
    return connection.execute(select(_versions.c.version)).scalar()
