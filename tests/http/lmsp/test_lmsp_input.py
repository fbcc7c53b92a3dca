"""Bad input: whatever is wrong with a request, a problem document says which field, and says it in LMSP's own words."""

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
from tests.support.memory import kept

from .conformance import check_response, check_stream, decode_events, problem_in

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0
CAPABLE = {"tools": True, "structured_output": True}
WAYS = ["plain", "streamed", "task"]

HELD = "hunter2"
"""Stands in bad values, and must not be told to anybody."""

FOREIGN = ("text.format", "starting_after", "GET /models", "background", "without stream", "sequence_number", "'~")
"""What only the other dialect, or nobody, knows."""


class Narrow(ScriptedBackend):
    """Every prompt has ninety-nine tokens."""

    async def count_tokens(self, turn: Turn) -> int:
        return 99


def new_kit(*script: Any, model: Model | None = None, **settings: Any) -> ResponsesKit:
    backend = Narrow(list(script) or ["Hi."], models=[model or Model("scripted", **CAPABLE)])
    return ResponsesKit(backend, **settings)


async def call(
    kit: ResponsesKit, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, **more: Any
) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | dict(headers or {})

    async def read() -> bytes:  # as hosts do
        taken = Body(headers, limit=kit.settings.limits.max_body_bytes)
        taken.feed(data)
        return taken.finish()

    with anyio.fail_after(BOUND):
        reply = await LMSP(kit).handle(Request(method, path, headers=headers, read=read, **more))
    assert reply.headers["LMSP-Version"] == "1.0"
    return reply


