"""Checks of server output against the specification, independent of the implementation.

`check_response`, `check_event` and `check_error` validate one object against the published types, and against the
official OpenAPI document if it is available: in the file that `RESPONSES_KIT_SPEC` names, or in `shared/spec`
beside the repository. `check_stream` validates the order of a complete stream, and `replay` rebuilds the final
object from the events as a client does.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openresponses_types.types as official
from pydantic import BaseModel, ValidationError

Object = dict[str, Any]

EXTENSION = re.compile(r"^[a-zA-Z0-9_.-]+:\S+$")
ERROR_TYPES = {"invalid_request", "not_found", "server_error", "model_error", "too_many_requests"}
TERMINAL_EVENT_TYPES = {
    "response.completed": {"completed"},
    # The specification has a status "cancelled", but no event for it.
    "response.incomplete": {"incomplete", "cancelled"},
    "response.failed": {"failed"},
}
OPTIONAL = {
    "phase",
    "verbosity",
    "logprobs",
    "encrypted_content",
    "obfuscation",
    "content",
    "filename",
    "file_data",
    "file_url",
    "headers",
}
"""Members that are optional in the specification and must not be null."""


def _document() -> Path | None:
    named = os.environ.get("RESPONSES_KIT_SPEC")
    if named:
        return Path(named)
    beside = Path(__file__).resolve().parents[3] / "shared" / "spec" / "openresponses-2026-04-24.openapi.json"
    return beside if beside.exists() else None


@functools.cache
def _validator(schema: str) -> Callable[[Any], None] | None:
    """Return the validator of an OpenAPI schema, or None if there is no document."""
    path = _document()
    if path is None:
        return None
    components = json.loads(path.read_text())["components"]
    assert schema in components["schemas"], f"the OpenAPI document has no schema {schema}"
    validator = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{schema}", "components": components})

    def check(value: Any) -> None:
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        assert error is None, f"{schema} at {error.json_path}: {error.message[:500]}"

    return check


def _event_models() -> dict[str, type[BaseModel]]:
    models = {}
    for name, model in vars(official).items():
        if name.endswith("StreamingEvent"):
            (kind,) = model.model_fields["type"].annotation
            models[kind.value] = model
    return models


EVENTS = _event_models()


def _check_model(model: type[BaseModel], value: Mapping[str, Any]) -> None:
    try:
        model.model_validate_json(json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as error:
        raise AssertionError(f"{model.__name__}: {error}") from None
    check = _validator(model.__name__)
    if check is not None:
        check(value)


def _no_optional_nulls(value: Any, path: str = "$") -> None:
    if isinstance(value, Mapping):
        for key, member in value.items():
            assert member is not None or key not in OPTIONAL, f"{path}.{key} must be omitted instead of null"
            if key not in ("metadata", "parameters", "schema"):
                _no_optional_nulls(member, f"{path}.{key}")
    elif isinstance(value, list):
        for index, member in enumerate(value):
            _no_optional_nulls(member, f"{path}[{index}]")


def _is_extension(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("type"), str) and bool(EXTENSION.match(item["type"]))


def _check_extension_item(item: Mapping[str, Any]) -> None:
    for key in ("id", "type", "status"):
        assert isinstance(item.get(key), str), f"extension item without a string {key}: {item}"
        assert item[key], f"extension item with an empty {key}"


ITEMS: dict[str, type[BaseModel]] = {
    "message": official.Message,
    "function_call": official.FunctionCall,
    "function_call_output": official.FunctionCallOutput,
    "reasoning": official.ReasoningBody,
    "compaction": official.CompactionBody,
}


def check_item(item: Mapping[str, Any]) -> None:
    """Check that an item is complete and has an id and a status."""
    if _is_extension(item):
        _check_extension_item(item)
        return
    assert item.get("type") in ITEMS, f"an item of no known type: {str(item)[:300]}"
    _check_model(ITEMS[item["type"]], item)
    assert item["id"], f"item with an empty id: {item}"
    if item["type"] != "compaction":
        assert item.get("status") in ("in_progress", "completed", "incomplete"), f"item without a status: {item}"
    _no_optional_nulls(item)
    if item["type"] == "function_call":
        assert 1 <= len(item["call_id"]) <= 64, "call_id must have 1 to 64 characters"


_STANDARD_TOOL = {"type": "function", "name": "stands_for_an_extension"}


def _without_extensions(response: Mapping[str, Any]) -> Object:
    """Return the response without extension items and with extension tools and choices replaced.

    The specification allows extension tools (`slug:name`), to which `tool_choice` applies too. A chosen extension
    tool must be listed in `tools`.
    """
    tools, choice = response.get("tools"), response.get("tool_choice")
    types = [tool["type"] for tool in tools if _is_extension(tool)] if isinstance(tools, list) else []

    def standard(named: Any) -> Any:
        if not _is_extension(named):
            return named
        assert set(named) <= {"type", "name"}, f"a choice of an extension tool has only a type and a name: {named}"
        assert named["type"] in types, f"tool_choice names {named['type']}, which is not among the tools"
        return _STANDARD_TOOL

    if isinstance(choice, Mapping) and isinstance(choice.get("tools"), list):
        choice = {**choice, "tools": [standard(named) for named in choice["tools"]]}
    return {
        **response,
        "output": [item for item in response["output"] if not _is_extension(item)],
        "tools": [tool for tool in tools if not _is_extension(tool)] if isinstance(tools, list) else tools,
        "tool_choice": standard(choice),
    }


def _may_be_beside_calls(item: Mapping[str, Any]) -> bool:
    return item["type"] == "function_call" or _is_extension(item)


def check_response(response: Mapping[str, Any]) -> None:
    """Check the required members of a response object, its status, and the sums in its usage."""
    assert isinstance(response.get("output"), list), f"no response object: {str(response)[:300]}"
    for item in response["output"]:
        check_item(item)
    standard = _without_extensions(response)
    _check_model(official.ResponseResource, standard)
    _no_optional_nulls({key: value for key, value in standard.items() if key != "output"})

    status = response["status"]
    assert status in ("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"), status
    assert (response["completed_at"] is not None) == (status == "completed"), f"completed_at of a {status} response"
    assert (response["error"] is not None) == (status == "failed"), f"error of a {status} response"
    reasons = {"incomplete": ("max_output_tokens", "content_filter"), "cancelled": (None, "cancelled")}.get(
        status, (None,)
    )
    assert (response["incomplete_details"] or {"reason": None})["reason"] in reasons, (
        f"incomplete_details when {status}"
    )
    ids = [item["id"] for item in response["output"]]
    assert len(ids) == len(set(ids)), f"item ids repeat: {ids}"
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    assert len(calls) == len(set(calls)), f"call ids repeat: {calls}"
    if status == "completed":
        # Extension items may have other states, such as "failed". An incomplete item makes its response incomplete.
        own = [item.get("status", "completed") for item in response["output"]]
        assert all(
            state == "completed" or (_is_extension(item) and state not in ("in_progress", "incomplete"))
            for item, state in zip(response["output"], own, strict=True)
        ), f"a completed response with items that are {own}"
    if status in ("completed", "incomplete"):
        items = list(response["output"])
        while len(items) > 1 and items[-2]["type"] == "function_call" and _may_be_beside_calls(items[-1]):
            items.pop()  # parallel calls may be truncated together
        assert all(item.get("status") != "incomplete" for item in items[:-1]), "an incomplete item is last"
    usage = response["usage"]
    if usage is not None:
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage
        assert 0 <= usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"], usage
        assert 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"], usage


def check_error(body: Mapping[str, Any]) -> None:
    """Check the body of an HTTP error: `error` with its four members, a known type, a short message."""
    assert set(body) == {"error"}, f"an error body holds error and nothing else: {str(body)[:300]}"
    error = body["error"]
    assert {"type", "code", "message", "param"} <= set(error), f"members of an error: {sorted(error)}"
    _check_model(official.ErrorPayload, error)
    assert error["type"] in ERROR_TYPES, error["type"]
    assert isinstance(error["code"], str), error
    assert error["code"], error
    assert 0 < len(error["message"]) <= 600, f"{len(error['message'])} characters of message"
    assert error["param"] is None or 0 < len(error["param"]) <= 200, error["param"]


def check_event(event: Mapping[str, Any]) -> None:
    """Check one event, independent of its predecessors."""
    kind, number = event.get("type"), event.get("sequence_number")
    assert isinstance(kind, str), f"an event without a type: {str(event)[:300]}"
    assert type(number) is int, f"{kind}: sequence_number is {number!r}"
    if EXTENSION.match(kind):
        return
    assert kind in EVENTS, f"{kind} is neither the specification's nor an extension"
    if "response" in event:
        check_response(event["response"])
        shown = {**event, "response": {**_without_extensions(event["response"]), "output": []}}
    elif _is_extension(event.get("item")):
        check_item(event["item"])
        return
    else:
        shown = dict(event)
        if "item" in event:
            check_item(event["item"])
        _no_optional_nulls(shown)
    _check_model(EVENTS[kind], shown)
    if kind == "error":
        check_error({"error": event["error"]})


class _Part:
    """A content or summary part, built from events."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        self.kind: str = part["type"]
        self.field = "refusal" if self.kind == "refusal" else "text"
        assert part[self.field] == "", f"a part is added empty, not with {part[self.field]!r}"
        assert not part.get("annotations"), "a part is added without annotations"
        assert not part.get("logprobs"), "a part is added without logprobs"
        self.value: Object = json.loads(json.dumps(part))
        self.deltas = 0
        self.text_done = False
        self.done = False


