"""Someone who speaks LMSP to a host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from tests.http.lmsp.conformance import Event, check_response, check_stream, problem_in

from .client import PATIENCE, Client, Connection, Headers, Reply, to_bytes


def said(text: str, role: str = "user", kind: str = "input_text") -> dict[str, Any]:
    """A message."""
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


class Events:
    """A stream that is still arriving."""

    def __init__(self, connection: Connection, headers: dict[str, str]) -> None:
        self.connection, self.headers = connection, headers
        self.told: list[Event] = []
        self._waiting: list[Event] = []

    async def next(self) -> Event | None:
        """The next event; None once the server has closed the stream."""
        with anyio.fail_after(PATIENCE):
            while not self._waiting:
                write = await self.connection.write()
                if write is None:
                    return None
                assert write.endswith(b"\n\n"), f"a write ends within an event: …{write[-80:]!r}"
                blocks = write.decode("ascii")[:-2].split("\n\n")
                self._waiting += [Event.parse(block) for block in blocks if not block.startswith(":")]
        self.told.append(self._waiting.pop(0))
        return self.told[-1]

    async def until(self, name: str) -> Event:
        while event := await self.next():
            if event.name == name:
                return event
        raise AssertionError(f"no {name} in {[event.name for event in self.told]}")

    async def rest(self) -> list[Event]:
        """All events, once the server has closed the stream."""
        while await self.next():
            pass
        return self.told

    async def items(self) -> list[dict[str, Any]]:
        """What a whole stream has told, after everything about it was checked."""
        return check_stream(await self.rest())


class Speaker(Client):
    """A client of the dialect; every answer is checked for what all answers have."""

    def __init__(self, port: int, key: str = "Bearer alice", prefix: str = "/lmsp/v1") -> None:
        super().__init__(port, key, prefix)

    def other(self, key: str) -> Speaker:
        return Speaker(self.port, key)

    async def request(self, method: str, path: str, *args: Any, **more: Any) -> Reply:
        reply = await super().request(method, path, *args, **more)
        assert reply.headers["lmsp-version"] == "1.0"
        return reply

    async def ask(self, path: str = "/responses", headers: Headers = (), **fields: Any) -> Reply:
        """A request for the puppet, whatever comes of it."""
        return await self.request("POST", path, json={"model": "puppet", **fields}, headers=headers)

    async def made(self, headers: Headers = (), **fields: Any) -> dict[str, Any]:  # type: ignore[override]  # of this dialect
        """A response that has to be made."""
        reply = await self.ask(headers=headers, **fields)
        assert reply.status == 200, f"{reply.status}: {reply.body[:500]!r}"
        response: dict[str, Any] = reply.json()
        check_response(response)
        return response

    async def problem(self, reply: Reply, status: int, code: str, param: str | None = None) -> dict[str, Any]:
        """The problem document that an answer has to be."""
        problem = problem_in(reply.status, reply.headers, reply.body)
        assert (problem["status"], problem["code"], problem.get("param")) == (status, code, param), problem
        return problem

    @asynccontextmanager
    async def events(
        self, method: str = "POST", path: str = "/responses", body: Any = None, headers: Headers = ()
    ) -> AsyncIterator[Events]:
        """A stream that has to begin."""
        content = None if body is None else to_bytes({"model": "puppet", "stream": True, **body})
        async with self.begun(method, path, content, headers) as (connection, reply_headers):
            assert reply_headers["content-type"].split(";")[0] == "text/event-stream"
            assert reply_headers["lmsp-version"] == "1.0"
            yield Events(connection, reply_headers)

    async def told(self, **fields: Any) -> list[Event]:  # type: ignore[override]  # of this dialect
        """All events of a streamed response, checked."""
        async with self.events(body=fields) as events:
            await events.items()
            return events.told

    async def task(self, **fields: Any) -> dict[str, Any]:
        """A task that has to be created."""
        reply = await self.ask("/tasks", **fields)
        assert reply.status == 202, f"{reply.status}: {reply.body[:500]!r}"
        task: dict[str, Any] = reply.json()
        assert set(task) == {"id", "object", "created_at", "status", "response"}
        return task

    async def task_ended(self, task_id: str) -> dict[str, Any]:
        """The task once it has ended."""
        with anyio.fail_after(PATIENCE):
            while True:
                task: dict[str, Any] = (await self.get(f"/tasks/{task_id}")).json()
                if task["status"] != "in_progress":
                    check_response(task["response"])
                    return task
                await anyio.sleep(0.01)

    def following(self, task_id: str, after: int | None = None, *, by: str = "query") -> Any:
        """A task's events, from the first on, or from the one after `after`, as the query says or the header."""
        query = f"?after={after}" if after is not None and by == "query" else ""
        headers = {"Last-Event-ID": str(after)} if after is not None and by == "header" else {}
        return self.events("GET", f"/tasks/{task_id}/events{query}", headers=headers)