async def ask(kit: ResponsesKit, way: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
    """The same request in each of the three ways to send it."""
    if way == "streamed" and isinstance(body, dict):
        body = {"stream": True} | body
    return await call(kit, "POST", "/tasks" if way == "task" else "/responses", body, headers)


def refusal(reply: Reply) -> dict[str, Any]:
    """The problem document, once it is known to be one that tells nothing that it should not."""
    assert reply.stream is None
    problem = problem_in(reply.status, reply.headers, reply.body)
    assert HELD not in json.dumps(problem)
    for word in FOREIGN:
        assert word not in json.dumps(problem), problem
    return problem


def check_untouched(kit: ResponsesKit) -> None:
    """Nothing was generated, and nothing kept."""
    assert isinstance(kit.backend, ScriptedBackend)
    assert kit.backend.turns == []
    assert isinstance(kit.store, MemoryStore)
    assert kept(kit.store) == []


async def listen(reply: Reply) -> str:
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    assert reply.stream is not None
    with anyio.fail_after(BOUND):
        await reply.stream(send)
    return b"".join(sent).decode()


async def outcome(kit: ResponsesKit, way: str, reply: Reply) -> str:
    """How an accepted request ended."""
    if way == "plain":
        response = json.loads(reply.body)
        check_response(response)
        return str(response["status"])
    if way == "task":
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
LEFT_OUT = object()

Row = tuple[dict[str, Any], str, str]


def without(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if member is not LEFT_OUT}


def fields(name: str, *values: Any, code: str = INVALID, param: str | None = None, **more: Any) -> list[Row]:
    """A member of the request with each of these values."""
    return [({name: value, **more}, code, param or name) for value in values]


def members(item: Mapping[str, Any], name: str, *values: Any, of: str = "") -> list[Row]:
    """A member of an item, the second of the input, with each of these values."""
    return [
        ({"input": [MESSAGE, without({**item, name: value})]}, INVALID, f"input[1].{of or name}") for value in values
    ]


def parts(*values: Any, of: str = "") -> list[Row]:
    """A part, the second of the message, with each of these values."""
    return [
        ({"input": [MESSAGE | {"content": [TEXT, value]}]}, INVALID, f"input[0].content[1]{of}") for value in values
    ]


def formats(*values: Any, of: str = "", code: str = INVALID) -> list[Row]:
    return fields("response_format", *values, param=f"response_format{of}", code=code)


def schemas(name: str, *values: Any, code: str = INVALID) -> list[Row]:
    """A member of `json_schema` with each of these values."""
    made = [{"type": "json_schema", "json_schema": without({**SCHEMA, name: value})} for value in values]
    return formats(*made, of=f".json_schema.{name}", code=code)


def tools(name: str, *values: Any) -> list[Row]:
    """A member of the second tool with each of these values."""
    made = [[TOOL, without({"type": "function", "name": "sub", name: value})] for value in values]
    return fields("tools", *made, param=f"tools[1].{name}")


NO_STRING = [7, 1.5, True, [], {}, [HELD]]
NO_NUMBER = [HELD, "1", True, [], {}]
NO_FLAG = [0, 1, HELD, "true", [], {}]
NO_OBJECT = [7, HELD, True, [], [HELD]]
NO_NAME = [LEFT_OUT, None, "", f"{HELD} x", HELD + "x" * 64, "é", "a.b", "add\n", *NO_STRING]
NO_CALL_ID = [LEFT_OUT, None, "", HELD + "x" * 64, *NO_STRING]
IMAGE = {"type": "input_image", "image_url": f"https://example.org/{HELD}.png"}
AUDIO = {"type": "input_audio", "input_audio": {"data": HELD, "format": "wav"}}
FILE = {"type": "input_file", "file_data": HELD}
PART_TYPES = ["text", "input_video", "refusal", "reasoning_text", "summary_text", "acme:text", HELD, "", None, 7, []]

ROWS: list[Row] = [
    *fields("model", None, *NO_STRING),
    *fields("model", "", HELD, "scripted ", "Scripted", "x" * 100_000, code="model_not_found"),
    # Items.
    *fields("input", None, HELD, 7, True, {}, MESSAGE, [], [MESSAGE] * 10_001),
    *fields("input", [HELD], [None], [7], [[]], [{}], [[MESSAGE]], param="input[0]"),
    *fields(
        "input", *([{"type": kind}] for kind in (None, 7, [], "", HELD, "Message", "acme:thing")), param="input[0]"
    ),
    *fields(
        "input",
        [{"role": "user", "content": [TEXT]}],
        [{"role": "user", "content": HELD}],
        [{"id": HELD}],
        [{"type": "item_reference", "id": HELD}],
        [{"type": "compaction", "encrypted_content": HELD}],
        [{"type": "web_search_call", "id": HELD}],
        param="input[0]",
    ),
    *members(MESSAGE, "role", LEFT_OUT, None, "developer", "tool", "User", "", HELD, *NO_STRING),
    *members(MESSAGE, "content", LEFT_OUT, None, HELD, 7, True, {}, TEXT, [TEXT] * 10_001),
    *members(MESSAGE, "id", *NO_STRING),
    *parts(HELD, None, 7, [], [TEXT]),
    *parts({}, {"text": HELD}, IMAGE, AUDIO, FILE, *({**TEXT, "type": kind} for kind in PART_TYPES), of=".type"),
    *parts({"type": "input_text"}, *({**TEXT, "text": value} for value in (None, *NO_STRING)), of=".text"),
    *parts({"type": "output_text"}, {"type": "output_text", "text": 7}, {**TEXT, "text": "x" * 10_485_761}, of=".text"),
    *members(CALL, "call_id", *NO_CALL_ID),
    *members(CALL, "name", *NO_NAME),
    *members(CALL, "arguments", LEFT_OUT, None, *NO_STRING),
    *members(CALL, "id", *NO_STRING),
    *members(OUTPUT, "call_id", *NO_CALL_ID),
    *members(OUTPUT, "output", LEFT_OUT, None, *NO_STRING, [TEXT]),
    *members(OUTPUT, "id", *NO_STRING),
    *fields("input", [OUTPUT], code="function_call_not_found", param="input[0].call_id"),
    *fields("input", [CALL, OUTPUT | {"call_id": "d"}], code="function_call_not_found", param="input[1].call_id"),
    *fields("input", [OUTPUT | {"name": "add"}], code="function_call_not_found", param="input[0].call_id"),
    *members(THOUGHT, "summary", LEFT_OUT, None, HELD, 7, {}),
    *members(THOUGHT, "summary", [None], [HELD], [7], [[]], of="summary[0]"),
    *members(THOUGHT, "summary", [TEXT], [{"type": HELD, "text": "x"}], of="summary[0].type"),
    *members(
        THOUGHT, "summary", *([{"type": "summary_text", "text": text}] for text in (None, 7)), of="summary[0].text"
    ),
    *members(THOUGHT, "id", *NO_STRING),
    # Numbers and flags.
    *fields("stream", *NO_FLAG),
    *fields("max_output_tokens", 0, -1, 1.5, 2**31, 2**63, 10**30, -(10**30), *NO_NUMBER),
    *fields("temperature", -0.1, 2.1, -1, 3, 10**30, 1e300, *NO_NUMBER),
    *fields("store", *NO_FLAG),
    # The form of the answer.
    *formats(7, HELD, "text", True, [], {}, *({"type": kind} for kind in (None, 7, [], "", HELD, "json_object"))),
    *formats({"type": "json_schema"}, {"type": "json_schema", **SCHEMA}, of=".json_schema"),
    *formats(*({"type": "json_schema", "json_schema": value} for value in (None, *NO_OBJECT)), of=".json_schema"),
    *formats({"type": "json_schema", "json_schema": {}}, of=".json_schema.name"),
    *schemas("name", LEFT_OUT, None, "", HELD + "x" * 64, *NO_STRING),
    *schemas("description", *NO_STRING),
    *schemas("schema", LEFT_OUT, None, *NO_OBJECT),
    *schemas(
        "schema",
        {"type": 7},
        {"type": HELD},
        {"$ref": f"#/{HELD}"},
        {"$ref": f"https://example.org/{HELD}"},
        {"properties": {HELD: {"type": HELD}}},
        {"pattern": f"({HELD}"},
        {"properties": [HELD]},
        {"minLength": -1},
        code="invalid_schema",
    ),
    # Tools.
    *fields("tools", *NO_OBJECT[:3], {}, TOOL, [TOOL] * 1025),
    *fields("tools", [None], [7], [HELD], [[]], [[TOOL]], param="tools[0]"),
    *tools("type", LEFT_OUT, None, "", HELD, "Function", "web_search", "mcp", "custom", "acme:search", *NO_STRING),
    *tools("name", *NO_NAME),
    *fields("tools", [{"type": "function", "function": {"name": HELD}}], param="tools[0].name"),
    *tools("description", *NO_STRING),
    *tools("parameters", *NO_OBJECT),
    *fields("tools", [TOOL, TOOL], param="tools[1]"),
    *fields("tool_choice", 7, True, [], {}, HELD, "", "any", "Required", tools=[TOOL]),
    *fields("tool_choice", *({"type": kind} for kind in (None, 7, [], "", HELD, "acme:search")), tools=[TOOL]),
    *fields("tool_choice", {"type": "allowed_tools", "tools": [TOOL]}, {"name": "add"}, tools=[TOOL]),
    *fields("tool_choice", *(TOOL | {"name": name} for name in NO_STRING), tools=[TOOL], param="tool_choice.name"),
    *fields("tool_choice", TOOL | {"name": HELD}, TOOL | {"name": ""}, tools=[TOOL], param="tool_choice.name"),
    *fields("tool_choice", {"type": "function"}, {"type": "function", "function": TOOL}, param="tool_choice.name"),
    *fields("tool_choice", TOOL, param="tool_choice.name"),
    *fields("tool_choice", "required"),
    *fields("tool_choice", "required", tools=[]),
    # What went before, and what is nobody's business.
    *fields("previous_response_id", *NO_STRING),
    *fields("previous_response_id", "", HELD, "resp_" + "0" * 32, "task_1", code="previous_response_not_found"),
    *fields("extensions", *NO_OBJECT),
]


def shown(value: Any) -> str | None:
    return json.dumps(value)[:70] if isinstance(value, dict) else None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("change", "code", "param"), ROWS, ids=shown)
