"""The connection of one of `OrmStore`'s threads: Django's own of that thread, looked after by nobody else."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Connection"]

_FRESH: Final = 1.0
"""Seconds of idleness after which a connection is tried before it is used, and may go where none is to be kept."""

_LONGEST_IDLE: Final = 60.0
"""Seconds of idleness after which a connection goes in any case."""


class Connection:
    """Opens and closes it; all but `cut` is for its own thread.

    Args:
        using: The database's alias.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._django: Any = None
        self._wire: socket.socket | None = None
        self._guard = threading.Lock()
        self._used = 0.0

    @property
    def patience(self) -> float:
        """Seconds of idleness after which it is to be closed: `CONN_MAX_AGE`, within bounds."""
        age = 0 if self._django is None else self._django.settings_dict["CONN_MAX_AGE"]
        return _LONGEST_IDLE if age is None else max(_FRESH, min(age, _LONGEST_IDLE))

    def open(self) -> None:
        """Sees to a connection that works, whatever became of the one before."""
        django: Any = connections[self._using]
        if django is not self._django:
            self._django = django
            # Each of the pool's may be somebody's whose stream goes on only once the store has answered.
            options = {name: value for name, value in django.settings_dict["OPTIONS"].items() if name != "pool"}
            django.settings_dict = {**django.settings_dict, "OPTIONS": options}
        now = time.monotonic()
        if django.connection is not None:
            old = django.settings_dict["CONN_MAX_AGE"] and now >= django.close_at
            if old or ((now - self._used > _FRESH or self._has_word()) and not django.is_usable()):
                self.close()
        if django.connection is None:
            self.close()
            django.ensure_connection()
            self._wire = _wire_of(django)

    def _has_word(self) -> bool:
        """Whether the server has said something that nobody asked it for, which is a farewell as a rule.

        It costs no round trip. A server that starts anew ends all connections at once, and each would fail somebody.
        """
        if self._wire is None or not hasattr(socket, "MSG_DONTWAIT"):
            return False
        try:
            self._wire.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def rest(self) -> None:
        """Notes that it was used until now."""
        self._used = time.monotonic()
        if self._django is not None:
            self._django.queries_log.clear()  # which DEBUG fills, and only a request would empty

    def close(self) -> None:
        """Closes it."""
        if self._django is not None:
            with suppress(Exception):  # it may be broken
                self._django.close()
                if self._django.connection is not None:  # of SQLite in memory, which Django would leave open
                    BaseDatabaseWrapper.close(self._django)
        with self._guard:
            if self._wire is not None:
                self._wire.close()
                self._wire = None

    def cut(self) -> None:
        """Has whatever waits for an answer fail, however silent the other end is; from any thread."""
        with self._guard:
            if self._wire is not None:
                with suppress(OSError):
                    self._wire.shutdown(socket.SHUT_RDWR)


def _wire_of(django: Any) -> socket.socket | None:
    if django.vendor != "postgresql":
        return None
    # A handle of our own, since the driver's number may be another file's by the time it is needed.
    return socket.fromfd(django.connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)
