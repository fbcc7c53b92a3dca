"""Connections of `SqlStore`: a given engine, or its own engines for each event loop."""

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
from .tables import check_version, migrate

__all__ = ["Engines"]

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 5.0
"""Seconds to connect, and to close all connections; on SQLite, to acquire the write lock of the file."""

MAX_CONNECTIONS: Final = 10
"""Concurrent calls per event loop; further calls wait."""

POOL_TIMEOUT: Final = 10.0
"""Seconds that a call waits for a free connection."""

COMMAND_TIMEOUT: Final = 10.0
"""Seconds for one statement on PostgreSQL."""

SETUP_TIMEOUT: Final = 600.0
"""Seconds for one statement of `setup`, which may rewrite a table or wait for another process that does."""

_POSTGRES: Final = ("postgresql", "postgres", "postgresql+asyncpg")
_SQLITE: Final = ("sqlite", "sqlite+aiosqlite")

_HOST_AND_PORT: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]*)?")
"""Host and port."""

_LIBPQ_ONLY_SETTINGS: Final = frozenset({"channel_binding", "gssencmode", "keepalives", "keepalives_idle"})
"""libpq settings in the URLs of hosting providers, which asyncpg would send to the server."""


class _LoopEngines:
    """The engines of one event loop, for single statements and for transactions, and their semaphores."""

    def __init__(self, reads: AsyncEngine, writes: AsyncEngine, writers: int | None) -> None:
        self.reads, self.writes = reads, writes
        self.reading = asyncio.Semaphore(MAX_CONNECTIONS)
        self.writing = self.reading if writers is None else asyncio.Semaphore(writers)
        self.calls: set[asyncio.Task[Any]] = set()
        self.checked = False
        self.end: AsyncGenerator[None, None] | None = None


class Engines:
    """Connections to one database.

    Args:
        source: A URL, opened separately for each event loop, or an engine, used as it is.

    Raises:
        ConfigurationError: The URL is not valid, or names an unsupported database.
        ImportError: The driver is not installed.
    """

    def __init__(self, source: str | AsyncEngine) -> None:
        self._loops: dict[asyncio.AbstractEventLoop, _LoopEngines] = {}
        self._is_owner = isinstance(source, str)
        if isinstance(source, AsyncEngine):
            self._create = _wrap_engine(source)
            self.sqlite = source.dialect.name == "sqlite"
        elif isinstance(source, str):
            self.sqlite, self._create = _engine_factory(source)
        else:
            raise ConfigurationError(f"a SqlStore takes a URL or an AsyncEngine, not {type(source).__name__}")

    async def run_shielded(self, call: Callable[[], Coroutine[Any, Any, T]], *, writes: bool) -> T:
        """Run a call that continues if its caller is cancelled, because a cancelled driver call loses its connection.

        While the call waits for a connection it can still be cancelled, so that it does not run for a disconnected
        client.

        Args:
            call: The call.
            writes: Whether the call writes.

        Raises:
            TimeoutError: All connections are in use.
        """
        current = self._current()
        places = current.writing if writes else current.reading
        try:
            async with asyncio.timeout(POOL_TIMEOUT):
                await places.acquire()
        except TimeoutError:
            raise TimeoutError("all connections of the store are in use") from None
        task = asyncio.create_task(call())
        current.calls.add(task)
        task.add_done_callback(current.calls.discard)
        task.add_done_callback(lambda _: places.release())
        return await asyncio.shield(task)

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection for a single statement in autocommit mode."""
        with _HidingParameters():
            async with (await self._checked()).reads.connect() as connection:
                yield connection

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a write transaction; commit at the end, roll back on an exception."""
        with _HidingParameters():
            async with (await self._checked()).writes.begin() as connection:
                if self.sqlite:
                    # A transaction that reads first and then writes fails if another process has written meanwhile.
                    await connection.exec_driver_sql("BEGIN IMMEDIATE")
                yield connection

    async def setup(self) -> None:
        """Create or migrate the tables."""
        _running_loop()
        _, engine = self._create(SETUP_TIMEOUT)
        try:
            with _HidingParameters():
                if self.sqlite:
                    async with engine.connect() as connection:
                        await _enable_wal(connection)
                async with engine.begin() as connection:
                    if self.sqlite:
                        await connection.exec_driver_sql("BEGIN IMMEDIATE")
                    await connection.run_sync(migrate)
        finally:
            if self._is_owner:
                await engine.dispose()

    async def aclose(self) -> None:
        """Wait for running calls, then close the connections of this event loop; a given engine stays open."""
        current = self._loops.get(asyncio.get_running_loop())
        if current is None:
            return
        if current.calls:
            await asyncio.wait(current.calls)
        if current.end is not None:
            await current.end.aclose()

    def _current(self) -> _LoopEngines:
        loop = _running_loop()
        current = self._loops.get(loop)
        if current is None:
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            current = self._loops[loop] = _LoopEngines(
                *self._create(COMMAND_TIMEOUT), writers=1 if self.sqlite else None
            )
        return current

    async def _checked(self) -> _LoopEngines:
        current = self._current()
        if current.end is None:
            current.end = self._dispose_with_loop(current)
            await anext(current.end)
        if not current.checked:
            async with current.reads.connect() as connection:
                await connection.run_sync(check_version)
            current.checked = True
        return current

    async def _dispose_with_loop(self, current: _LoopEngines) -> AsyncGenerator[None, None]:
        """Dispose of the engines when the event loop closes its async generators at shutdown."""
        loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loops.pop(loop, None)
            if self._is_owner:
                with suppress(TimeoutError):  # a silent server does not confirm the close either
                    async with asyncio.timeout(CONNECT_TIMEOUT):
                        await current.reads.dispose()
                        await current.writes.dispose()


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError("a SqlStore needs asyncio, like its drivers") from None