async def test_what_is_wrong_with_a_field_is_said_of_that_field(
    change: dict[str, Any], code: str, param: str, way: str
) -> None:
    kit = new_kit()
    problem = refusal(await ask(kit, way, VALID | change))
    assert (problem["status"], problem["code"], problem.get("param")) == (400, code, param)
    check_untouched(kit)


def test_the_table_has_every_field_of_a_request() -> None:
    assert set().union(*(change for change, _, _ in ROWS)) == set(ResponseRequest.model_fields)


async def test_no_refusal_repeats_what_the_client_said() -> None:
    odd = "zwiebelfisch"
    for change in (
        {"tools": [TOOL | {"name": odd}] * 2},
        {"tools": [TOOL], "tool_choice": TOOL | {"name": odd}},
        {"tools": [TOOL | {"type": odd}]},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA | {"schema": {"type": odd}}}},
        {"previous_response_id": odd},
        {odd: None, "input": []},
    ):
        reply = await ask(new_kit(), "plain", VALID | change)
        assert reply.status == 400
        assert odd not in reply.body.decode(), change


@pytest.mark.parametrize("way", WAYS)
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
        {"nobody": "knows", "text": 7, "instructions": [], "background": "no", "truncation": 7},
        {"input": [MESSAGE | {"id": None}, MESSAGE | {"id": "msg_1", "status": 7}]},
        {"input": [MESSAGE | {"role": role} for role in ("system", "user", "assistant", "user")]},
        {"input": [MESSAGE, THOUGHT, CALL, OUTPUT]},
        {"input": [CALL | {"arguments": "no JSON"}, OUTPUT | {"output": ""}]},
        {"input": [MESSAGE, THOUGHT | {"summary": []}, MESSAGE]},
        *({"input": [CALL | {"call_id": one}, OUTPUT | {"call_id": one}]} for one in ("x" * 64, "é \n", "unpaired")),
    ],
    ids=shown,
)
async def test_what_is_allowed_is_answered(change: dict[str, Any], way: str) -> None:
    kit = new_kit()
    reply = await ask(kit, way, VALID | change)
    assert reply.status == (202 if way == "task" else 200), reply.body
    assert await outcome(kit, way, reply) == "completed"
    await kit.aclose()


