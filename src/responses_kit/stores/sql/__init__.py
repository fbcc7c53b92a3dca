"""Responses in an SQL database: PostgreSQL, or an SQLite file."""

try:
    from .store import SqlStore
    from .tables import metadata
except ImportError as missing:
    raise ImportError(
        'SQL databases need the extra "sql", or "postgres" for PostgreSQL: '
        'pip install "responses-kit[sql]" or "responses-kit[postgres]"'
    ) from missing

__all__ = ["SqlStore", "metadata"]
