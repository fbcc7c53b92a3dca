"""A client for LMSP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from tests.http.lmsp.conformance import Event, check_response, check_stream, problem_in

from .client import DEFAULT_TIMEOUT, Client, Connection, Headers, Reply, to_bytes


def message(text: str, role: str = "user", kind: str = "input_text") -> dict[str, Any]:
    """Return a message item."""
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


class EventStream:
    """A reply that is streamed."""

    def __init__(self, connection: Connection, headers: dict[str, str]) -> None:
        self.connection, self.headers = connection, headers
        self.received: list[Event] = []
        self._pending: list[Event] = []

    async def next(self) -> Event | None:
        """Return the next event, or None at the end of the stream."""
        with anyio.fail_after(DEFAULT_TIMEOUT):
            while not self._pending:
                write = await self.connection.read_chunk()
                if write is None:
                    return None
                assert write.endswith(b"\n\n"), f"a write ends within an event: …{write[-80:]!r}"
                blocks = write.decode("ascii")[:-2].split("\n\n")
                self._pending += [Event.parse(block) for block in blocks if not block.startswith(":")]
        self.received.append(self._pending.pop(0))
        return self.received[-1]

    async def until(self, name: str) -> Event:
        while event := await self.next():
            if event.name == name:
                return event
        raise AssertionError(f"no {name} in {[event.name for event in self.received]}")

    async def rest(self) -> list[Event]:
        """Read to the end of the stream and return all events."""
        while await self.next():
            pass
        return self.received

    async def read_items(self) -> list[dict[str, Any]]:
        """Read and check the whole stream, and return its output items."""
        return check_stream(await self.rest())


class LmspClient(Client):
    """A client for LMSP that checks the headers of every reply."""

    def __init__(self, port: int, key: str = "Bearer alice", prefix: str = "/lmsp/v1") -> None:
        super().__init__(port, key, prefix)

    def with_key(self, key: str) -> LmspClient:
        return LmspClient(self.port, key)

    async def request(self, method: str, path: str, *args: Any, **more: Any) -> Reply:
        reply = await super().request(method, path, *args, **more)
        assert reply.headers["lmsp-version"] == "1.0"
        return reply

    async def send_request(self, path: str = "/responses", headers: Headers = (), **fields: Any) -> Reply:
        """Send a request to the backend and return the reply, whatever its status."""
        return await self.request("POST", path, json={"model": "scripted", **fields}, headers=headers)

    async def complete(self, headers: Headers = (), **fields: Any) -> dict[str, Any]:  # type: ignore[override]  # of this dialect
        """Create a response without streaming; fail on an error."""
        reply = await self.send_request(headers=headers, **fields)
        assert reply.status == 200, f"{reply.status}: {reply.body[:500]!r}"
        response: dict[str, Any] = reply.json()
        check_response(response)
        return response

    async def check_problem(self, reply: Reply, status: int, code: str, param: str | None = None) -> dict[str, Any]:
        """Check that a reply is this problem document, and return it."""
        problem = problem_in(reply.status, reply.headers, reply.body)
        assert (problem["status"], problem["code"], problem.get("param")) == (status, code, param), problem
        return problem

    @asynccontextmanager
    async def open_events(
        self, method: str = "POST", path: str = "/responses", body: Any = None, headers: Headers = ()
    ) -> AsyncIterator[EventStream]:
        """Open an event stream."""
        content = None if body is None else to_bytes({"model": "scripted", "stream": True, **body})
        async with self.open_response(method, path, content, headers) as (connection, reply_headers):
            assert reply_headers["content-type"].split(";")[0] == "text/event-stream"
            assert reply_headers["lmsp-version"] == "1.0"
            yield EventStream(connection, reply_headers)

    async def stream_events(self, **fields: Any) -> list[Event]:  # type: ignore[override]  # of this dialect
        """Create a response with streaming, check the stream and return its events."""
        async with self.open_events(body=fields) as events:
            await events.read_items()
            return events.received

    async def create_task(self, **fields: Any) -> dict[str, Any]:
        """Create a task; fail on an error."""
        reply = await self.send_request("/tasks", **fields)
        assert reply.status == 202, f"{reply.status}: {reply.body[:500]!r}"
        task: dict[str, Any] = reply.json()
        assert set(task) == {"id", "object", "created_at", "status", "response"}
        return task

    async def wait_for_task(self, task_id: str) -> dict[str, Any]:
        """Poll a task until it has ended, and return it."""
        with anyio.fail_after(DEFAULT_TIMEOUT):
            while True:
                task: dict[str, Any] = (await self.get(f"/tasks/{task_id}")).json()
                if task["status"] != "in_progress":
                    check_response(task["response"])
                    return task
                await anyio.sleep(0.01)

    def follow_task(self, task_id: str, after: int | None = None, *, by: str = "query") -> Any:
        """Open a task's event stream, from the first event or the one after `after` (query or header)."""
        query = f"?after={after}" if after is not None and by == "query" else ""
        headers = {"Last-Event-ID": str(after)} if after is not None and by == "header" else {}
        return self.open_events("GET", f"/tasks/{task_id}/events{query}", headers=headers)