class _Item:
    """An output item, built from events."""

    def __init__(self, index: int, item: Mapping[str, Any]) -> None:
        self.index = index
        self.kind: str = item["type"]
        self.id: str = item["id"]
        self.value: Object = json.loads(json.dumps(item))
        self.parts: list[_Part] = []
        self.summaries: list[_Part] = []
        self.arguments_done = False
        self.done = False


_TEXT_EVENTS = {
    "response.output_text.delta": "output_text",
    "response.output_text.done": "output_text",
    "response.output_text.annotation.added": "output_text",
    "response.refusal.delta": "refusal",
    "response.refusal.done": "refusal",
    "response.reasoning.delta": "reasoning_text",
    "response.reasoning.done": "reasoning_text",
    "response.reasoning_summary_text.delta": "summary_text",
    "response.reasoning_summary_text.done": "summary_text",
}


class _Replay:
    """A client that follows a stream, rejects illegal events, and builds the response."""

    def __init__(self, *, error_events: bool) -> None:
        self.error_events = error_events
        self.response: Object | None = None
        self.items: list[_Item] = []
        self.count = 0
        self.lifecycle_events: list[str] = []
        self.started = False
        self.failure: Object | None = None
        self.final: Object | None = None

    def feed(self, event: Mapping[str, Any]) -> None:
        kind: str = event["type"]
        assert event["sequence_number"] == self.count, f"{kind} has number {event['sequence_number']}, not {self.count}"
        assert self.final is None, f"{kind} after the terminal event"
        assert self.failure is None or kind == "response.failed", f"{kind} between error and response.failed"
        self.count += 1
        if EXTENSION.match(kind):
            assert self.started, "an extension event before response.in_progress"
        elif "response" in event:
            self.lifecycle(kind, event["response"])
        else:
            assert self.started, f"{kind} before response.in_progress"
            handler = kind.removeprefix("response.").replace(".", "_")
            if kind in _TEXT_EVENTS:
                self.text(kind, event)
            else:
                getattr(self, handler)(event)

    def lifecycle(self, kind: str, response: Mapping[str, Any]) -> None:
        if self.response is None:
            assert kind in ("response.created", "response.queued"), f"the stream begins with {kind}"
            assert response["output"] == [], "a new response has no output yet"
            self.response = json.loads(json.dumps(response))
        assert response["id"] == self.response["id"], "the response's id changes within the stream"
        if kind in TERMINAL_EVENT_TYPES:
            assert self.started, f"{kind} before response.in_progress"
            assert response["status"] in TERMINAL_EVENT_TYPES[kind], f"{kind} carries status {response['status']}"
            self.close(kind, response)
        elif kind == "response.in_progress":
            assert not self.started, "response.in_progress twice"
            assert "response.created" in self.lifecycle_events, "response.in_progress without response.created"
            self.started = True
            assert response["status"] == "in_progress", response["status"]
        else:
            assert not self.started, f"{kind} after response.in_progress"
            assert kind not in self.lifecycle_events, f"{kind} twice"
            self.lifecycle_events.append(kind)
            assert response["status"] in ("queued", "in_progress"), response["status"]

    def close(self, kind: str, response: Mapping[str, Any]) -> None:
        assert self.response is not None
        for item in self.items:
            assert item.done, f"{kind} while item {item.index} is open"
        has_error_event = kind == "response.failed" and self.error_events
        assert (self.failure is not None) == has_error_event, f"{kind} with error event: {self.failure}"
        if response["status"] == "incomplete" and self.items and not _is_extension(self.items[-1].value):
            assert self.items[-1].value["status"] == "incomplete", (
                "the last item of an incomplete response is incomplete"
            )
        error = self.failure if self.error_events else response["error"]
        self.final = {
            **self.response,
            "status": response["status"],
            "output": [item.value for item in self.items],
            "error": error and {"code": error["code"], "message": error["message"]},
            # No streamed event has these before the terminal event.
            **{key: response[key] for key in ("completed_at", "incomplete_details", "usage")},
        }

    def output_item_added(self, event: Mapping[str, Any]) -> None:
        index, item = event["output_index"], event["item"]
        assert index == len(self.items), f"output_index {index} after {len(self.items)} items"
        assert item["id"] not in [other.id for other in self.items], f"item id {item['id']} twice"
        new = _Item(index, item)
        if item["type"] == "message":
            assert item["content"] == [], "a message is added with content []"
            assert item["role"] == "assistant", item["role"]
        elif item["type"] == "function_call":
            assert item["arguments"] == "", "a call is added with arguments ''"
            assert item["name"], "a call is added with its name"
            assert item["call_id"] not in [other.value.get("call_id") for other in self.items], "call_id twice"
        elif item["type"] == "reasoning":
            assert item["summary"] == [], "reasoning is added with summary []"
            assert not item.get("content"), "reasoning is added without content"
        if not _is_extension(item):
            assert item["status"] == "in_progress", f"an item is added with status {item['status']}"
        for other in self.items:
            # Calls and extension items may overlap: the receipt of a hosted tool is open while the tool runs.
            parallel = other.kind == new.kind == "function_call" or (
                _is_extension(other.value) and _is_extension(new.value)
            )
            assert other.done or parallel, f"item {index} is added while item {other.index} is open"
        self.items.append(new)

    def open_item(self, event: Mapping[str, Any]) -> _Item:
        index = event["output_index"]
        assert 0 <= index < len(self.items), f"{event['type']} for item {index}, which was never added"
        item = self.items[index]
        assert not item.done, f"{event['type']} for item {index}, which is done"
        assert event.get("item_id", item.id) == item.id, f"{event['type']} names item {event['item_id']}, not {item.id}"
        return item

    def content_part_added(self, event: Mapping[str, Any]) -> None:
        item = self.open_item(event)
        expected = {"message": ("output_text", "refusal"), "reasoning": ("reasoning_text",)}.get(item.kind, ())
        assert event["part"]["type"] in expected, f"a {event['part']['type']} part in a {item.kind}"
        self.add(item, item.parts, event["content_index"], event["part"])

    def reasoning_summary_part_added(self, event: Mapping[str, Any]) -> None:
        item = self.open_item(event)
        assert item.kind == "reasoning", f"a summary in a {item.kind}"
        assert event["part"]["type"] == "summary_text", event["part"]
        self.add(item, item.summaries, event["summary_index"], event["part"])

    @staticmethod
    def add(item: _Item, parts: list[_Part], index: int, part: Mapping[str, Any]) -> None:
        assert index == len(parts), f"part index {index} after {len(parts)} parts"
        assert all(other.done for other in (*item.parts, *item.summaries)), "a part is added while another one is open"
        parts.append(_Part(part))

    def part(self, event: Mapping[str, Any]) -> _Part:
        item = self.open_item(event)
        parts, index = (
            (item.summaries, event["summary_index"])
            if "summary_index" in event
            else (item.parts, event["content_index"])
        )
        assert 0 <= index < len(parts), f"{event['type']} for part {index}, which was never added"
        part = parts[index]
        assert not part.done, f"{event['type']} for part {index}, which is done"
        return part

    def text(self, kind: str, event: Mapping[str, Any]) -> None:
        part = self.part(event)
        assert part.kind == _TEXT_EVENTS[kind], f"{kind} for a {part.kind} part"
        assert not part.text_done, f"{kind} after the part's text is done"
        if kind.endswith("annotation.added"):
            notes = part.value["annotations"]
            assert event["annotation_index"] == len(notes), f"annotation {event['annotation_index']} after {len(notes)}"
            notes.append(event["annotation"])
        elif kind.endswith(".delta"):
            part.deltas += 1
            part.value[part.field] += event["delta"]
            if event.get("logprobs"):
                part.value.setdefault("logprobs", []).extend(event["logprobs"])
        else:
            part.text_done = True
            assert event[part.field] == part.value[part.field], f"{kind} differs from its deltas"
            if "logprobs" in event:
                assert event["logprobs"] == part.value.get("logprobs", []), f"{kind}'s logprobs differ from its deltas'"

    def content_part_done(self, event: Mapping[str, Any]) -> None:
        part = self.part(event)
        assert part.text_done, f"{event['type']} before the part's text is done"
        assert event["part"] == part.value, f"{event['type']} shows {event['part']}, its events made {part.value}"
        part.done = True

    reasoning_summary_part_done = content_part_done

    def function_call_arguments_delta(self, event: Mapping[str, Any]) -> None:
        item = self.open_item(event)
        assert item.kind == "function_call", f"arguments for a {item.kind}"
        assert not item.arguments_done, "arguments continue after they are done"
        item.value["arguments"] += event["delta"]

    def function_call_arguments_done(self, event: Mapping[str, Any]) -> None:
        item = self.open_item(event)
        assert item.kind == "function_call", f"arguments for a {item.kind}"
        assert not item.arguments_done, "arguments are done twice"
        assert event["arguments"] == item.value["arguments"], "the arguments differ from their deltas"
        item.arguments_done = True

    def output_item_done(self, event: Mapping[str, Any]) -> None:
        item, shown = self.open_item(event), event["item"]
        assert all(other.done for other in self.items[: item.index]), f"item {item.index} is closed out of order"
        assert all(part.done for part in (*item.parts, *item.summaries)), (
            f"item {item.index} is closed with an open part"
        )
        assert item.kind != "function_call" or item.arguments_done, "a call is closed before its arguments"
        item.done = True
        if _is_extension(shown):
            # The item comes complete, so it must not change.
            assert (shown["id"], shown["type"]) == (item.id, item.kind), "an extension item changes its id or type"
            assert shown["status"] != "in_progress", "an extension item is done while it is in progress"
            item.value = dict(shown)
            return
        assert shown["status"] in ("completed", "incomplete"), f"an item is done with status {shown['status']}"
        item.value["status"] = shown["status"]
        if item.kind == "message":
            item.value["content"] = [part.value for part in item.parts]
        elif item.kind == "reasoning":
            item.value["summary"] = [part.value for part in item.summaries]
            # Raw reasoning has deltas only if the server's settings show them; otherwise the finished item has it.
            if item.parts:
                item.value["content"] = [part.value for part in item.parts]
            elif "content" in shown:
                item.value["content"] = shown["content"]
            if "encrypted_content" in shown:
                item.value["encrypted_content"] = shown["encrypted_content"]
        assert shown == item.value, f"item {item.index} is done as {shown}, its events made {item.value}"

    def error(self, event: Mapping[str, Any]) -> None:
        self.failure = event["error"]


