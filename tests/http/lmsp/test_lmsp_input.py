"""Tests of invalid requests: the problem document names the field, in LMSP's terms."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from responses_kit import Limits, Model, ResponsesKit, Turn, errors
from responses_kit.http.lmsp import LMSP
from responses_kit.http.lmsp.requests import ResponseRequest
from responses_kit.http.messages import Body, Reply, Request
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import Pause, ScriptedBackend
from tests.support.memory import stored_records

from .conformance import check_response, check_stream, decode_events, problem_in

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0
CAPABLE = {"tools": True, "structured_output": True}
MODES = ["plain", "streamed", "task"]

SECRET = "hunter2"
"""A part of invalid values that replies must not contain."""

FOREIGN = ("text.format", "starting_after", "GET /models", "background", "without stream", "sequence_number", "'~")
"""Terms of the Open Responses API, and internal ones, that replies must not contain."""


class CountingBackend(ScriptedBackend):
    """A backend that counts ninety-nine tokens for each prompt."""

    async def count_tokens(self, turn: Turn) -> int:
        return 99


def new_kit(*script: Any, model: Model | None = None, **settings: Any) -> ResponsesKit:
    backend = CountingBackend(list(script) or ["Hi."], models=[model or Model("scripted", **CAPABLE)])
    return ResponsesKit(backend, **settings)


async def call(
    kit: ResponsesKit, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, **more: Any
) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | dict(headers or {})

    async def read() -> bytes:  # as by a host
        request_body = Body(headers, limit=kit.settings.limits.max_body_bytes)
        request_body.feed(data)
        return request_body.finish()

    with anyio.fail_after(BOUND):
        reply = await LMSP(kit).handle(Request(method, path, headers=headers, read=read, **more))
    assert reply.headers["LMSP-Version"] == "1.0"
    return reply


async def ask(kit: ResponsesKit, mode: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
    """Send a request in one of the three modes."""
    if mode == "streamed" and isinstance(body, dict):
        body = {"stream": True} | body
    return await call(kit, "POST", "/tasks" if mode == "task" else "/responses", body, headers)


def refusal(reply: Reply) -> dict[str, Any]:
    """Return a problem document, after checking that it discloses nothing."""
    assert reply.stream is None
    problem = problem_in(reply.status, reply.headers, reply.body)
    assert SECRET not in json.dumps(problem)
    for word in FOREIGN:
        assert word not in json.dumps(problem), problem
    return problem


def check_untouched(kit: ResponsesKit) -> None:
    """Check that nothing was generated or stored."""
    assert isinstance(kit.backend, ScriptedBackend)
    assert kit.backend.turns == []
    assert isinstance(kit.store, MemoryStore)
    assert stored_records(kit.store) == []


async def listen(reply: Reply) -> str:
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    assert reply.stream is not None
    with anyio.fail_after(BOUND):
        await reply.stream(send)
    return b"".join(sent).decode()


async def outcome(kit: ResponsesKit, mode: str, reply: Reply) -> str:
    """Return the final status of an accepted request."""
    if mode == "plain":
        response = json.loads(reply.body)
        check_response(response)
        return str(response["status"])
    if mode == "task":
        assert reply.status == 202
        reply = await call(kit, "GET", f"/tasks/{json.loads(reply.body)['id']}/events")
    events = decode_events(await listen(reply))
    check_stream(events)
    return str(events[-1].data["status"])


# Fields.

TEXT = {"type": "input_text", "text": "Hi"}
MESSAGE = {"type": "message", "role": "user", "content": [TEXT]}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
TOOL = {"type": "function", "name": "add"}
SCHEMA = {"name": "answer", "schema": {"type": "object"}}
VALID: dict[str, Any] = {"model": "scripted", "input": [MESSAGE]}

INVALID = "invalid_request"
OMITTED = object()

Row = tuple[dict[str, Any], str, str]


def omit_member(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if member is not OMITTED}


def fields(name: str, *values: Any, code: str = INVALID, param: str | None = None, **more: Any) -> list[Row]:
    """Return requests with a member set to each value."""
    return [({name: value, **more}, code, param or name) for value in values]


def members(item: Mapping[str, Any], name: str, *values: Any, of: str = "") -> list[Row]:
    """Return requests with a member of the second input item set to each value."""
    return [
        ({"input": [MESSAGE, omit_member({**item, name: value})]}, INVALID, f"input[1].{of or name}")
        for value in values
    ]


def parts(*values: Any, of: str = "") -> list[Row]:
    """Return requests with the second content part set to each value."""
    return [
        ({"input": [MESSAGE | {"content": [TEXT, value]}]}, INVALID, f"input[0].content[1]{of}") for value in values
    ]


def formats(*values: Any, of: str = "", code: str = INVALID) -> list[Row]:
    return fields("response_format", *values, param=f"response_format{of}", code=code)


def schemas(name: str, *values: Any, code: str = INVALID) -> list[Row]:
    """Return requests with a member of `json_schema` set to each value."""
    created = [{"type": "json_schema", "json_schema": omit_member({**SCHEMA, name: value})} for value in values]
    return formats(*created, of=f".json_schema.{name}", code=code)


def tools(name: str, *values: Any) -> list[Row]:
    """Return requests with a member of the second tool set to each value."""
    created = [[TOOL, omit_member({"type": "function", "name": "sub", name: value})] for value in values]
    return fields("tools", *created, param=f"tools[1].{name}")


INVALID_STRINGS = [7, 1.5, True, [], {}, [SECRET]]
INVALID_NUMBERS = [SECRET, "1", True, [], {}]
INVALID_FLAGS = [0, 1, SECRET, "true", [], {}]
INVALID_OBJECTS = [7, SECRET, True, [], [SECRET]]
INVALID_NAMES = [OMITTED, None, "", f"{SECRET} x", SECRET + "x" * 64, "é", "a.b", "add\n", *INVALID_STRINGS]
INVALID_CALL_IDS = [OMITTED, None, "", SECRET + "x" * 64, *INVALID_STRINGS]
IMAGE = {"type": "input_image", "image_url": f"https://example.org/{SECRET}.png"}
AUDIO = {"type": "input_audio", "input_audio": {"data": SECRET, "format": "wav"}}
FILE = {"type": "input_file", "file_data": SECRET}
PART_TYPES = ["text", "input_video", "refusal", "reasoning_text", "summary_text", "acme:text", SECRET, "", None, 7, []]

ROWS: list[Row] = [
    *fields("model", None, *INVALID_STRINGS),
    *fields("model", "", SECRET, "scripted ", "Scripted", "x" * 100_000, code="model_not_found"),
    # Items.
    *fields("input", None, SECRET, 7, True, {}, MESSAGE, [], [MESSAGE] * 10_001),
    *fields("input", [SECRET], [None], [7], [[]], [{}], [[MESSAGE]], param="input[0]"),
    *fields(
        "input", *([{"type": kind}] for kind in (None, 7, [], "", SECRET, "Message", "acme:thing")), param="input[0]"
    ),
    *fields(
        "input",
        [{"role": "user", "content": [TEXT]}],
        [{"role": "user", "content": SECRET}],
        [{"id": SECRET}],
        [{"type": "item_reference", "id": SECRET}],
        [{"type": "compaction", "encrypted_content": SECRET}],
        [{"type": "web_search_call", "id": SECRET}],
        param="input[0]",
    ),
    *members(MESSAGE, "role", OMITTED, None, "developer", "tool", "User", "", SECRET, *INVALID_STRINGS),
    *members(MESSAGE, "content", OMITTED, None, SECRET, 7, True, {}, TEXT, [TEXT] * 10_001),
    *members(MESSAGE, "id", *INVALID_STRINGS),
    *parts(SECRET, None, 7, [], [TEXT]),
    *parts({}, {"text": SECRET}, IMAGE, AUDIO, FILE, *({**TEXT, "type": kind} for kind in PART_TYPES), of=".type"),
    *parts({"type": "input_text"}, *({**TEXT, "text": value} for value in (None, *INVALID_STRINGS)), of=".text"),
    *parts({"type": "output_text"}, {"type": "output_text", "text": 7}, {**TEXT, "text": "x" * 10_485_761}, of=".text"),
    *members(CALL, "call_id", *INVALID_CALL_IDS),
    *members(CALL, "name", *INVALID_NAMES),
    *members(CALL, "arguments", OMITTED, None, *INVALID_STRINGS),
    *members(CALL, "id", *INVALID_STRINGS),
    *members(OUTPUT, "call_id", *INVALID_CALL_IDS),
    *members(OUTPUT, "output", OMITTED, None, *INVALID_STRINGS, [TEXT]),
    *members(OUTPUT, "id", *INVALID_STRINGS),
    *fields("input", [OUTPUT], code="function_call_not_found", param="input[0].call_id"),
    *fields("input", [CALL, OUTPUT | {"call_id": "d"}], code="function_call_not_found", param="input[1].call_id"),
    *fields("input", [OUTPUT | {"name": "add"}], code="function_call_not_found", param="input[0].call_id"),
    *members(THOUGHT, "summary", OMITTED, None, SECRET, 7, {}),
    *members(THOUGHT, "summary", [None], [SECRET], [7], [[]], of="summary[0]"),
    *members(THOUGHT, "summary", [TEXT], [{"type": SECRET, "text": "x"}], of="summary[0].type"),
    *members(
        THOUGHT, "summary", *([{"type": "summary_text", "text": text}] for text in (None, 7)), of="summary[0].text"
    ),
    *members(THOUGHT, "id", *INVALID_STRINGS),
    # Numbers and flags.
    *fields("stream", *INVALID_FLAGS),
    *fields("max_output_tokens", 0, -1, 1.5, 2**31, 2**63, 10**30, -(10**30), *INVALID_NUMBERS),
    *fields("temperature", -0.1, 2.1, -1, 3, 10**30, 1e300, *INVALID_NUMBERS),
    *fields("store", *INVALID_FLAGS),
    # Response formats.
    *formats(7, SECRET, "text", True, [], {}, *({"type": kind} for kind in (None, 7, [], "", SECRET, "json_object"))),
    *formats({"type": "json_schema"}, {"type": "json_schema", **SCHEMA}, of=".json_schema"),
    *formats(*({"type": "json_schema", "json_schema": value} for value in (None, *INVALID_OBJECTS)), of=".json_schema"),
    *formats({"type": "json_schema", "json_schema": {}}, of=".json_schema.name"),
    *schemas("name", OMITTED, None, "", SECRET + "x" * 64, *INVALID_STRINGS),
    *schemas("description", *INVALID_STRINGS),
    *schemas("schema", OMITTED, None, *INVALID_OBJECTS),
    *schemas(
        "schema",
        {"type": 7},
        {"type": SECRET},
        {"$ref": f"#/{SECRET}"},
        {"$ref": f"https://example.org/{SECRET}"},
        {"properties": {SECRET: {"type": SECRET}}},
        {"pattern": f"({SECRET}"},
        {"properties": [SECRET]},
        {"minLength": -1},
        code="invalid_schema",
    ),
    # Tools.
    *fields("tools", *INVALID_OBJECTS[:3], {}, TOOL, [TOOL] * 1025),
    *fields("tools", [None], [7], [SECRET], [[]], [[TOOL]], param="tools[0]"),
    *tools(
        "type", OMITTED, None, "", SECRET, "Function", "web_search", "mcp", "custom", "acme:search", *INVALID_STRINGS
    ),
    *tools("name", *INVALID_NAMES),
    *fields("tools", [{"type": "function", "function": {"name": SECRET}}], param="tools[0].name"),
    *tools("description", *INVALID_STRINGS),
    *tools("parameters", *INVALID_OBJECTS),
    *fields("tools", [TOOL, TOOL], param="tools[1]"),
    *fields("tool_choice", 7, True, [], {}, SECRET, "", "any", "Required", tools=[TOOL]),
    *fields("tool_choice", *({"type": kind} for kind in (None, 7, [], "", SECRET, "acme:search")), tools=[TOOL]),
    *fields("tool_choice", {"type": "allowed_tools", "tools": [TOOL]}, {"name": "add"}, tools=[TOOL]),
    *fields(
        "tool_choice", *(TOOL | {"name": name} for name in INVALID_STRINGS), tools=[TOOL], param="tool_choice.name"
    ),
    *fields("tool_choice", TOOL | {"name": SECRET}, TOOL | {"name": ""}, tools=[TOOL], param="tool_choice.name"),
    *fields("tool_choice", {"type": "function"}, {"type": "function", "function": TOOL}, param="tool_choice.name"),
    *fields("tool_choice", TOOL, param="tool_choice.name"),
    *fields("tool_choice", "required"),
    *fields("tool_choice", "required", tools=[]),
    # Conversations and metadata.
    *fields("previous_response_id", *INVALID_STRINGS),
    *fields("previous_response_id", "", SECRET, "resp_" + "0" * 32, "task_1", code="previous_response_not_found"),
    *fields("extensions", *INVALID_OBJECTS),
]


def case_id(value: Any) -> str | None:
    return json.dumps(value)[:70] if isinstance(value, dict) else None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("change", "code", "param"), ROWS, ids=case_id)
async def test_invalid_field_is_named(change: dict[str, Any], code: str, param: str, mode: str) -> None:
    kit = new_kit()
    problem = refusal(await ask(kit, mode, VALID | change))
    assert (problem["status"], problem["code"], problem.get("param")) == (400, code, param)
    check_untouched(kit)


def test_table_covers_every_request_field() -> None:
    assert set().union(*(change for change, _, _ in ROWS)) == set(ResponseRequest.model_fields)


async def test_refusals_do_not_echo_input() -> None:
    unusual = "unechoed"
    for change in (
        {"tools": [TOOL | {"name": unusual}] * 2},
        {"tools": [TOOL], "tool_choice": TOOL | {"name": unusual}},
        {"tools": [TOOL | {"type": unusual}]},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA | {"schema": {"type": unusual}}}},
        {"previous_response_id": unusual},
        {unusual: None, "input": []},
    ):
        reply = await ask(new_kit(), "plain", VALID | change)
        assert reply.status == 400
        assert unusual not in reply.body.decode(), change


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "change",
    [
        {name: None for name in ResponseRequest.model_fields if name not in ("model", "input", "stream")},
        {"max_output_tokens": 1},
        {"max_output_tokens": 2**31 - 1},
        {"temperature": 0},
        {"temperature": 2.0},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tools": [TOOL | {"description": None, "parameters": None}]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tool_choice": "none"},
        {"store": True},
        {"extensions": {}},
        {"extensions": {"acme:x": [None, {"deep": 1}]}},
        {"unknown": "member", "text": 7, "instructions": [], "background": "no", "truncation": 7},
        {"input": [MESSAGE | {"id": None}, MESSAGE | {"id": "msg_1", "status": 7}]},
        {"input": [MESSAGE | {"role": role} for role in ("system", "user", "assistant", "user")]},
        {"input": [MESSAGE, THOUGHT, CALL, OUTPUT]},
        {"input": [CALL | {"arguments": "not JSON"}, OUTPUT | {"output": ""}]},
        {"input": [MESSAGE, THOUGHT | {"summary": []}, MESSAGE]},
        *({"input": [CALL | {"call_id": one}, OUTPUT | {"call_id": one}]} for one in ("x" * 64, "é \n", "unpaired")),
    ],
    ids=case_id,
)
async def test_valid_requests_are_answered(change: dict[str, Any], mode: str) -> None:
    kit = new_kit()
    reply = await ask(kit, mode, VALID | change)
    assert reply.status == (202 if mode == "task" else 200), reply.body
    assert await outcome(kit, mode, reply) == "completed"
    await kit.aclose()


# Missing capabilities and responses.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
    ids=case_id,
)
async def test_missing_capability_is_named(change: dict[str, Any], param: str, mode: str) -> None:
    kit = new_kit(model=Model("scripted", conversations=False))
    problem = refusal(await ask(kit, mode, VALID | change))
    assert (problem["status"], problem["code"], problem["param"]) == (400, "unsupported_capability", param)
    check_untouched(kit)


@pytest.mark.parametrize("mode", ["plain", "streamed"])
async def test_oversize_prompt_is_refused(mode: str) -> None:
    kit = new_kit(model=Model("scripted", context_window=64))
    problem = refusal(await ask(kit, mode, VALID))
    assert (problem["status"], problem["code"], problem["param"]) == (400, "context_length_exceeded", "input")
    check_untouched(kit)


async def test_oversize_task_fails_with_same_problem() -> None:
    kit = new_kit(model=Model("scripted", context_window=64))
    task = json.loads((await ask(kit, "task", VALID)).body)
    *_, last = decode_events(await listen(await call(kit, "GET", f"/tasks/{task['id']}/events")))
    task = json.loads((await call(kit, "GET", f"/tasks/{task['id']}")).body)
    for problem in (last.data["error"], task["response"]["error"]):
        assert (problem["status"], problem["code"]) == (400, "context_length_exceeded")
    await kit.aclose()


class RequestBoundBackend(ScriptedBackend):
    """A backend that is bound to its request."""

    is_request_bound = True


@pytest.mark.parametrize(("mode", "headers"), [("task", {}), ("plain", {"idempotency-key": "k"})])
async def test_request_bound_backend_refuses_tasks_and_keys(mode: str, headers: dict[str, str]) -> None:
    kit = ResponsesKit(RequestBoundBackend(["Hi."]))
    problem = refusal(await ask(kit, mode, VALID, headers))
    assert (problem["status"], problem["code"]) == (400, "unsupported_capability")
    assert problem.get("param") in (None, "Idempotency-Key")


@pytest.mark.parametrize("mode", MODES)
async def test_unknown_and_foreign_response_cannot_be_continued(mode: str) -> None:
    kit = new_kit(owner=lambda host: host)

    async def created(change: dict[str, Any], host: str, path: str = "/responses") -> Reply:
        return await call(kit, "POST", path, VALID | change, host_request=host)

    expired = json.loads((await created({}, "ann")).body)["id"]
    owned = json.loads((await created({"store": True}, "ann")).body)["id"]
    for host, previous in (("ann", expired), ("bob", owned)):
        change = {"previous_response_id": previous, "stream": mode == "streamed"}
        problem = refusal(await created(change, host, "/tasks" if mode == "task" else "/responses"))
        assert (problem["status"], problem["code"]) == (400, "previous_response_not_found")
        assert problem["param"] == "previous_response_id"


async def test_response_in_progress_cannot_be_continued() -> None:
    kit = new_kit(Pause(60))
    task = json.loads((await ask(kit, "task", VALID)).body)
    change = {"previous_response_id": task["response"]["id"]}
    problem = refusal(await ask(kit, "plain", VALID | change))
    assert (problem["status"], problem["code"]) == (400, "previous_response_in_progress")
    assert problem["param"] == "previous_response_id"
    await kit.aclose()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("Change it.", param="input"), 400, INVALID),
        (errors.UnsupportedParameter("Change it.", param="temperature"), 400, "unsupported_capability"),
        (errors.ContextLengthExceeded("Shorten it."), 400, "context_length_exceeded"),
        (errors.ModelNotFound(), 400, "model_not_found"),
        (errors.Forbidden("This user is blocked."), 403, "forbidden"),
        (errors.TooManyRequests("Full."), 429, "too_many_requests"),
        (errors.ModelError("The model failed."), 500, "model_error"),
        (errors.ModelError("The model failed.", code="tool_not_allowed"), 500, "tool_not_allowed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_backend_error_is_same_problem_everywhere(
    error: errors.APIError, status: int, code: str, mode: str
) -> None:
    kit = new_kit("Well, ", error)
    reply = await ask(kit, mode, VALID)
    if mode == "plain":
        problem = refusal(reply)
    else:
        if mode == "task":
            reply = await call(kit, "GET", f"/tasks/{json.loads(reply.body)['id']}/events")
        *_, last = decode_events(await listen(reply))
        assert last.name == "response.failed"
        problem = last.data["error"]
    assert (problem["status"], problem["code"]) == (status, code)
    await kit.aclose()


# Headers.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["", "x" * 256, SECRET * 1000])
async def test_key_length_is_validated(key: str, mode: str) -> None:
    kit = new_kit()
    problem = refusal(await ask(kit, mode, VALID, {"idempotency-key": key}))
    assert (problem["status"], problem["code"], problem["param"]) == (400, INVALID, "Idempotency-Key")
    check_untouched(kit)


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
async def test_key_of_other_request_is_refused(first: str, second: str) -> None:
    kit = new_kit()
    headers = {"idempotency-key": SECRET + "x" * (255 - len(SECRET))}
    reply = await ask(kit, first, VALID, headers)
    assert await outcome(kit, first, reply) == "completed"
    problem = refusal(await ask(kit, second, VALID | {"temperature": 1.5}, headers))
    assert (problem["status"], problem["code"]) == (409, "idempotency_key_reused")
    if (first == "task") is not (second == "task"):
        problem = refusal(await ask(kit, second, VALID, headers))
        assert (problem["status"], problem["code"]) == (409, "idempotency_key_reused")
    assert isinstance(kit.backend, ScriptedBackend)
    assert len(kit.backend.turns) == 1
    await kit.aclose()


@pytest.mark.parametrize(
    ("mode", "headers"), [("task", {}), *((mode, {"idempotency-key": "k"}) for mode in MODES)], ids=str
)
async def test_task_and_key_refuse_store_false(mode: str, headers: dict[str, str]) -> None:
    kit = new_kit()
    problem = refusal(await ask(kit, mode, VALID | {"store": False}, headers))
    assert (problem["status"], problem["code"], problem["param"]) == (400, INVALID, "store")
    check_untouched(kit)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("version", ["1", "1.0", "1.7", "1.999999999", " 1.0 "])
async def test_versions_with_the_same_major_are_accepted(version: str, mode: str) -> None:
    kit = new_kit()
    reply = await ask(kit, mode, VALID, {"lmsp-version": version})
    assert await outcome(kit, mode, reply) == "completed"
    await kit.aclose()


@pytest.mark.parametrize(
    "version",
    [
        "2.0",
        "2",
        "0.9",
        "10.0",
        "abc",
        "",
        " ",
        "1.",
        ".1",
        "1.x",
        "v1.0",
        "-1",
        "1,0",
        "1.0, 2.0",
        "\uff11.0",
        "1.\u0660",
        SECRET,
        "1." + "9" * 5000,
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/responses"), ("POST", "/tasks"), ("GET", "/tasks/task_1/events"), ("GET", "/no")]
)
async def test_other_version_is_refused_first(version: str, method: str, path: str) -> None:
    kit = new_kit(owner=lambda host: None)
    problem = refusal(await call(kit, method, path, b"{", {"lmsp-version": version}))
    assert (problem["status"], problem["code"], problem["param"]) == (400, "unsupported_version", "LMSP-Version")
    check_untouched(kit)


async def test_unauthenticated_requests_are_refused() -> None:
    kit = new_kit(owner=lambda host: None)
    for method, path in (("POST", "/responses"), ("POST", "/tasks"), ("GET", "/tasks/task_1"), ("GET", "/no")):
        problem = refusal(await call(kit, method, path, b"{"))
        assert (problem["status"], problem["code"]) == (401, "invalid_api_key")


# Bodies.


@pytest.mark.parametrize("path", ["/responses", "/tasks"])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b" ", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b"hunter2", "invalid_json"),
        (b'{"hunter2": hunter2}', "invalid_json"),
        (b"{'model': 'x'}", "invalid_json"),
        (b"\xff\xfe{\x00}\x00", "invalid_json"),
        (b'{"model": "\xed\xa0\xbd"}', "invalid_json"),
        (b'{"model": "\\ud83d"}', "invalid_json"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"temperature": 1e999}', INVALID),
        (b'{"a":' * 10_000, "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[]", INVALID),
        (b"null", INVALID),
        (b"7", INVALID),
        (b'"hunter2"', INVALID),
        (b'["hunter2"]', INVALID),
        (b"{}", INVALID),
    ],
)
async def test_invalid_body_returns_short_400(body: bytes, code: str, path: str) -> None:
    kit = new_kit()
    reply = await call(kit, "POST", path, body)
    problem = refusal(reply)
    assert problem["status"] == 400
    assert problem["code"] == code or b"1e999" in body
    assert len(reply.body) < 400
    check_untouched(kit)


@pytest.mark.parametrize("path", ["/responses", "/tasks"])
@pytest.mark.parametrize(
    "headers",
    [
        *(
            {"content-type": media}
            for media in ("text/plain", "", ";", "json", SECRET, "application/x-www-form-urlencoded")
        ),
        *({"content-encoding": encoding} for encoding in ("br", SECRET, "gzip, gzip")),
    ],
    ids=case_id,
)
async def test_other_content_type_returns_415(headers: dict[str, str], path: str) -> None:
    kit = new_kit()
    problem = refusal(await call(kit, "POST", path, VALID, headers))
    assert (problem["status"], problem["code"]) == (415, "unsupported_media_type")
    check_untouched(kit)


@pytest.mark.parametrize("path", ["/responses", "/tasks"])
@pytest.mark.parametrize("packed", [False, True])
async def test_oversize_body_returns_413(packed: bool, path: str) -> None:
    kit = new_kit(limits=Limits(max_body_bytes=1000))
    body = json.dumps(VALID | {"unknown": SECRET * 1000}).encode()
    reply = await call(
        kit, "POST", path, gzip.compress(body) if packed else body, {"content-encoding": "gzip"} if packed else None
    )
    problem = refusal(reply)
    assert (problem["status"], problem["code"]) == (413, "payload_too_large")
    check_untouched(kit)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [50, 150, 180, 190, 195, 200, 250, 1000, 5000])
@pytest.mark.parametrize("position", ["extensions", "parameters", "unknown"])
async def test_deep_nesting_is_answered_or_refused(position: str, depth: int, mode: str) -> None:
    deep: bytes = b'{"a":' * depth + b"{}" + b"}" * depth
    tool = b'{"type":"function","name":"add","parameters":' + deep + b"}"
    member = b'"tools":[' + tool + b"]" if position == "parameters" else b'"%b":%b' % (position.encode(), deep)
    streamed = b'"stream":true,' if mode == "streamed" else b""
    kit = new_kit()
    reply = await ask(kit, mode, json.dumps(VALID).encode()[:-1] + b"," + streamed + member + b"}")
    if reply.status == 400:
        assert refusal(reply)["code"] in ("invalid_json", INVALID)
        check_untouched(kit)
    else:
        assert await outcome(kit, mode, reply) == "completed"
    if not 180 < depth < 250:  # the exact limit is the parser's
        assert reply.status == (400 if depth > 200 else 202 if mode == "task" else 200)
    await kit.aclose()


# Paths and methods.


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/responses", "POST"),
        ("/responses/x", "GET"),
        ("/tasks", "POST"),
        ("/tasks/x", "GET"),
        ("/tasks/x/events", "GET"),
        ("/tasks/x/cancel", "POST"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "post", SECRET])
async def test_wrong_method_lists_allowed_methods(path: str, allowed: str, method: str) -> None:
    if method == allowed:
        return
    reply = await call(new_kit(), method, path, VALID)
    problem = refusal(reply)
    assert (problem["status"], problem["code"], reply.headers["Allow"]) == (405, "method_not_allowed", allowed)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/*",
        "/response",
        "/models",
        "/models/scripted",
        f"/{SECRET}",
        "/chat/completions",
        "/responses/a/b",
        "/responses/a/input_items",
        "/responses/a/cancel",
        "/tasks//events",
        "/tasks/*/*",
        "/tasks/a/b/c",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_unknown_path_returns_404(path: str, method: str) -> None:
    problem = refusal(await call(new_kit(), method, path, VALID))
    assert (problem["status"], problem["code"]) == (404, "not_found")


async def test_compaction_path_does_not_exist() -> None:
    assert refusal(await call(new_kit(), "POST", "/responses/compact", VALID))["status"] in (404, 405)


@pytest.mark.parametrize(
    "name", [SECRET, "resp_1", "task_", f"task_{SECRET}", "task_resp_1", "task_" + "0" * 32, "*", "\x00"]
)
@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/responses/{}", "response_not_found"),
        ("GET", "/tasks/{}", "task_not_found"),
        ("GET", "/tasks/{}/events", "task_not_found"),
        ("POST", "/tasks/{}/cancel", "task_not_found"),
    ],
)
async def test_unknown_ids_return_specific_404(method: str, path: str, code: str, name: str) -> None:
    problem = refusal(await call(new_kit(), method, path.format(name)))
    assert (problem["status"], problem["code"]) == (404, code)


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/events"), ("POST", "/cancel")])
async def test_foreground_response_is_not_a_task(method: str, path: str) -> None:
    kit = new_kit()
    created = json.loads((await ask(kit, "plain", VALID | {"store": True})).body)["id"]
    for name in (created, created.replace("resp_", "task_")):
        problem = refusal(await call(kit, method, f"/tasks/{name}{path}"))
        assert (problem["status"], problem["code"]) == (404, "task_not_found")


# Positions in a stream.

INVALID_POSITIONS = ["x", SECRET, "-1", "+1", "1.5", "1e3", "\u0665", "9" * 16, "9" * 5000, "0x1", "1_0", "\x00"]


async def finished_task_events(kit: ResponsesKit) -> str:
    """Return the path of a finished task's events."""
    reply = await ask(kit, "task", VALID)
    assert await outcome(kit, "task", reply) == "completed"
    return f"/tasks/{json.loads(reply.body)['id']}/events"