class _HidingParameters:
    """Context manager that removes statement parameters, which hold payloads, from error messages."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StatementError):
            error.hide_parameters = True


_Pair = tuple[AsyncEngine, AsyncEngine]


def _wrap_engine(engine: AsyncEngine) -> Callable[[float], _Pair]:
    _check_dialect(engine.dialect.name)
    reads = engine.execution_options(isolation_level="AUTOCOMMIT")
    # Without autocommit, SQLite's driver would start deferred transactions by itself.
    sqlite = engine.dialect.name == "sqlite"
    writes = reads if sqlite else engine.execution_options(isolation_level="READ COMMITTED")
    return lambda timeout: (reads, writes)


def _check_dialect(name: str) -> None:
    if name not in ("sqlite", "postgresql"):
        raise ConfigurationError(f"a SqlStore supports SQLite and PostgreSQL, not {name}")


def _engine_factory(url: str) -> tuple[bool, Callable[[float], _Pair]]:
    scheme, separator, _ = url.partition("://")
    scheme = scheme.lower()
    if not separator:
        raise ConfigurationError("a SqlStore takes a URL such as sqlite:///responses.db or postgresql://host/database")
    if scheme in _SQLITE:
        return True, _sqlite_factory(url)
    if scheme in _POSTGRES:
        return False, _postgres_factory(url)
    _check_dialect(scheme.partition("+")[0])
    raise ConfigurationError(f"a SqlStore cannot open {scheme}:// URLs: pass an AsyncEngine")


def _sqlite_factory(url: str) -> Callable[[float], _Pair]:
    try:
        import aiosqlite  # noqa: F401
    except ImportError as missing:
        raise ImportError('SQLite needs the extra "sql": pip install "responses-kit[sql]"') from missing
    try:
        parsed = make_url(url).set(drivername="sqlite+aiosqlite")
    except (ArgumentError, ValueError):  # the message may quote the URL
        raise ConfigurationError("the URL must name an SQLite file, such as sqlite:///responses.db") from None
    if parsed.database in (None, "", ":memory:", "file::memory:") or parsed.query.get("mode") == "memory":
        raise ConfigurationError(
            "a SqlStore needs a file, such as sqlite:///responses.db; use a MemoryStore for memory"
        )

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
        event.listen(engine.sync_engine, "connect", _set_pragmas)
        return engine

    # One writer at a time, queued here in order, because SQLite's own busy waiting is unfair.
    return lambda timeout: (engine(MAX_CONNECTIONS), engine(1))


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    # A power failure may lose the latest commits, but does not corrupt the file.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


async def _enable_wal(connection: AsyncConnection) -> None:
    """Switch the file to write-ahead logging, so that reads do not wait for writes. The file keeps the mode."""
    for _ in range(100):  # the busy timeout does not apply to this pragma
        try:
            await connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        except OperationalError as error:
            if "locked" not in str(error.orig):
                raise
            await asyncio.sleep(CONNECT_TIMEOUT / 100)
        else:
            return
    raise ConfigurationError("the file of the store is locked by another process. Try again later")


def _postgres_factory(url: str) -> Callable[[float], _Pair]:
    try:
        import asyncpg  # type: ignore[import-untyped]  # it has no type hints
    except ImportError as missing:
        raise ImportError('PostgreSQL needs the extra "postgres": pip install "responses-kit[postgres]"') from missing
    try:
        parts = urlsplit(url)
        settings = parse_qsl(parts.query, strict_parsing=bool(parts.query))
    except ValueError:  # the message may quote the password
        raise _invalid_postgres_url() from None
    hosts = parts.netloc.rpartition("@")[2].split(",")
    # An unescaped "/", "?" or "#" in a password would be parsed as port or database, and quoted in error messages.
    cut = parts.fragment or ("@" in url and "@" not in parts.netloc)
    if cut or not all(_HOST_AND_PORT.fullmatch(host) for host in hosts):
        raise _invalid_postgres_url()
    settings = [(name, value) for name, value in settings if name not in _LIBPQ_ONLY_SETTINGS]
    # Unparsed, because the driver knows libpq settings such as sslmode, and SQLAlchemy does not.
    dsn = urlunsplit(parts._replace(scheme="postgresql", query=urlencode(settings)))

    def make(timeout: float) -> _Pair:
        async def connect(*_: Any, **__: Any) -> Any:
            return await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT, command_timeout=timeout)

        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=connect,
            isolation_level="READ COMMITTED",
            pool_size=MAX_CONNECTIONS + 1,  # one is reserved for grouped appends, which bypass the semaphore
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT,
        )
        event.listen(engine.sync_engine, "checkout", _refuse_closed)
        event.listen(engine.sync_engine, "handle_error", _drop_timed_out)
        return engine.execution_options(isolation_level="AUTOCOMMIT"), engine

    return make


def _invalid_postgres_url() -> ConfigurationError:
    return ConfigurationError(
        "the URL must name a PostgreSQL database, such as postgresql://user:password@host/database;"
        " percent-encode special characters in the password"
    )


def _refuse_closed(connection: Any, record: Any, _: Any) -> None:
    """Make the pool replace a connection that the server has closed, for example by a restart."""
    if record.driver_connection.is_closed():
        raise DisconnectionError


def _drop_timed_out(context: ExceptionContext) -> None:
    """Terminate a connection after a timeout, because a rollback or close on it may never return."""
    if isinstance(context.original_exception, TimeoutError) and context.connection is not None:
        context.is_disconnect = True
        driver: Any = context.connection.connection.driver_connection
        driver.terminate()