def replay(events: Sequence[Mapping[str, Any]], *, error_events: bool = True) -> Object:
    """Return the final response, rebuilt from the events before the terminal event.

    Status, error and output come from the stream. `completed_at`, `incomplete_details` and `usage` come from the
    terminal event, and so does the error if there are no error events, as on a WebSocket.

    Raises:
        AssertionError: An event violates the order of events.
    """
    client = _Replay(error_events=error_events)
    for event in events:
        client.feed(event)
    assert client.final is not None, f"no terminal event; the last one is {events[-1]['type'] if events else 'none'}"
    return client.final


def check_stream(events: Sequence[Mapping[str, Any]], *, error_events: bool = True) -> Object:
    """Check each event of a stream, their order, and that replaying them yields the final object.

    Args:
        events: The stream.
        error_events: Whether an `error` event precedes `response.failed`, as on every transport but WebSocket.

    Returns:
        The final response object.
    """
    for event in events:
        check_event(event)
    rebuilt = replay(events, error_events=error_events)
    final: Object = events[-1]["response"]
    assert rebuilt == final, "\n".join(
        f"{key}: replayed {rebuilt.get(key)!r}, sent {final.get(key)!r}"
        for key in sorted({*rebuilt, *final})
        if rebuilt.get(key) != final.get(key)
    )
    return final