@pytest.mark.parametrize("position", INVALID_POSITIONS)
async def test_invalid_position_is_refused_in_query_and_header(position: str) -> None:
    kit = new_kit()
    path = await finished_task_events(kit)
    for more, param in (
        ({"query": f"after={position.replace('+', '%2B')}"}, "after"),
        ({"headers": {"last-event-id": position}}, "Last-Event-ID"),
        ({"query": f"after={position.replace('+', '%2B')}", "headers": {"last-event-id": "1"}}, "after"),
    ):
        problem = refusal(await call(kit, "GET", path, **more))
        assert (problem["status"], problem["code"], problem["param"]) == (400, INVALID, param)
    await kit.aclose()


async def test_after_query_precedes_last_event_id_header() -> None:
    kit = new_kit()
    path = await finished_task_events(kit)
    for position in INVALID_POSITIONS:
        reply = await call(kit, "GET", path, query="after=2", headers={"last-event-id": position})
        assert decode_events(await listen(reply))[0].id == 3
    reply = await call(kit, "GET", path, query="after=" + "9" * 15)
    assert decode_events(await listen(reply)) == []
    await kit.aclose()


async def test_expired_events_are_unavailable() -> None:
    class ForgetfulStore(MemoryStore):
        has_expired = False

        async def events(self, owner: str, response_id: str, after: int) -> Any:
            return None if self.has_expired else await super().events(owner, response_id, after)

    store = ForgetfulStore()
    kit = new_kit(store=store)
    path = await finished_task_events(kit)
    store.has_expired = True
    for query in ("", "after=2"):
        problem = refusal(await call(kit, "GET", path, query=query))
        assert (problem["status"], problem["code"]) == (410, "event_history_expired")
        assert problem.get("param") in (None, "after")
    assert json.loads((await call(kit, "GET", path.removesuffix("/events"))).body)["status"] == "completed"
    await kit.aclose()


async def test_finished_task_cannot_be_cancelled() -> None:
    kit = new_kit()
    path = await finished_task_events(kit)
    problem = refusal(await call(kit, "POST", path.replace("/events", "/cancel")))
    assert 400 <= problem["status"] < 500
    await kit.aclose()