# What the model cannot do, and what is not there.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
    ids=shown,
)
async def test_a_capability_that_the_model_lacks_is_named(change: dict[str, Any], param: str, way: str) -> None:
    kit = new_kit(model=Model("scripted", conversations=False))
    problem = refusal(await ask(kit, way, VALID | change))
    assert (problem["status"], problem["code"], problem["param"]) == (400, "unsupported_capability", param)
    check_untouched(kit)


@pytest.mark.parametrize("way", ["plain", "streamed"])
async def test_what_does_not_fit_the_context_window_is_refused(way: str) -> None:
    kit = new_kit(model=Model("scripted", context_window=64))
    problem = refusal(await ask(kit, way, VALID))
    assert (problem["status"], problem["code"], problem["param"]) == (400, "context_length_exceeded", "input")
    check_untouched(kit)


async def test_a_task_that_does_not_fit_the_context_window_fails_with_the_same_problem() -> None:
    kit = new_kit(model=Model("scripted", context_window=64))
    task = json.loads((await ask(kit, "task", VALID)).body)
    *_, last = decode_events(await listen(await call(kit, "GET", f"/tasks/{task['id']}/events")))
    told = json.loads((await call(kit, "GET", f"/tasks/{task['id']}")).body)
    for problem in (last.data["error"], told["response"]["error"]):
        assert (problem["status"], problem["code"]) == (400, "context_length_exceeded")
    await kit.aclose()


