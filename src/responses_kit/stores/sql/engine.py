"""The connections of `SqlStore`: the engine that it is given, or engines of its own for each event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, DisconnectionError, OperationalError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from ...errors import ConfigurationError
from .tables import check, migrate

__all__ = ["Engines"]

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 5.0
"""Seconds for a connection to be made, and for all to be closed; on SQLite, for the file's write lock to be had."""

CONNECTIONS: Final = 10
"""How many calls are at work at once on one event loop; the others wait."""

POOL_TIMEOUT: Final = 10.0
"""Seconds for which a call waits until another one gives its connection back."""

COMMAND_TIMEOUT: Final = 10.0
"""Seconds for one statement on PostgreSQL."""

SETUP_TIMEOUT: Final = 600.0
"""Seconds for one statement of the setup, which may rewrite a table, or wait for another process that does."""

_POSTGRES: Final = ("postgresql", "postgres", "postgresql+asyncpg")
_SQLITE: Final = ("sqlite", "sqlite+aiosqlite")

_PLACE: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]*)?")
"""Host and port."""

_NOT_FOR_ASYNCPG: Final = frozenset({"channel_binding", "gssencmode", "keepalives", "keepalives_idle"})
"""Settings of libpq in the URLs that hosting companies hand out; asyncpg would send them to the server."""


class _Here:
    """What one event loop has: an engine for single statements, one for transactions, and places before both."""

    def __init__(self, reads: AsyncEngine, writes: AsyncEngine, writers: int | None) -> None:
        self.reads, self.writes = reads, writes
        self.reading = asyncio.Semaphore(CONNECTIONS)
        self.writing = self.reading if writers is None else asyncio.Semaphore(writers)
        self.calls: set[asyncio.Task[Any]] = set()
        self.checked = False
        self.end: AsyncGenerator[None, None] | None = None


class Engines:
    """Gives connections to one database.

    Args:
        source: A URL, opened anew for each event loop that uses it, or an engine, which is used as it is.

    Raises:
        ConfigurationError: The URL is none, or of another database.
        ImportError: The driver is not installed.
    """

    def __init__(self, source: str | AsyncEngine) -> None:
        self._here: dict[asyncio.AbstractEventLoop, _Here] = {}
        self._own = isinstance(source, str)
        if isinstance(source, AsyncEngine):
            self._open = _given(source)
            self.sqlite = source.dialect.name == "sqlite"
        elif isinstance(source, str):
            self.sqlite, self._open = _opener(source)
        else:
            raise ConfigurationError(f"a SqlStore takes a URL or an AsyncEngine, not {type(source).__name__}")

    async def finish(self, call: Callable[[], Coroutine[Any, Any, T]], *, writes: bool) -> T:
        """Makes a call that goes on to its end where its caller is cancelled: no connection would survive that.

        Before its turn has come, it can still be cancelled, so that nothing is done for clients that are long gone.

        Raises:
            TimeoutError: All connections are in use.
        """
        here = self._at_hand()
        places = here.writing if writes else here.reading
        try:
            async with asyncio.timeout(POOL_TIMEOUT):
                await places.acquire()
        except TimeoutError:
            raise TimeoutError("all connections of the store are in use") from None
        task = asyncio.create_task(call())
        here.calls.add(task)
        task.add_done_callback(here.calls.discard)
        task.add_done_callback(lambda _: places.release())
        return await asyncio.shield(task)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[AsyncConnection]:
        """A connection for one statement, which is a transaction by itself."""
        with _Discreet():
            async with (await self._checked()).reads.connect() as connection:
                yield connection

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """A connection within a transaction that may write, committed at the end and rolled back at an exception."""
        with _Discreet():
            async with (await self._checked()).writes.begin() as connection:
                if self.sqlite:
                    # At once: who reads first and then writes is refused where another process has written meanwhile.
                    await connection.exec_driver_sql("BEGIN IMMEDIATE")
                yield connection

    async def setup(self) -> None:
        """Creates the tables, or brings them up to date."""
        _loop()
        _, engine = self._open(SETUP_TIMEOUT)
        try:
            with _Discreet():
                if self.sqlite:
                    async with engine.connect() as connection:
                        await _write_ahead(connection)
                async with engine.begin() as connection:
                    if self.sqlite:
                        await connection.exec_driver_sql("BEGIN IMMEDIATE")
                    await connection.run_sync(migrate)
        finally:
            if self._own:
                await engine.dispose()

    async def aclose(self) -> None:
        """Ends what is on its way, and closes this event loop's connections; a given engine's are its owner's."""
        here = self._here.get(asyncio.get_running_loop())
        if here is None:
            return
        if here.calls:
            await asyncio.wait(here.calls)
        if here.end is not None:
            await here.end.aclose()

    def _at_hand(self) -> _Here:
        loop = _loop()
        here = self._here.get(loop)
        if here is None:
            for other in list(self._here):
                if other.is_closed():
                    self._here.pop(other, None)
            here = self._here[loop] = _Here(*self._open(COMMAND_TIMEOUT), writers=1 if self.sqlite else None)
        return here

    async def _checked(self) -> _Here:
        here = self._at_hand()
        if here.end is None:
            here.end = self._until_the_end(here)
            await anext(here.end)
        if not here.checked:
            async with here.reads.connect() as connection:
                await connection.run_sync(check)
            here.checked = True
        return here

    async def _until_the_end(self, here: _Here) -> AsyncGenerator[None, None]:
        """An event loop that shuts down closes the generators that were begun on it, and with this one the engines."""
        loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._here.pop(loop, None)
            if self._own:
                with suppress(TimeoutError):  # a server that says nothing to the farewell either
                    async with asyncio.timeout(CONNECT_TIMEOUT):
                        await here.reads.dispose()
                        await here.writes.dispose()


