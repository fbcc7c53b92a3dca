"""MCP servers as hosted tools: each tool of a server becomes a tool that the kit runs, and each call an item.

The connection lives in a thread with an event loop of its own, so that one server serves every event loop and thread
of the host alike. It is made when first needed, and made anew after it broke.
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
from typing import Any, TypeVar

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
    raise ImportError('MCP servers need the extra "mcp": pip install "responses-kit[mcp]"') from missing

__all__ = ["McpServer"]

logger = logging.getLogger("responses_kit")

T = TypeVar("T")


class McpServer:
    """The tools of one MCP server, switched on together by one type.

    Example::

        files = McpServer("acme:files", StdioServerParameters(command="mcp-server-filesystem", args=["/srv/docs"]))
        kit = ResponsesKit(backend, tools=[files])       # clients say {"type": "acme:files"}

    Args:
        type: `slug:name`. What clients put into `tools`, and the type of the receipts.
        server: How to start it, or its URL (streamable HTTP), or whatever else `mcp.Client` connects to.
        timeout: Seconds for the connection, and for each call.
    """

    def __init__(
        self,
        type: str,  # noqa: A002  # the wire's own word
        server: StdioServerParameters | str | Any,
        *,
        timeout: float = 30.0,
    ) -> None:
        HostedTool(type)  # refuses what is no type
        self.type = type
        self.timeout = timeout
        self._server = server
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._dropped: list[_Connection] = []
        self._made: tuple[Sequence[Tool], Sequence[HostedTool]] = ((), ())  # of the last listing

    async def tools(self) -> Sequence[HostedTool]:
        """The server's tools as they are now.

        Raises:
            ServerError: The server cannot be reached.
        """
        connection = self._connection
        try:
            try:
                listed = await self._ask(_list)
            except Exception:
                if connection is None:
                    raise
                self._drop(connection)  # it broke, or hangs, or the server was started anew behind its address
                listed = await self._ask(_list)
        except Exception as error:
            if self._connection is not None:
                self._drop(self._connection)
            logger.error("the MCP server of %s cannot be reached", self.type, exc_info=error)
            raise ServerError(
                f"The tools of {self.type} cannot be reached now. Try again, or leave them out."
            ) from error
        known, tools = self._made
        if listed != known:
            tools = await anyio.to_thread.run_sync(self._make, listed)  # which compiles their schemas
            self._made = (listed, tools)
        return tools

    def _make(self, listed: Sequence[Tool]) -> list[HostedTool]:
        tools: dict[str, HostedTool] = {}
        for tool in listed:
            try:
                one = _McpTool(self, tool)
            except ConfigurationError as error:
                logger.warning("a tool of %s is left out: %s", self.type, error)
                continue
            if tools.setdefault(one.name, one) is not one:
                logger.warning("two tools of %s are called %s; one is left out", self.type, one.name)
        return list(tools.values())

    async def aclose(self) -> None:
        """Ends the connection, and the server's process if there is one."""
        if self._connection is not None:
            self._drop(self._connection)
        for connection in self._dropped:
            await anyio.to_thread.run_sync(connection.wait)

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Calls a tool, by the server's own name for it."""
        return await self._ask(lambda client: client.call_tool(name, arguments))

    async def _ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        with self._lock:
            connection = self._connection
            if connection is None or connection.over:
                connection = self._connection = _Connection(self._server, self.timeout)
        with anyio.fail_after(self.timeout):
            return await connection.ask(question)

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self._dropped = [*(one for one in self._dropped if not one.over), connection]
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
        self._theirs = tool.name

    async def call(self, arguments: dict[str, Any], turn: Turn) -> str:
        try:
            result = await self._server.call(self._theirs, arguments)
        except MCPError as error:
            raise ToolError(f"The tool failed: {error}") from error
        except TimeoutError:
            raise
        except Exception as error:
            # What it says may quote the answer.
            logger.warning("a tool of %s gave an answer that cannot be read: %s", self.type, type(error).__name__)
            raise ToolError("The tool's answer cannot be read.") from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text or "The tool failed.")
        return text


class _Connection:
    """A client in a thread with an event loop of its own."""

    def __init__(self, server: Any, timeout: float) -> None:
        self._server = server
        self._timeout = timeout
        self._ready: Future[Callable[[_Question], None]] = Future()
        self._stopped = False
        self._cancel: Callable[[], Any] = lambda: None
        self._thread = threading.Thread(target=self._run, name="responses-kit-mcp", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether nothing is left of it; also in a process that was forked off."""
        return not self._thread.is_alive()

    async def ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        """The answer to a question; who is cancelled takes the question back. Never waits for the other thread."""
        await _done(self._ready)
        answer: Future[T] = Future()
        self._ready.result()((question, answer))
        try:
            await _done(answer)
        except BaseException:
            answer.cancel()
            raise
        return answer.result()

    def stop(self) -> None:
        """Has the connection end soon, also one that is still being made."""
        self._stopped = True
        with suppress(RuntimeError):  # it is over already
            self._cancel()

    def wait(self) -> None:
        """Waits for the end, but not for ever."""
        self._thread.join(10)

    # In the thread.

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
            problem: BaseException = ConnectionError("the connection was given up")
        except BaseException as error:
            problem = error
        if not self._ready.done():
            self._ready.set_exception(problem)

    async def _serve(self) -> None:
        tell = call_soon_threadsafe()
        here = contextvars.copy_context()  # the asker's own would tell a task that it runs on the asker's event loop
        with anyio.fail_after(self._timeout) as scope:
            self._cancel = lambda: tell(scope.cancel)
            if self._stopped:
                return
            async with Client(self._server) as client, anyio.create_task_group() as group:
                scope.deadline = math.inf

                def begin(asked: _Question) -> None:
                    group.start_soon(_answer, client, asked, tell)

                self._ready.set_result(lambda asked: tell(lambda: here.copy().run(begin, asked)))
                await anyio.sleep_forever()


_Question = tuple[Callable[[Client], Awaitable[Any]], Future[Any]]


async def _answer(client: Client, asked: _Question, tell: Callable[[Callable[[], Any]], Any]) -> None:
    question, answer = asked
    with anyio.CancelScope() as scope:

        def done(_: Future[Any]) -> None:
            if answer.cancelled():
                tell(scope.cancel)

        answer.add_done_callback(done)
        try:
            result = await question(client)
        except BaseException as error:
            with suppress(InvalidStateError):
                answer.set_exception(error if isinstance(error, Exception) else ConnectionError("it was given up"))
            if not isinstance(error, Exception):
                raise
        else:
            with suppress(InvalidStateError):
                answer.set_result(result)


async def _done(future: Future[Any]) -> None:
    """Waits for what happens in another thread."""
    done = anyio.Event()
    tell = call_soon_threadsafe()

    def arrived(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            tell(done.set)

    future.add_done_callback(arrived)
    await done.wait()


async def _list(client: Client) -> list[Tool]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None and len(tools) < MAX_TOOLS:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools[:MAX_TOOLS]


def _text(result: CallToolResult) -> str:
    texts: list[str] = []
    for block in result.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "resource" and isinstance(text := getattr(block.resource, "text", None), str):
            texts.append(text)
        else:
            texts.append(f"[{block.type}]")  # a chat has no place for what is no text
    return "\n".join(texts)