class Bound(ScriptedBackend):
    """Can only answer while its request is there."""

    is_request_bound = True


@pytest.mark.parametrize(("way", "headers"), [("task", {}), ("plain", {"idempotency-key": "k"})])
async def test_what_outlives_its_request_is_refused_in_words_of_lmsp_where_nothing_can(
    way: str, headers: dict[str, str]
) -> None:
    kit = ResponsesKit(Bound(["Hi."]))
    problem = refusal(await ask(kit, way, VALID, headers))
    assert (problem["status"], problem["code"]) == (400, "unsupported_capability")
    assert problem.get("param") in (None, "Idempotency-Key")


@pytest.mark.parametrize("way", WAYS)
async def test_a_response_that_is_not_there_for_this_owner_is_not_gone_on_from(way: str) -> None:
    kit = new_kit(owner=lambda host: host)

    async def made(change: dict[str, Any], host: str, path: str = "/responses") -> Reply:
        return await call(kit, "POST", path, VALID | change, host=host)

    unkept = json.loads((await made({}, "ann")).body)["id"]
    anns = json.loads((await made({"store": True}, "ann")).body)["id"]
    for host, previous in (("ann", unkept), ("bob", anns)):
        change = {"previous_response_id": previous, "stream": way == "streamed"}
        problem = refusal(await made(change, host, "/tasks" if way == "task" else "/responses"))
        assert (problem["status"], problem["code"]) == (400, "previous_response_not_found")
        assert problem["param"] == "previous_response_id"


async def test_a_response_that_is_still_made_is_not_gone_on_from() -> None:
    kit = new_kit(Pause(60))
    task = json.loads((await ask(kit, "task", VALID)).body)
    change = {"previous_response_id": task["response"]["id"]}
    problem = refusal(await ask(kit, "plain", VALID | change))
    assert (problem["status"], problem["code"]) == (400, "previous_response_in_progress")
    assert problem["param"] == "previous_response_id"
    await kit.aclose()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("Mend it.", param="input"), 400, INVALID),
        (errors.UnsupportedParameter("Mend it.", param="temperature"), 400, "unsupported_capability"),
        (errors.ContextLengthExceeded("Shorten it."), 400, "context_length_exceeded"),
        (errors.ModelNotFound(), 400, "model_not_found"),
        (errors.Forbidden("Not you."), 403, "forbidden"),
        (errors.TooManyRequests("Full."), 429, "too_many_requests"),
        (errors.ModelError("It broke."), 500, "model_error"),
        (errors.ModelError("It broke.", code="tool_not_allowed"), 500, "tool_not_allowed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_what_the_backend_finds_wrong_is_the_same_problem_wherever_it_is_told(
    error: errors.APIError, status: int, code: str, way: str
) -> None:
    kit = new_kit("Well, ", error)
    reply = await ask(kit, way, VALID)
    if way == "plain":
        problem = refusal(reply)
    else:
        if way == "task":
            reply = await call(kit, "GET", f"/tasks/{json.loads(reply.body)['id']}/events")
        *_, last = decode_events(await listen(reply))
        assert last.name == "response.failed"
        problem = last.data["error"]
    assert (problem["status"], problem["code"]) == (status, code)
    await kit.aclose()


# Headers.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ["", "x" * 256, HELD * 1000])
async def test_a_key_is_not_empty_and_not_too_long(key: str, way: str) -> None:
    kit = new_kit()
    problem = refusal(await ask(kit, way, VALID, {"idempotency-key": key}))
    assert (problem["status"], problem["code"], problem["param"]) == (400, INVALID, "Idempotency-Key")
    check_untouched(kit)


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
async def test_a_key_belongs_to_one_request(first: str, second: str) -> None:
    kit = new_kit()
    headers = {"idempotency-key": HELD + "x" * (255 - len(HELD))}
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
    ("way", "headers"), [("task", {}), *((way, {"idempotency-key": "k"}) for way in WAYS)], ids=str
)
async def test_what_has_to_be_kept_cannot_be_had_unkept(way: str, headers: dict[str, str]) -> None:
    kit = new_kit()
    problem = refusal(await ask(kit, way, VALID | {"store": False}, headers))
    assert (problem["status"], problem["code"], problem["param"]) == (400, INVALID, "store")
    check_untouched(kit)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("version", ["1", "1.0", "1.7", "1.999999999", " 1.0 "])