def _loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError("a SqlStore works on asyncio only, as its drivers do") from None


class _Discreet:
    """Keeps what was to be stored out of the messages of what failed."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StatementError):
            error.hide_parameters = True


_Pair = tuple[AsyncEngine, AsyncEngine]


def _given(engine: AsyncEngine) -> Callable[[float], _Pair]:
    _check_dialect(engine.dialect.name)
    reads = engine.execution_options(isolation_level="AUTOCOMMIT")
    # SQLite's driver would begin transactions of another kind where it is not told to leave that to us.
    sqlite = engine.dialect.name == "sqlite"
    writes = reads if sqlite else engine.execution_options(isolation_level="READ COMMITTED")
    return lambda timeout: (reads, writes)


def _check_dialect(name: str) -> None:
    if name not in ("sqlite", "postgresql"):
        raise ConfigurationError(f"a SqlStore is for SQLite and PostgreSQL, not for {name}")


def _opener(url: str) -> tuple[bool, Callable[[float], _Pair]]:
    scheme, separator, _ = url.partition("://")
    scheme = scheme.lower()
    if not separator:
        raise ConfigurationError("a SqlStore takes a URL such as sqlite:///responses.db or postgresql://host/database")
    if scheme in _SQLITE:
        return True, _sqlite(url)
    if scheme in _POSTGRES:
        return False, _postgres(url)
    _check_dialect(scheme.partition("+")[0])
    raise ConfigurationError(f"a SqlStore opens no {scheme}:// URL itself: give it an AsyncEngine")


def _sqlite(url: str) -> Callable[[float], _Pair]:
    try:
        import aiosqlite  # noqa: F401
    except ImportError as missing:
        raise ImportError('SQLite needs the extra "sql": pip install "responses-kit[sql]"') from missing
    try:
        parsed = make_url(url).set(drivername="sqlite+aiosqlite")
    except (ArgumentError, ValueError):  # which may quote it
        raise ConfigurationError("this is no URL of an SQLite file, such as sqlite:///responses.db") from None
    if parsed.database in (None, "", ":memory:", "file::memory:") or parsed.query.get("mode") == "memory":
        raise ConfigurationError("a SqlStore needs a file, such as sqlite:///responses.db; in memory use a MemoryStore")

    def engine(connections: int) -> AsyncEngine:
        engine = create_async_engine(
            parsed,
            isolation_level="AUTOCOMMIT",
            connect_args={"timeout": CONNECT_TIMEOUT},
            poolclass=AsyncAdaptedQueuePool,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT,
        )
        event.listen(engine.sync_engine, "connect", _tune)
        return engine

    # One writes at a time: in a queue here rather than by SQLite's own waiting, which knows no order.
    return lambda timeout: (engine(CONNECTIONS), engine(1))


def _tune(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=NORMAL")  # after a power failure the newest may be gone, but all is whole
    cursor.close()


async def _write_ahead(connection: AsyncConnection) -> None:
    """Has SQLite let readers read while somebody writes; the file remembers it."""
    for _ in range(100):  # SQLite does not wait by itself here
        try:
            await connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        except OperationalError as error:
            if "locked" not in str(error.orig):
                raise
            await asyncio.sleep(CONNECT_TIMEOUT / 100)
        else:
            return
    raise ConfigurationError("the file of the store is locked: another process is at work on it. Try again later")


def _postgres(url: str) -> Callable[[float], _Pair]:
    try:
        import asyncpg  # type: ignore[import-untyped]  # it has none
    except ImportError as missing:
        raise ImportError('PostgreSQL needs the extra "postgres": pip install "responses-kit[postgres]"') from missing
    try:
        parts = urlsplit(url)
        settings = parse_qsl(parts.query, strict_parsing=bool(parts.query))
    except ValueError:  # whose message may quote the password
        raise _unreadable() from None
    places = parts.netloc.rpartition("@")[2].split(",")
    # A password with a "/", "?" or "#" in it would otherwise be taken for a port or a database, and be told as such.
    cut = parts.fragment or ("@" in url and "@" not in parts.netloc)
    if cut or not all(_PLACE.fullmatch(place) for place in places):
        raise _unreadable()
    settings = [(name, value) for name, value in settings if name not in _NOT_FOR_ASYNCPG]
    # As it is, for the driver to read: it knows libpq's settings, such as sslmode, and SQLAlchemy does not.
    dsn = urlunsplit(parts._replace(scheme="postgresql", query=urlencode(settings)))

    def make(timeout: float) -> _Pair:
        async def connect(*_: Any, **__: Any) -> Any:
            return await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT, command_timeout=timeout)

        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=connect,
            isolation_level="READ COMMITTED",
            pool_size=CONNECTIONS + 1,  # one is for the appends, which come without a place
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT,
        )
        event.listen(engine.sync_engine, "checkout", _refuse_closed)
        event.listen(engine.sync_engine, "handle_error", _drop_silent)
        return engine.execution_options(isolation_level="AUTOCOMMIT"), engine

    return make


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "this is no URL of a PostgreSQL database, such as postgresql://user:password@host/database;"
        " what is no letter or digit in a password has to be percent-encoded"
    )


def _refuse_closed(connection: Any, record: Any, _: Any) -> None:
    """Has the pool replace what the server has closed, such as by a restart, before anybody meets it."""
    if record.driver_connection.is_closed():
        raise DisconnectionError


def _drop_silent(context: ExceptionContext) -> None:
    """Gives up a connection on which no answer comes: asking for a rollback there, or closing it, may take for ever."""
    if isinstance(context.original_exception, TimeoutError) and context.connection is not None:
        context.is_disconnect = True
        driver: Any = context.connection.connection.driver_connection
        driver.terminate()
