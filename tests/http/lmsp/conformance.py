"""Checks of LMSP objects, problem documents, events and streams against the draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import responses
from typing import Any

from tests.contract.client import strict_json

RESPONSE = {
    "id", "object", "created_at", "status", "model", "output", "usage", "error", "incomplete_details"
}  # fmt: skip
ITEMS = {
    "message": {"id", "type", "role", "content"},
    "function_call": {"id", "type", "call_id", "name", "arguments"},
    "reasoning": {"id", "type", "summary"},
}
EVENTS = {
    "response.created": {"response_id", "status"},
    "response.output_item.added": {"response_id", "output_index", "item"},
    "response.output_text.delta": {"response_id", "item_id", "delta"},
    "response.output_item.done": {"response_id", "output_index", "item"},
    "response.completed": {"response_id", "status", "usage"},
    "response.incomplete": {"response_id", "status", "incomplete_details", "usage"},
    "response.failed": {"response_id", "status", "error"},
    "response.cancelled": {"response_id", "status"},
    "error": {"error"},
}
FINAL = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
STATUSES = {"in_progress", "completed", "incomplete", "failed", "cancelled"}


@dataclass(frozen=True)
class Event:
    """One event; `error` events, which belong to no response, have the id 0 here."""

    id: int
    name: str
    data: dict[str, Any]

    @classmethod
    def parse(cls, block: str) -> Event:
        """Parse one block, which has exactly the three lines of the draft's examples."""
        block = f"id: 0\n{block}" if block.startswith("event: error\n") else block
        fields = [line.split(": ", 1) for line in block.split("\n")]
        assert [name for name, _ in fields] == ["id", "event", "data"], block
        (_, number), (_, name), (_, data) = fields
        event = cls(int(number), name, json.loads(data))
        assert str(event.id) == number, f"an id that is not a plain integer: {number!r}"
        check_event(event)
        return event


def decode_events(body: str) -> list[Event]:
    """Return all events of a whole stream, without comments."""
    assert body.endswith("\n\n") or not body, f"the stream ends within an event: {body[-100:]!r}"
    return [Event.parse(block) for block in body.split("\n\n")[:-1] if not block.startswith(":")]


def check_problem(problem: Any) -> None:
    """Check a problem document (RFC 9457) with a code."""
    assert {"type", "title", "status", "detail", "code"} <= set(problem) <= {
        "type", "title", "status", "detail", "code", "param"
    }, problem  # fmt: skip
    assert problem["type"] == "about:blank"
    assert problem["title"] == responses.get(problem["status"], "Error")
    assert 400 <= problem["status"] < 600
    assert all(isinstance(problem[name], str) and problem[name] for name in set(problem) - {"status"}), problem


def problem_in(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Return the problem document of a reply, after checking it."""
    named = {name.lower(): value for name, value in headers.items()}
    assert named["content-type"] == "application/problem+json", f"{status}: {body[:500]!r}"
    assert named["lmsp-version"] == "1.0"
    problem: dict[str, Any] = strict_json(body)
    check_problem(problem)
    assert problem["status"] == status
    return problem


def check_item(item: Any) -> None:
    assert set(item) == ITEMS[item["type"]], item
    match item["type"]:
        case "message":
            assert item["role"] == "assistant"
            check_parts(item["content"], "output_text")
        case "reasoning":
            check_parts(item["summary"], "summary_text")
        case "function_call":
            assert all(isinstance(value, str) for value in item.values()), item


def check_parts(parts: Any, kind: str) -> None:
    for part in parts:
        assert set(part) == {"type", "text"}, part
        assert part["type"] == kind, part
        assert isinstance(part["text"], str), part


def check_usage(usage: Any) -> None:
    if usage is not None:
        assert set(usage) == {"input_tokens", "output_tokens", "total_tokens"}, usage
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def check_response(response: Any) -> None:
    """Check a response object, and that its members agree with its status."""
    assert set(response) == RESPONSE, set(response) ^ RESPONSE
    assert response["object"] == "response"
    assert isinstance(response["created_at"], int)
    assert response["status"] in STATUSES
    for item in response["output"]:
        check_item(item)
    check_usage(response["usage"])
    assert (response["error"] is not None) == (response["status"] == "failed"), response
    assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete"), response
    if response["error"] is not None:
        check_problem(response["error"])


def check_event(event: Event) -> None:
    """Check one event: its data members are exactly the draft's."""
    assert set(event.data) == EVENTS[event.name], f"{event.name} has {sorted(event.data)}"
    data = event.data
    if "status" in data:
        assert data["status"] == ("in_progress" if event.name == "response.created" else event.name.split(".")[1])
    if "item" in data:
        check_item(data["item"])
    if "usage" in data:
        check_usage(data["usage"])
    if "error" in data:
        check_problem(data["error"])
    if event.name == "response.incomplete":
        assert set(data["incomplete_details"]) == {"reason"}


def check_stream(events: list[Event]) -> list[dict[str, Any]]:
    """Check a whole stream.

    Returns:
        Its items, which are the items of the final response.
    """
    numbered = [event.id for event in events if event.name != "error"]
    assert numbered == list(range(1, len(numbered) + 1)), "ids must be 1, 2, 3 …"
    assert events[0].name == "response.created"
    assert [event.name in FINAL or event.name == "error" for event in events] == [False] * (len(events) - 1) + [True]
    assert len({event.data["response_id"] for event in events if event.name != "error"}) == 1
    added: dict[int, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for event in events:
        match event.name:
            case "response.output_item.added":
                item, index = event.data["item"], event.data["output_index"]
                assert index == len(added), "an index is missing or repeated"
                assert item.get("content", []) == item.get("summary", []) == [], "a new item is empty"
                assert item.get("arguments", "") == "", "a call has its arguments when it is done"
                added[index], texts[item["id"]] = item, ""
            case "response.output_text.delta":
                texts[event.data["item_id"]] += event.data["delta"]
            case "response.output_item.done":
                item, index = event.data["item"], event.data["output_index"]
                assert index not in done
                assert all(
                    item[name] == value
                    for name, value in added[index].items()
                    if name in ("id", "type", "role", "call_id", "name")
                ), "members of the added item have changed"
                if item["type"] == "message":
                    assert "".join(part["text"] for part in item["content"]) == texts[item["id"]]
                done[index] = item
    assert set(done) == set(added), "an added item was not done"
    return [done[index] for index in sorted(done)]