async def test_every_version_with_the_same_major_is_spoken(version: str, way: str) -> None:
    kit = new_kit()
    reply = await ask(kit, way, VALID, {"lmsp-version": version})
    assert await outcome(kit, way, reply) == "completed"
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
        HELD,
        "1." + "9" * 5000,
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/responses"), ("POST", "/tasks"), ("GET", "/tasks/task_1/events"), ("GET", "/no")]
)
async def test_another_version_is_refused_before_anything_else(version: str, method: str, path: str) -> None:
    kit = new_kit(owner=lambda host: None)
    problem = refusal(await call(kit, method, path, b"{", {"lmsp-version": version}))
    assert (problem["status"], problem["code"], problem["param"]) == (400, "unsupported_version", "LMSP-Version")
    check_untouched(kit)


async def test_nobody_without_an_owner_is_told_anything() -> None:
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
async def test_a_body_that_is_no_request_is_a_short_400(body: bytes, code: str, path: str) -> None:
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
            for media in ("text/plain", "", ";", "json", HELD, "application/x-www-form-urlencoded")
        ),
        *({"content-encoding": encoding} for encoding in ("br", HELD, "gzip, gzip")),
    ],
    ids=shown,
)
async def test_a_body_of_another_type_is_a_415(headers: dict[str, str], path: str) -> None:
    kit = new_kit()
    problem = refusal(await call(kit, "POST", path, VALID, headers))
    assert (problem["status"], problem["code"]) == (415, "unsupported_media_type")
    check_untouched(kit)


@pytest.mark.parametrize("path", ["/responses", "/tasks"])
@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_that_is_too_large_is_a_413(packed: bool, path: str) -> None:
    kit = new_kit(limits=Limits(max_body_bytes=1000))
    body = json.dumps(VALID | {"nobody": HELD * 1000}).encode()
    reply = await call(
        kit, "POST", path, gzip.compress(body) if packed else body, {"content-encoding": "gzip"} if packed else None
    )
    problem = refusal(reply)
    assert (problem["status"], problem["code"]) == (413, "payload_too_large")
    check_untouched(kit)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [50, 150, 180, 190, 195, 200, 250, 1000, 5000])
@pytest.mark.parametrize("place", ["extensions", "parameters", "nobody"])
async def test_what_is_nested_deeply_is_answered_or_refused(place: str, depth: int, way: str) -> None:
    deep: bytes = b'{"a":' * depth + b"{}" + b"}" * depth
    tool = b'{"type":"function","name":"add","parameters":' + deep + b"}"
    member = b'"tools":[' + tool + b"]" if place == "parameters" else b'"%b":%b' % (place.encode(), deep)
    streamed = b'"stream":true,' if way == "streamed" else b""
    kit = new_kit()
    reply = await ask(kit, way, json.dumps(VALID).encode()[:-1] + b"," + streamed + member + b"}")
    if reply.status == 400:
        assert refusal(reply)["code"] in ("invalid_json", INVALID)
        check_untouched(kit)
    else:
        assert await outcome(kit, way, reply) == "completed"
    if not 180 < depth < 250:  # where exactly the line is, is the parser's business
        assert reply.status == (400 if depth > 200 else 202 if way == "task" else 200)
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
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "post", HELD])
async def test_a_wrong_method_is_told_the_right_one(path: str, allowed: str, method: str) -> None:
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
        f"/{HELD}",
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
async def test_an_unknown_path_is_a_404(path: str, method: str) -> None:
    problem = refusal(await call(new_kit(), method, path, VALID))
    assert (problem["status"], problem["code"]) == (404, "not_found")


