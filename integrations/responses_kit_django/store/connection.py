"""The database connection of one thread of `OrmStore`: Django's connection of that thread."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Connection"]

_MIN_IDLE_TIMEOUT: Final = 1.0
"""Seconds of idleness before a connection is checked at its next use, or closed if `CONN_MAX_AGE` is less."""

_MAX_IDLE_TIMEOUT: Final = 60.0
"""Seconds of idleness before a connection is closed, however large `CONN_MAX_AGE` is."""


class Connection:
    """The connection of one thread. All methods but `disconnect` must be called in that thread.

    Args:
        using: The database's alias.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._django: Any = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._last_used = 0.0

    @property
    def idle_timeout(self) -> float:
        """Seconds of idleness before it must be closed: `CONN_MAX_AGE`, within bounds."""
        age = 0 if self._django is None else self._django.settings_dict["CONN_MAX_AGE"]
        return _MAX_IDLE_TIMEOUT if age is None else max(_MIN_IDLE_TIMEOUT, min(age, _MAX_IDLE_TIMEOUT))

    def open(self) -> None:
        """Open the connection, or reopen it if it is broken or too old."""
        django: Any = connections[self._using]
        if django is not self._django:
            self._django = django
            # No connection pool: all its connections may be held by runs that wait for the store, a deadlock.
            options = {name: value for name, value in django.settings_dict["OPTIONS"].items() if name != "pool"}
            django.settings_dict = {**django.settings_dict, "OPTIONS": options}
        now = time.monotonic()
        if django.connection is not None:
            old = django.settings_dict["CONN_MAX_AGE"] and now >= django.close_at
            if old or (
                (now - self._last_used > _MIN_IDLE_TIMEOUT or self._has_unsolicited_data()) and not django.is_usable()
            ):
                self.close()
        if django.connection is None:
            self.close()
            django.ensure_connection()
            self._socket = _duplicate_socket(django)

    def _has_unsolicited_data(self) -> bool:
        """Return whether unsolicited data is readable, which usually means that the server closed the connection.

        The check costs no round trip. Without it, each connection fails one call after a restart of the database.
        """
        if self._socket is None or not hasattr(socket, "MSG_DONTWAIT"):
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def release(self) -> None:
        """Note the time of the last use."""
        self._last_used = time.monotonic()
        if self._django is not None:
            self._django.queries_log.clear()  # filled if DEBUG is on, and otherwise cleared only by requests

    def close(self) -> None:
        """Close the connection."""
        if self._django is not None:
            with suppress(Exception):  # a broken connection may fail to close
                self._django.close()
                if self._django.connection is not None:  # Django does not close SQLite databases in memory
                    BaseDatabaseWrapper.close(self._django)
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def disconnect(self) -> None:
        """Shut the socket down, so that a call which waits for the server fails. May be called from any thread."""
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


def _duplicate_socket(django: Any) -> socket.socket | None:
    if django.vendor != "postgresql":
        return None
    # A duplicate: the driver may close its file descriptor, and the number is then reused for another file.
    return socket.fromfd(django.connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)
