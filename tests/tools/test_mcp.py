"""Tests of MCP servers as toolsets."""

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
"""A server with a tool that violates its output schema, and one that hangs."""


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[tuple[McpServer, Path]]:
    starts = tmp_path / "starts"
    command = StdioServerParameters(command=sys.executable, args=["-c", RAW, str(starts)])
    server = McpServer("shop:all", command, timeout=3)
    yield server, starts
    anyio.run(server.aclose)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[McpServer]:
    """Yield a server that all tests and event loops share, as in a host."""
    file = tmp_path_factory.mktemp("shop") / "shop.py"
    file.write_text(SERVER)
    server = McpServer("shop:all", StdioServerParameters(command=sys.executable, args=[str(file)]), timeout=20)
    yield server
    anyio.run(server.aclose)


async def receipt_of_call(server: McpServer, name: str, arguments: str = "{}") -> dict:
    """Return the receipt of a model's call."""
    backend = ScriptedBackend([outputs.ToolCall(name, arguments)], ["Done."])
    kit = ResponsesKit(backend, tools=[server])
    response = await kit.create({"input": "Do it.", "tools": [{"type": "shop:all"}]})
    check_response(response)
    assert response["output"][-1]["content"][0]["text"] == "Done."
    return response["output"][0]


async def test_server_tools_become_model_tools(server):
    tools = {tool.name: tool for tool in await server.tools()}
    assert list(tools) == ["add", "pid", "odd_name", "crash", "wait"]
    assert tools["add"].description == "Adds two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]


async def test_call_runs_on_server_and_leaves_receipt(server):
    receipt = await receipt_of_call(server, "add", '{"a": 2, "b": 3}')
    assert (receipt["type"], receipt["name"], receipt["status"]) == ("shop:all", "add", "completed")
    assert (receipt["arguments"], receipt["output"]) == ('{"a": 2, "b": 3}', "5")
    assert (await receipt_of_call(server, "odd_name"))["output"] == "odd"


async def test_refused_call_becomes_failed_receipt(server):
    for name, arguments in (("crash", "{}"), ("add", '{"a": "x"}')):
        receipt = await receipt_of_call(server, name, arguments)
        assert receipt["status"] == "failed"
        assert "hunter2" not in receipt["output"]


async def test_dead_server_is_restarted_by_next_request(server):
    first = (await receipt_of_call(server, "pid"))["output"]
    os.kill(int(first), signal.SIGKILL)
    assert (await receipt_of_call(server, "pid"))["output"] != first


async def test_busy_server_does_not_block_event_loop():
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
            asking.start_soon(receipt_of_call, server, "compute")
            asking.start_soon(receipt_of_call, server, "compute")
        group.cancel_scope.cancel()
    assert len(turns) > 20  # about 100 if the loop is free, a handful if it is blocked
    await server.aclose()


async def test_connection_serves_several_event_loops(server):
    here = (await receipt_of_call(server, "pid"))["output"]
    there = await anyio.to_thread.run_sync(lambda: anyio.run(receipt_of_call, server, "pid"))
    assert there["output"] == here


async def test_slow_call_times_out_alone(server, monkeypatch):
    await server.tools()
    monkeypatch.setattr(server, "timeout", 0.5)
    assert (await receipt_of_call(server, "wait"))["output"] == "The tool took too long."
    assert (await receipt_of_call(server, "add", '{"a": 1, "b": 1}'))["output"] == "2"


async def test_cancelled_call_is_abandoned_immediately(server):
    (wait,) = [tool for tool in await server.tools() if tool.name == "wait"]
    with anyio.fail_after(10), anyio.move_on_after(0.2) as scope:
        await server.call(wait.name, {})
    assert scope.cancelled_caught
    assert (await receipt_of_call(server, "add", '{"a": 1, "b": 1}'))["output"] == "2"


@pytest.mark.parametrize("command", [["no-such-program"], [sys.executable, "-c", "pass"], ["sleep", "60"]])
async def test_unreachable_server_fails_request_up_front(command):
    server = McpServer("shop:all", StdioServerParameters(command=command[0], args=command[1:]), timeout=1)
    backend = ScriptedBackend(["Never sent."])
    kit = ResponsesKit(backend, tools=[server])
    for _ in range(2):
        with pytest.raises(errors.ServerError, match="shop:all are not available"):
            await kit.create({"input": "Hi", "tools": [{"type": "shop:all"}]})
    assert backend.turns == []
    await kit.aclose()


async def test_close_does_not_wait_for_silent_server(tmp_path):
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


async def test_hanging_server_is_restarted_by_next_request(raw):
    server, starts = raw
    assert (await receipt_of_call(server, "hang"))["output"] == "The tool took too long."
    assert (await receipt_of_call(server, "pid"))["status"] == "completed"
    assert starts.read_text() == "xx"


async def test_malformed_answer_fails_one_call_and_is_not_logged(raw, caplog):
    server = raw[0]
    pid = (await receipt_of_call(server, "pid"))["output"]
    assert (await receipt_of_call(server, "lie"))["output"] == "The tool's result cannot be read."
    assert (await receipt_of_call(server, "pid"))["output"] == pid
    assert "hunter2" not in caplog.text


async def test_unchanged_listing_is_compiled_once(server):
    assert (await server.tools())[0] is (await server.tools())[0]


async def test_in_process_server_works():
    local = MCPServer("local")

    @local.tool()
    def twice(number: int) -> int:
        return 2 * number

    server = McpServer("shop:all", local)
    assert (await receipt_of_call(server, "twice", '{"number": 4}'))["output"] == "8"
    await server.aclose()


def test_toolset_type_must_have_slug():
    with pytest.raises(errors.ConfigurationError, match="slug:name"):
        McpServer("files", "http://127.0.0.1/mcp")