async def test_compaction_is_none_of_this_dialect() -> None:
    assert refusal(await call(new_kit(), "POST", "/responses/compact", VALID))["status"] in (404, 405)


@pytest.mark.parametrize(
    "name", [HELD, "resp_1", "task_", f"task_{HELD}", "task_resp_1", "task_" + "0" * 32, "*", "\x00"]
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
async def test_what_nobody_has_is_a_404_of_its_own(method: str, path: str, code: str, name: str) -> None:
    problem = refusal(await call(new_kit(), method, path.format(name)))
    assert (problem["status"], problem["code"]) == (404, code)


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/events"), ("POST", "/cancel")])
async def test_a_response_that_no_task_makes_is_no_task(method: str, path: str) -> None:
    kit = new_kit()
    made = json.loads((await ask(kit, "plain", VALID | {"store": True})).body)["id"]
    for name in (made, made.replace("resp_", "task_")):
        problem = refusal(await call(kit, method, f"/tasks/{name}{path}"))
        assert (problem["status"], problem["code"]) == (404, "task_not_found")


# Places in a stream.

NO_PLACES = ["x", HELD, "-1", "+1", "1.5", "1e3", "\u0665", "9" * 16, "9" * 5000, "0x1", "1_0", "\x00"]


async def finished(kit: ResponsesKit) -> str:
    """The path of a task's events, once it has ended."""
    reply = await ask(kit, "task", VALID)
    assert await outcome(kit, "task", reply) == "completed"
    return f"/tasks/{json.loads(reply.body)['id']}/events"


@pytest.mark.parametrize("place", NO_PLACES)
async def test_a_place_that_is_none_is_refused_wherever_it_is_said(place: str) -> None:
    kit = new_kit()
    path = await finished(kit)
    for more, param in (
        ({"query": f"after={place.replace('+', '%2B')}"}, "after"),
        ({"headers": {"last-event-id": place}}, "Last-Event-ID"),
        ({"query": f"after={place.replace('+', '%2B')}", "headers": {"last-event-id": "1"}}, "after"),
    ):
        problem = refusal(await call(kit, "GET", path, **more))
        assert (problem["status"], problem["code"], problem["param"]) == (400, INVALID, param)
    await kit.aclose()


async def test_a_place_in_the_query_counts_before_the_header_whatever_that_says() -> None:
    kit = new_kit()
    path = await finished(kit)
    for place in NO_PLACES:
        reply = await call(kit, "GET", path, query="after=2", headers={"last-event-id": place})
        assert decode_events(await listen(reply))[0].id == 3
    reply = await call(kit, "GET", path, query="after=" + "9" * 15)
    assert decode_events(await listen(reply)) == []
    await kit.aclose()


async def test_events_that_are_not_kept_any_more_are_gone() -> None:
    class Forgetful(MemoryStore):
        forgets = False

        async def events(self, owner: str, response_id: str, after: int) -> Any:
            return None if self.forgets else await super().events(owner, response_id, after)

    store = Forgetful()
    kit = new_kit(store=store)
    path = await finished(kit)
    store.forgets = True
    for query in ("", "after=2"):
        problem = refusal(await call(kit, "GET", path, query=query))
        assert (problem["status"], problem["code"]) == (410, "event_history_expired")
        assert problem.get("param") in (None, "after")
    assert json.loads((await call(kit, "GET", path.removesuffix("/events"))).body)["status"] == "completed"
    await kit.aclose()


async def test_a_task_that_has_ended_is_not_cancelled() -> None:
    kit = new_kit()
    path = await finished(kit)
    problem = refusal(await call(kit, "POST", path.replace("/events", "/cancel")))
    assert 400 <= problem["status"] < 500
    await kit.aclose()
