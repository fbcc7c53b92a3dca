"""MCP servers as toolsets: each tool of a server becomes a hosted tool.

The connection runs in its own thread with its own event loop, so that all event loops and threads of the host can
share it. It is opened on first use and reopened after a failure.
"""

from __future__ import annotations

import contextvars
import logging
import math
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final, TypeVar

import anyio

from .._concurrency.tasks import call_soon_threadsafe
from ..errors import ConfigurationError, ServerError, ToolError
from ..schema.base import MAX_TOOLS
from ..turn import Turn
from .hosted import HostedTool

try:
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.types import CallToolResult, Tool
except ImportError as missing:
    raise ImportError('MCP servers require the extra "mcp": pip install "responses-kit[mcp]"') from missing

__all__ = ["McpServer"]

logger = logging.getLogger("responses_kit")

T = TypeVar("T")

_CLOSE_TIMEOUT: Final = 10.0
"""Seconds that closing a connection may take before its thread is abandoned."""


class McpServer:
    """A toolset with the tools of one MCP server.

    Example::

        files = McpServer("acme:files", StdioServerParameters(command="mcp-server-filesystem", args=["/srv/docs"]))
        kit = ResponsesKit(backend, tools=[files])       # clients send {"type": "acme:files"}

    Args:
        type: `slug:name`. The toolset's type in requests, and the type of its receipts.
        server: The parameters to start the server, its URL (streamable HTTP), or another argument of `mcp.Client`.
        timeout: Seconds after which opening the connection fails, and each call.

    Raises:
        ConfigurationError: The type is not valid.
    """

    def __init__(
        self,
        type: str,  # noqa: A002  # the member's name on the wire
        server: StdioServerParameters | str | Any,
        *,
        timeout: float = 30.0,
    ) -> None:
        HostedTool(type)  # validates the type
        self.type = type
        self.timeout = timeout
        self._server = server
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._discarded: list[_Connection] = []
        self._cached_listing: tuple[Sequence[Tool], Sequence[HostedTool]] = ((), ())

    async def tools(self) -> Sequence[HostedTool]:
        """Return the server's current tools.

        Raises:
            ServerError: The server cannot be reached.
        """
        connection = self._connection
        try:
            try:
                listed = await self._request(_list_tools)
            except Exception:
                if connection is None:
                    raise
                self._discard(connection)  # the connection failed, hangs, or the server was restarted
                listed = await self._request(_list_tools)
        except Exception as error:
            if self._connection is not None:
                self._discard(self._connection)
            logger.error("the MCP server of %s is not available", self.type, exc_info=error)
            raise ServerError(f"The tools of {self.type} are not available now. Try again, or omit them.") from error
        cached, tools = self._cached_listing
        if listed != cached:
            tools = await anyio.to_thread.run_sync(self._build_tools, listed)  # compiling schemas would block the loop
            self._cached_listing = (listed, tools)
        return tools

    def _build_tools(self, listed: Sequence[Tool]) -> list[HostedTool]:
        tools: dict[str, HostedTool] = {}
        for tool in listed:
            try:
                one = _McpTool(self, tool)
            except ConfigurationError as error:
                logger.warning("a tool of %s is skipped: %s", self.type, error)
                continue
            if tools.setdefault(one.name, one) is not one:
                logger.warning("two tools of %s have the name %s; one is skipped", self.type, one.name)
        return list(tools.values())

    async def aclose(self) -> None:
        """Close the connection, and stop the server's process if the toolset started it."""
        if self._connection is not None:
            self._discard(self._connection)
        for connection in self._discarded:
            await anyio.to_thread.run_sync(connection.join)

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool by the server's name for it."""
        return await self._request(lambda client: client.call_tool(name, arguments))

    async def _request(self, send: Callable[[Client], Awaitable[T]]) -> T:
        with self._lock:
            connection = self._connection
            if connection is None or connection.is_closed:
                connection = self._connection = _Connection(self._server, self.timeout)
        with anyio.fail_after(self.timeout):
            return await connection.request(send)

    def _discard(self, connection: _Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self._discarded = [*(one for one in self._discarded if not one.is_closed), connection]
        connection.stop()


class _McpTool(HostedTool):
    def __init__(self, server: McpServer, tool: Tool) -> None:
        super().__init__(
            server.type,
            name=re.sub(r"[^a-zA-Z0-9_-]", "_", tool.name)[:64],
            description=tool.description or "",
            parameters=tool.input_schema,
            timeout=server.timeout,
        )
        self._server = server
        self._remote_name = tool.name

    async def call(self, arguments: dict[str, Any], turn: Turn) -> str:
        try:
            result = await self._server.call(self._remote_name, arguments)
        except MCPError as error:
            raise ToolError(f"The tool failed: {error}") from error
        except TimeoutError:
            raise
        except Exception as error:
            # The exception's message may quote the result, so only its type is logged.
            logger.warning("the result of a tool of %s is not valid: %s", self.type, type(error).__name__)
            raise ToolError("The tool's result cannot be read.") from error
        text = _encode_result(result)
        if result.is_error:
            raise ToolError(text or "The tool failed.")
        return text


class _Connection:
    """An MCP client in its own thread and event loop."""

    def __init__(self, server: Any, timeout: float) -> None:
        self._server = server
        self._timeout = timeout
        self._ready: Future[Callable[[_PendingRequest], None]] = Future()
        self._stopped = False
        self._cancel: Callable[[], Any] = lambda: None
        self._thread = threading.Thread(target=self._run, name="responses-kit-mcp", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether the connection's thread has ended; true in a forked process."""
        return not self._thread.is_alive()

    async def request(self, send: Callable[[Client], Awaitable[T]]) -> T:
        """Run a request in the connection's thread and return its result.

        Cancelling the caller cancels the request.

        Args:
            send: Sends the request with the connection's client.
        """
        await _wait_for(self._ready)
        result: Future[T] = Future()
        self._ready.result()((send, result))
        try:
            await _wait_for(result)
        except BaseException:
            result.cancel()
            raise
        return result.result()

    def stop(self) -> None:
        """Start closing the connection, also while it is being opened."""
        self._stopped = True
        with suppress(RuntimeError):  # the event loop is already closed
            self._cancel()

    def join(self) -> None:
        """Wait until the connection is closed, for a limited time."""
        self._thread.join(_CLOSE_TIMEOUT)

    # In the thread.

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
            failure: BaseException = ConnectionError("the connection was closed")
        except BaseException as error:
            failure = error
        if not self._ready.done():
            self._ready.set_exception(failure)

    async def _serve(self) -> None:
        call_soon = call_soon_threadsafe()
        context = contextvars.copy_context()  # the caller's context names the caller's event loop
        with anyio.fail_after(self._timeout) as scope:
            self._cancel = lambda: call_soon(scope.cancel)
            if self._stopped:
                return
            async with Client(self._server) as client, anyio.create_task_group() as group:
                scope.deadline = math.inf

                def start(request: _PendingRequest) -> None:
                    group.start_soon(_execute, client, request, call_soon)

                self._ready.set_result(lambda request: call_soon(lambda: context.copy().run(start, request)))
                await anyio.sleep_forever()


_PendingRequest = tuple[Callable[[Client], Awaitable[Any]], Future[Any]]
"""A function that sends a request, and the future for its result."""


async def _execute(client: Client, request: _PendingRequest, call_soon: Callable[[Callable[[], Any]], Any]) -> None:
    send, future = request
    with anyio.CancelScope() as scope:

        def cancel_with_future(_: Future[Any]) -> None:
            if future.cancelled():
                call_soon(scope.cancel)

        future.add_done_callback(cancel_with_future)
        try:
            result = await send(client)
        except BaseException as error:
            closed = ConnectionError("the connection was closed")
            with suppress(InvalidStateError):
                future.set_exception(error if isinstance(error, Exception) else closed)
            if not isinstance(error, Exception):
                raise
        else:
            with suppress(InvalidStateError):
                future.set_result(result)


async def _wait_for(future: Future[Any]) -> None:
    """Wait for a future that another thread completes, without blocking the event loop."""
    done = anyio.Event()
    call_soon = call_soon_threadsafe()

    def set_done(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the waiting event loop is closed
            call_soon(done.set)

    future.add_done_callback(set_done)
    await done.wait()


async def _list_tools(client: Client) -> list[Tool]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None and len(tools) < MAX_TOOLS:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools[:MAX_TOOLS]


def _encode_result(result: CallToolResult) -> str:
    texts: list[str] = []
    for block in result.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "resource" and isinstance(text := getattr(block.resource, "text", None), str):
            texts.append(text)
        else:
            texts.append(f"[{block.type}]")  # tool outputs are text only
    return "\n".join(texts)
