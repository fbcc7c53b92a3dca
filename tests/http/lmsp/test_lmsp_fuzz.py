"""Property tests: any request and any outputs give a problem document or exactly the draft's objects and events."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from responses_kit import ResponsesKit, Turn, errors, outputs
from responses_kit.http.lmsp.rendering import EventRenderer, render_response
from responses_kit.protocol.sse import KEEP_ALIVE, encode_sse
from responses_kit.protocol.sse import decode_events as decode_machine_events
from responses_kit.protocol.state_machine import Event as MachineEvent
from responses_kit.testing import ScriptedBackend
from tests.protocol.test_state_machine import new_machine, settle
from tests.support.strategies import any_outputs, any_run, json_values, legal_outputs

from .conformance import FINAL, Event, check_problem, check_response, check_stream, decode_events
from .test_lmsp_input import CALL, MESSAGE, OUTPUT, SCHEMA, TEXT, THOUGHT, TOOL, VALID, ask, call, listen, new_kit

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

FRAME = re.compile(rb"id: [1-9][0-9]*\nevent: [a-z_.]+\ndata: \{[ -\x7f]*\}\n\n")
"""One event: three lines of ASCII and a blank one."""


def frames(stream: bytes) -> list[bytes]:
    """Return the encoded events of a stream, without comments."""
    stream = stream.replace(KEEP_ALIVE, b"")
    found = FRAME.findall(stream)
    assert b"".join(found) == stream, "an event is malformed or split"
    return found


def read_stream(stream: str) -> tuple[list[dict[str, Any]], Event]:
    """Return the items of a stream and its final event, after checking it."""
    events = decode_events(stream)
    items = check_stream(events)
    assert all(event.name in FINAL for event in events[-1:]), "the stream ends with an event of its response"
    open_items: set[str] = set()
    for event in events:  # deltas belong to open items
        if event.name == "response.output_item.added":
            open_items.add(event.data["item"]["id"])
        elif event.name == "response.output_text.delta":
            assert event.data["item_id"] in open_items
        elif event.name == "response.output_item.done":
            open_items.remove(event.data["item"]["id"])
    return items, events[-1]


def without_ids(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items without the ids that differ between responses."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


# Requests.

FULL: dict[str, Any] = VALID | {
    "input": [
        MESSAGE | {"role": "system"},
        MESSAGE | {"id": "msg_1", "content": [TEXT, TEXT]},
        THOUGHT | {"id": "rs_1"},
        MESSAGE | {"role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
        CALL | {"id": "fc_1"},
        OUTPUT,
    ],
    "max_output_tokens": 512,
    "temperature": 0.7,
    "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    "tools": [
        TOOL | {"description": "Adds", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
    ],
    "tool_choice": {"type": "function", "name": "add"},
    "store": True,
    "extensions": {"acme:x": {"a": 1}},
}
BASES = [VALID, FULL, FULL | {"tool_choice": "required", "response_format": {"type": "text"}}]
FRAGMENTS = [
    MESSAGE,
    CALL,
    OUTPUT,
    THOUGHT,
    TEXT,
    TOOL,
    SCHEMA,
    FULL,
    [],
    {},
    [TEXT],
    [MESSAGE],
    "",
    "add",
    "c",
    "auto",
]
FRAGMENTS += [
    "none",
    "required",
    "message",
    "output_text",
    "user",
    "assistant",
    "scripted",
    "resp_1",
    "x" * 65,
    "é\x00",
]
FRAGMENTS += [None, True, False, 0, 1, -1, 2, 0.5, 2**31, 2**64, 10**400, {"type": "json_schema"}, {"$ref": "#"}]
FIELDS = sorted({*FULL, "stream", "previous_response_id", "instructions", "text", "background", "name", "strict", "id"})

values = st.sampled_from(FRAGMENTS) | json_values


@st.composite
def requests(draw: st.DrawFn) -> Any:
    """A valid request with a few changes at any depth."""
    request: Any = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(0, 3))):
        change_value(draw, *draw(st.sampled_from(list(iterate_positions(request)))))
    return request


def iterate_positions(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list and object in a value with each of its keys, and with a missing key."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        yield value, None
        for key in keys:
            yield value, key
            yield from iterate_positions(value[key])


def change_value(draw: st.DrawFn, container: Any, key: Any) -> None:
    what = draw(st.sampled_from(["put", "put", "drop", "twice"]))
    if key is None and isinstance(container, list):
        container.insert(draw(st.integers(0, len(container))), copy.deepcopy(draw(values)))
    elif key is None:
        container[draw(st.sampled_from(FIELDS) | st.text(max_size=4))] = copy.deepcopy(draw(values))
    elif what == "drop":
        del container[key]
    elif what == "twice" and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    else:
        container[key] = copy.deepcopy(draw(values))


def answer_as_demanded(turn: Turn) -> Iterator[outputs.Output]:
    """Answer as the request demands: by a call, by a refusal if only JSON is allowed, else by text."""
    if turn.must_call:
        yield outputs.ReasoningSummary("Hm.")
        yield outputs.ToolCall(turn.callable_tools[0].name, "{}")
    elif turn.text_format.type != "text":
        yield outputs.Refusal("I would rather not.")
    else:
        yield from ("Two, ", "or ", "three.")
    yield outputs.Usage(3, 4)


async def check_reply(body: Any, mode: str) -> None:
    """Send a request, and check its reply."""
    kit = ResponsesKit(ScriptedBackend(answer_as_demanded, models=new_kit().backend.models))
    reply = await ask(kit, mode, body)
    if reply.status >= 400:
        assert reply.status == 400
        assert reply.headers["Content-Type"] == "application/problem+json"
        check_problem(json.loads(reply.body))
    elif mode == "task":
        assert reply.status == 202
        await check_task(kit, json.loads(reply.body)["id"])
    elif reply.stream is None:
        response = json.loads(reply.body)
        check_response(response)
        assert response["status"] == "completed"
        await check_stored(kit, response)
    else:
        items, last = read_stream(await listen(reply))
        assert last.name == "response.completed"
        stored = await call(kit, "GET", f"/responses/{last.data['response_id']}")
        if stored.status == 200:
            assert json.loads(stored.body)["output"] == items
    await kit.aclose()


async def check_stored(kit: ResponsesKit, response: dict[str, Any]) -> None:
    stored = await call(kit, "GET", f"/responses/{response['id']}")
    assert stored.status in (200, 404)
    if stored.status == 200:
        assert json.loads(stored.body) == response


async def check_task(kit: ResponsesKit, name: str) -> tuple[list[dict[str, Any]], Event]:
    """Check a task's stream, its result, and the stream after each event."""
    path = f"/tasks/{name}"
    stream = await listen(await call(kit, "GET", f"{path}/events"))
    items, last = read_stream(stream)
    task = json.loads((await call(kit, "GET", path)).body)
    response = task["response"]
    check_response(response)
    assert (task["status"], response["status"], response["id"]) == (
        last.data["status"],
        last.data["status"],
        last.data["response_id"],
    )
    assert response["output"] == items
    assert response["usage"] == last.data.get("usage", response["usage"])
    assert response["error"] == last.data.get("error")
    parts = frames(stream.encode())
    for after in {0, 1, len(parts) // 2, len(parts) - 1, len(parts), len(parts) + 7}:
        rest = await listen(await call(kit, "GET", f"{path}/events", query=f"after={after}"))
        assert rest.encode().replace(KEEP_ALIVE, b"") == b"".join(parts[after:])
    return items, last


@given(body=requests(), mode=st.sampled_from(["plain", "streamed", "task"]))
@settings(max_examples=max(300, settings().max_examples))
async def test_any_changed_request_gets_valid_response_or_problem(body: Any, mode: str) -> None:
    await check_reply(body, mode)


@given(body=json_values | st.dictionaries(st.sampled_from(FIELDS), values, max_size=8))
async def test_any_json_gets_valid_response_or_problem(body: Any) -> None:
    for mode in ("plain", "streamed", "task"):
        await check_reply(body, mode)


@st.composite
def corrupted_bytes(draw: st.DrawFn) -> bytes:
    """The bytes of a valid body with a few bytes changed, inserted, removed or truncated."""
    body = bytearray(json.dumps(draw(st.sampled_from(BASES))).encode())
    for _ in range(draw(st.integers(1, 4))):
        container = draw(st.integers(0, len(body)))
        end = container + draw(st.sampled_from([0, 0, 1, 1, 2, 8, 100]))
        new = draw(
            st.binary(max_size=3) | st.sampled_from([b'"', b"\\", b"{", b"}", b"[", b",", b"0", b"null", b"\\ud83d"])
        )
        body[container:end] = new
    return bytes(body[: draw(st.integers(0, len(body)))] if draw(st.integers(0, 4)) == 0 else body)


@given(body=corrupted_bytes())
@settings(max_examples=max(300, settings().max_examples))
@example(body=json.dumps(FULL).encode())
async def test_any_bytes_get_valid_response_or_problem(body: bytes) -> None:
    for mode in ("plain", "task"):
        await check_reply(body, mode)


# Outputs.


def run_script(
    script: list[Any], ending: str, *, queued: bool, **options: bool
) -> tuple[list[MachineEvent], dict[str, Any]]:
    """Return the state machine's events for a script, and the final response."""
    machine = new_machine(**options)
    machine_events = [*(machine.queue() if queued else []), *machine.start()]
    for output in script:
        try:
            machine_events += machine.feed(output)
        except errors.IllegalOutput:
            continue
    machine_events += settle(machine, ending)
    return machine_events, machine.response


@given(**any_run)
@settings(max_examples=max(300, settings().max_examples))
@example([], "close end", True, False, False, True)
@example([outputs.Item("acme:x", {}), "a", outputs.Item("acme:y", {}), outputs.Refusal("b")], "close end", *[False] * 4)
@example(
    [outputs.ToolCall("f", "", "a"), outputs.ToolCall("g", "{", "b"), outputs.ToolArguments("{}", "a"), "c"],
    "close end",
    *[True] * 4,
)
@example(["a", outputs.Refusal("b"), "c", outputs.Message(), "", outputs.Message()], "close cancel", *[True] * 4)
@example(
    [
        outputs.Item("acme:x", {}, "in_progress", "k"),
        outputs.Event("acme:x", {}),
        outputs.Item("acme:x", {}, key="k"),
        "a",
    ],
    "close fail",
    *[True] * 4,
)
@example(
    [outputs.Reasoning("a"), outputs.ReasoningSummary("b"), outputs.ReasoningSummary("c", True)], "fail", *[True] * 4
)
@example(["\ud83d", "\ude00", "\ud83d", outputs.Refusal("\ude00"), "\u2028\n\ndata: x\n\n"], "close end", *[True] * 4)
def test_any_outputs_make_valid_stream_with_final_response(
    script: list[Any], ending: str, queued: bool, stream_reasoning: bool, stream_extensions: bool, error_events: bool
) -> None:
    events, final = run_script(
        script,
        ending,
        queued=queued,
        stream_reasoning=stream_reasoning,
        stream_extensions=stream_extensions,
        error_events=error_events,
    )
    pieces_of_log = [encode_sse(event) for event in events]
    logged = decode_machine_events(b"".join(pieces_of_log))
    renderer = EventRenderer()
    stream = renderer.render(events)
    items, last = read_stream(stream.decode("ascii"))

    response = render_response(final)
    check_response(response)
    assert response["output"] == items
    assert (last.data["status"], last.data["response_id"]) == (response["status"], response["id"])
    assert last.data.get("usage", response["usage"]) == response["usage"]
    assert last.data.get("error") == response["error"]
    assert last.data.get("incomplete_details") == response["incomplete_details"]

    parts = frames(stream)
    pieces = EventRenderer()
    assert b"".join(pieces.render([event]) for event in events) == stream, "the items do not depend on the mode"
    assert EventRenderer().render(logged) == stream, "the items do not depend on the log"
    for after in range(len(parts) + 2):
        rest = EventRenderer(after)
        assert rest.render(events) == b"".join(parts[after:])
        rest = EventRenderer(after)
        assert b"".join(rest.render(rest.decode_new_events(piece)) for piece in pieces_of_log) == b"".join(
            parts[after:]
        )


@given(script=st.lists(st.one_of(legal_outputs, legal_outputs, any_outputs), max_size=8))
async def test_script_ends_alike_in_every_mode(script: list[Any]) -> None:
    tools = [{"type": "function", "name": name} for name in ("add", "a" * 64, "get_weather-2")]
    body = VALID | {"tools": tools, "store": True}
    plain = await ask(new_kit(*script), "plain", body)

    kit = new_kit(*script)
    items, last = read_stream(await listen(await ask(kit, "streamed", body)))
    stored = json.loads((await call(kit, "GET", f"/responses/{last.data['response_id']}")).body)
    check_response(stored)
    assert (stored["output"], stored["status"]) == (items, last.data["status"])

    other = new_kit(*script)
    task = await ask(other, "task", body)
    items_of_task, last_of_task = await check_task(other, json.loads(task.body)["id"])
    assert without_ids(items_of_task) == without_ids(items)
    assert last_of_task.data | {"response_id": ""} == last.data | {"response_id": ""}

    if plain.stream is None and plain.status == 200:
        response = json.loads(plain.body)
        check_response(response)
        assert without_ids(response["output"]) == without_ids(items)
        assert (response["status"], response["usage"]) == (last.data["status"], last.data["usage"])
    else:
        assert last.name == "response.failed"
        assert json.loads(plain.body) == last.data["error"], "the problem does not depend on the mode"
    await kit.aclose()
    await other.aclose()
