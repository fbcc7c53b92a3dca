"""MCP servers as toolsets: a real server over stdio, and one over HTTP."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from mcp import StdioServerParameters
from mcp.server import MCPServer

from responses_kit import ResponsesKit, errors, outputs
from responses_kit.testing import ScriptedBackend
from responses_kit.tools.mcp import McpServer

from ..support.conformance import check_response

pytestmark = pytest.mark.anyio

SERVER = '''
import os, time
from mcp.server import MCPServer

server = MCPServer("shop")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def pid() -> str:
    return str(os.getpid())

@server.tool(name="odd.name")
def odd() -> str:
    return "odd"

@server.tool()
def crash() -> str:
    raise ValueError("the password is hunter2")

@server.tool()
async def wait() -> str:
    import anyio
    await anyio.sleep(60)

server.run()
'''

RAW = """
import json, os, sys

open(sys.argv[1], "a").write("x")  # one for each start
schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
tools = [{"name": "lie", "outputSchema": schema}, {"name": "hang"}, {"name": "pid"}]
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        result = {
            "protocolVersion": asked["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "raw", "version": "1"},
        }
    elif asked["method"] == "tools/list":
        result = {"tools": [{"inputSchema": {"type": "object"}} | tool for tool in tools]}
    elif asked["method"] == "tools/call":
        text = [{"type": "text", "text": str(os.getpid())}]
        result = {"content": text, "structuredContent": {"number": "hunter2"}}
        if asked["params"]["name"] == "hang":
            sys.stdin.read()
    else:
        result = None
    answer = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"]} | answer), flush=True)
"""
"""A server that lies about its results, and one that hangs."""


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[tuple[McpServer, Path]]:
    starts = tmp_path / "starts"
    command = StdioServerParameters(command=sys.executable, args=["-c", RAW, str(starts)])
    server = McpServer("shop:all", command, timeout=3)
    yield server, starts
    anyio.run(server.aclose)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[McpServer]:
    """A server for all tests and event loops, as a host has it."""
    file = tmp_path_factory.mktemp("shop") / "shop.py"
    file.write_text(SERVER)
    server = McpServer("shop:all", StdioServerParameters(command=sys.executable, args=[str(file)]), timeout=20)
    yield server
    anyio.run(server.aclose)


async def called(server: McpServer, name: str, arguments: str = "{}") -> dict:
    """The receipt of a call that a model makes."""
    backend = ScriptedBackend([outputs.ToolCall(name, arguments)], ["Done."])
    kit = ResponsesKit(backend, tools=[server])
    response = await kit.create({"input": "Do it.", "tools": [{"type": "shop:all"}]})
    check_response(response)
    assert response["output"][-1]["content"][0]["text"] == "Done."
    return response["output"][0]


async def test_each_tool_of_a_server_becomes_one_of_the_models_tools(server):
    tools = {tool.name: tool for tool in await server.tools()}
    assert list(tools) == ["add", "pid", "odd_name", "crash", "wait"]
    assert tools["add"].description == "Adds two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]


async def test_a_call_is_run_by_the_server_and_leaves_a_receipt(server):
    receipt = await called(server, "add", '{"a": 2, "b": 3}')
    assert (receipt["type"], receipt["name"], receipt["status"]) == ("shop:all", "add", "completed")
    assert (receipt["arguments"], receipt["output"]) == ('{"a": 2, "b": 3}', "5")
    assert (await called(server, "odd_name"))["output"] == "odd"


async def test_what_the_server_refuses_becomes_a_failed_receipt(server):
    for name, arguments in (("crash", "{}"), ("add", '{"a": "x"}')):
        receipt = await called(server, name, arguments)
        assert receipt["status"] == "failed"
        assert "hunter2" not in receipt["output"]


async def test_a_server_that_died_is_started_anew_by_the_next_request(server):
    first = (await called(server, "pid"))["output"]
    os.kill(int(first), signal.SIGKILL)
    assert (await called(server, "pid"))["output"] != first


async def test_who_asks_a_busy_server_waits_without_stopping_the_event_loop():
    local, turns = MCPServer("local"), []

    @local.tool()
    async def compute() -> str:
        time.sleep(0.5)  # noqa: ASYNC251  # it is the point that it does not wait
        return "done"

    async def look() -> None:
        while True:
            turns.append(time.monotonic())
            await anyio.sleep(0.01)

    server = McpServer("shop:all", local)
    await server.tools()
    async with anyio.create_task_group() as group:
        group.start_soon(look)
        async with anyio.create_task_group() as asking:
            asking.start_soon(called, server, "compute")
            asking.start_soon(called, server, "compute")
        group.cancel_scope.cancel()
    assert len(turns) > 20  # of about 100, where it would have been a handful
    await server.aclose()


async def test_one_connection_serves_several_event_loops(server):
    here = (await called(server, "pid"))["output"]
    there = await anyio.to_thread.run_sync(lambda: anyio.run(called, server, "pid"))
    assert there["output"] == here


async def test_a_call_that_takes_too_long_fails_alone(server, monkeypatch):
    await server.tools()
    monkeypatch.setattr(server, "timeout", 0.5)
    assert (await called(server, "wait"))["output"] == "The tool took too long."
    assert (await called(server, "add", '{"a": 1, "b": 1}'))["output"] == "2"


async def test_a_cancelled_call_is_given_up_at_once(server):
    (wait,) = [tool for tool in await server.tools() if tool.name == "wait"]
    with anyio.fail_after(10), anyio.move_on_after(0.2) as scope:
        await server.call(wait.name, {})
    assert scope.cancelled_caught
    assert (await called(server, "add", '{"a": 1, "b": 1}'))["output"] == "2"


@pytest.mark.parametrize("command", [["no-such-program"], [sys.executable, "-c", "pass"], ["sleep", "60"]])
async def test_a_server_that_cannot_be_reached_is_an_error_before_anything_is_said(command):
    server = McpServer("shop:all", StdioServerParameters(command=command[0], args=command[1:]), timeout=1)
    backend = ScriptedBackend(["Never said."])
    kit = ResponsesKit(backend, tools=[server])
    for _ in range(2):
        with pytest.raises(errors.ServerError, match="shop:all cannot be reached"):
            await kit.create({"input": "Hi", "tools": [{"type": "shop:all"}]})
    assert backend.turns == []
    await kit.aclose()


async def test_closing_does_not_wait_for_a_server_that_never_answers(tmp_path):
    file = tmp_path / "pid"
    greeted = f"sys.stdin.readline(); open({str(file)!r}, 'w').write(str(os.getpid()))"
    code = f"import os, sys, time; {greeted}; time.sleep(60)"
    server = McpServer("shop:all", StdioServerParameters(command=sys.executable, args=["-c", code]), timeout=50)
    async with anyio.create_task_group() as group:
        group.start_soon(server.tools)
        with anyio.fail_after(20):
            while not file.exists() or not file.read_text():
                await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    with anyio.fail_after(8):
        await server.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


async def test_a_server_that_hangs_is_started_anew_by_the_next_request(raw):
    server, starts = raw
    assert (await called(server, "hang"))["output"] == "The tool took too long."
    assert (await called(server, "pid"))["status"] == "completed"
    assert starts.read_text() == "xx"


async def test_an_answer_that_cannot_be_read_harms_no_other_call_and_is_not_logged(raw, caplog):
    server = raw[0]
    pid = (await called(server, "pid"))["output"]
    assert (await called(server, "lie"))["output"] == "The tool's answer cannot be read."
    assert (await called(server, "pid"))["output"] == pid
    assert "hunter2" not in caplog.text


async def test_the_tools_of_a_listing_that_stays_the_same_are_made_once(server):
    assert (await server.tools())[0] is (await server.tools())[0]


async def test_a_server_in_this_process_serves_too():
    local = MCPServer("local")

    @local.tool()
    def twice(number: int) -> int:
        return 2 * number

    server = McpServer("shop:all", local)
    assert (await called(server, "twice", '{"number": 4}'))["output"] == "8"
    await server.aclose()


def test_a_toolset_needs_a_type_with_a_slug():
    with pytest.raises(errors.ConfigurationError, match="slug:name"):
        McpServer("files", "http://127.0.0.1/mcp")
