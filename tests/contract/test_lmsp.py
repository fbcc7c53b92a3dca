"""LMSP 1.0 (draft): the rules of its chapter "Responses and streaming", and its examples."""

from __future__ import annotations

import json
from random import Random

import anyio
import pytest

from tests.http.lmsp.conformance import check_stream

from .client import Client, call, functions, script
from .hosts import DEFAULT_HOSTS, DJANGO_WSGI, MOUNTS, WAITRESS
from .lmsp import LmspClient, message

pytestmark = pytest.mark.anyio

SERVED_BY = [*DEFAULT_HOSTS, *MOUNTS, DJANGO_WSGI, WAITRESS]

QWEN = "qwen3:14b-q4_k_m"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}


@pytest.fixture
def lmsp_client(server):
    return LmspClient(server.port)


@pytest.fixture
def client(server):
    """A client of the same kit with Open Responses."""
    return Client(server.port)


def script_input(*script_steps):
    """Return the input that makes the backend execute these steps."""
    return [message(script(*script_steps))]


# 6.1, the request.


async def test_input_must_be_list_of_items(lmsp_client):
    await lmsp_client.check_problem(await lmsp_client.send_request(input="hello"), 400, "invalid_request", "input")
    assert (await lmsp_client.complete(input=[message("hello")]))["status"] == "completed"


async def test_content_must_be_text_parts(lmsp_client):
    for content, param in (
        ("hello", "content"),
        ([{"type": "input_image", "image_url": "data:image/png;base64,AA=="}], "content[0].type"),
        ([{"type": "input_audio", "data": "AA=="}], "content[0].type"),
        ([{"type": "input_text", "text": "a"}, {"type": "input_file", "file_data": "AA=="}], "content[1].type"),
    ):
        reply = await lmsp_client.send_request(input=[{"type": "message", "role": "user", "content": content}])
        await lmsp_client.check_problem(reply, 400, "invalid_request", f"input[0].{param}")


async def test_message_roles_are_system_user_and_assistant(lmsp_client):
    history = [
        message("be brief", "system"),
        message("hi"),
        message("hello", "assistant", "output_text"),
        message("and now?"),
    ]
    turn = json.loads((await lmsp_client.complete(input=history))["output"][0]["content"][0]["text"])
    assert [message["role"] for message in turn["messages"]] == ["system", "user", "assistant", "user"]
    reply = await lmsp_client.send_request(input=[message("be brief", "developer")])
    await lmsp_client.check_problem(reply, 400, "invalid_request", "input[0].role")


async def test_request_fields_reach_model(lmsp_client):
    fields = {"max_output_tokens": 3, "temperature": 0.7, "response_format": {"type": "text"}, "extensions": {"x": 1}}
    response = await lmsp_client.complete(input=[message("hello")], tools=[WEATHER], tool_choice="none", **fields)
    turn = json.loads(response["output"][0]["content"][0]["text"])
    assert (turn["max_output_tokens"], turn["temperature"], turn["tool_choice"]) == (3, 0.7, "none")
    assert turn["tools"] == [{**WEATHER, "strict": None}]
    assert turn["text_format"] == {"type": "text"}


async def test_response_format_requests_structured_output(lmsp_client):
    response = await lmsp_client.complete(input=script_input('{"n": 1}'), response_format=AS_JSON)
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"n": 1}
    reply = await lmsp_client.send_request(input=script_input('{"n": "one"}'), response_format=AS_JSON)
    await lmsp_client.check_problem(reply, 500, "invalid_output_format")


async def test_missing_capability_returns_unsupported_capability(lmsp_client):
    for fields, param in (
        ({"model": "scripted-text", "response_format": AS_JSON}, "response_format"),
        ({"model": "scripted-text", "tools": [WEATHER]}, "tools"),
        ({"model": "scripted-stateless", "previous_response_id": "resp_any"}, "previous_response_id"),
    ):
        for path in ("/responses", "/tasks"):
            reply = await lmsp_client.send_request(path, input=[message("hello")], **fields)
            await lmsp_client.check_problem(reply, 400, "unsupported_capability", param)


async def test_store_is_ignored_without_conversations_capability(lmsp_client):
    response = await lmsp_client.complete(model="scripted-stateless", input=[message("hello")], store=True)
    await lmsp_client.check_problem(await lmsp_client.get(f"/responses/{response['id']}"), 404, "response_not_found")


async def test_oversize_prompt_is_refused_without_truncation(lmsp_client):
    history = [message("word " * 60), message("word " * 60)]
    for more in ({}, {"truncation": "auto"}):
        reply = await lmsp_client.send_request(model="scripted-small", input=history, **more)
        await lmsp_client.check_problem(reply, 400, "context_length_exceeded", "input")


async def test_store_defaults_to_false(lmsp_client):
    for more in ({}, {"store": False}, {"store": None}):
        response = await lmsp_client.complete(input=[message("hello")], **more)
        await lmsp_client.check_problem(
            await lmsp_client.get(f"/responses/{response['id']}"), 404, "response_not_found"
        )
        reply = await lmsp_client.send_request(input=[message("on")], previous_response_id=response["id"])
        await lmsp_client.check_problem(reply, 400, "previous_response_not_found", "previous_response_id")


async def test_stored_response_is_retrieved_and_continued(lmsp_client):
    first = await lmsp_client.complete(input=script_input("one"), store=True)
    assert (await lmsp_client.get(f"/responses/{first['id']}")).json() == first
    second = await lmsp_client.complete(input=[message("and then?")], previous_response_id=first["id"])
    turn = json.loads(second["output"][0]["content"][0]["text"])
    assert [message["role"] for message in turn["messages"]] == ["user", "assistant", "user"]


async def test_unknown_and_foreign_ids_return_404(lmsp_client):
    response = await lmsp_client.complete(input=[message("hello")], store=True)
    task = await lmsp_client.create_task(input=[message("hello")])
    stranger = lmsp_client.with_key("Bearer bob")
    for response_id in (response["id"], "resp_unknown"):
        await stranger.check_problem(await stranger.get(f"/responses/{response_id}"), 404, "response_not_found")
    for task_id in (task["id"], "task_unknown", response["id"], response["id"].replace("resp", "task")):
        for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
            reply = await stranger.request(method, f"/tasks/{task_id}{path}")
            await stranger.check_problem(reply, 404, "task_not_found")


# 6.2, the response.


async def test_failed_generation_returns_problem_document(lmsp_client):
    problem = await lmsp_client.check_problem(
        await lmsp_client.send_request(input=script_input("half", {"raise": "secret"})), 500, "model_error"
    )
    assert "secret" not in json.dumps(problem)
    refuse = {"refuse": "TooManyRequests", "message": "Too many."}
    reply = await lmsp_client.send_request(input=script_input(refuse))
    await lmsp_client.check_problem(reply, 429, "too_many_requests")
    assert reply.headers["retry-after"] == "1"


async def test_stored_failed_response_holds_problem(lmsp_client, control, name):
    run = name()
    await lmsp_client.send_request(input=script_input({"run": run}, "half", {"raise": "no"}), store=True)
    response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
    response = (await lmsp_client.get(f"/responses/{response_id}")).json()
    assert (response["status"], response["error"]["code"]) == ("failed", "model_error")
    assert response["error"]["status"] == 500


async def test_truncated_answer_is_incomplete_with_reason(lmsp_client):
    response = await lmsp_client.complete(input=script_input("half", {"Finish": {"reason": "max_output_tokens"}}))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_output_items_have_listed_members_only(lmsp_client):
    reasoning = {"ReasoningSummary": {"text": "short", "new_part": True}}
    script_steps = [
        {"Reasoning": {"text": "long"}},
        reasoning,
        "text",
        {"Refusal": {"text": "no"}},
        call("f", {"a": 1}),
    ]
    response = await lmsp_client.complete(input=script_input(*script_steps), tools=functions("f"))
    received_items = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    assert received_items == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "text"}, {"type": "output_text", "text": "no"}],
        },
        {"type": "function_call", "name": "f", "arguments": json.dumps({"a": 1})},
    ]


async def test_output_items_are_accepted_as_input(lmsp_client):
    reasoning = {"ReasoningSummary": {"text": "short", "new_part": True}}
    first = script_input(reasoning, "text", call("f", {"a": 1}))
    response = await lmsp_client.complete(input=first, tools=functions("f"))
    output = {"type": "function_call_output", "call_id": response["output"][2]["call_id"], "output": '{"b": 2}'}
    repeated = [*first, *response["output"], output, message("so?")]
    turn = json.loads((await lmsp_client.complete(input=repeated))["output"][0]["content"][0]["text"])
    assert [item["type"] for item in turn["items"][1:]] == [
        "reasoning", "message", "function_call", "function_call_output", "message"
    ]  # fmt: skip
    assert [item["id"] for item in turn["items"][1:4]] == [item["id"] for item in response["output"]]


# 6.3, the stream.


async def test_events_are_numbered_from_1_with_listed_members_only(lmsp_client):
    reasoning = {"ReasoningSummary": {"text": "short", "new_part": True}}
    script_steps = [
        {"Reasoning": {"text": "long"}},
        reasoning,
        "te",
        "xt",
        {"Refusal": {"text": "no"}},
        call("f", {"a": 1}),
    ]
    for ending in ([], [{"Finish": {"reason": "max_output_tokens"}}], [{"raise": "no"}]):
        async with lmsp_client.open_events(
            body={"input": script_input(*script_steps, *ending), "tools": functions("f"), "store": True}
        ) as events:
            items = await events.read_items()
        response = (await lmsp_client.get(f"/responses/{events.received[0].data['response_id']}")).json()
        assert items == response["output"]
        final = events.received[-1]
        assert final.name == f"response.{response['status']}"
        assert {name: response[name] for name in final.data if name != "response_id"} == {
            name: value for name, value in final.data.items() if name != "response_id"
        }


async def test_stream_closes_after_final_event_without_done(lmsp_client):
    reply = await lmsp_client.send_request(input=script_input("text"), stream=True)
    assert b"[DONE]" not in reply.body
    assert reply.body.rpartition(b"event: ")[2].startswith(b"response.completed\n")


async def test_stream_sends_each_delta_before_the_next_is_generated(lmsp_client, control, name):
    gates = [name() for _ in range(3)]
    script_steps = [step for gate in gates for step in (f"to {gate}", {"gate": gate})]
    async with lmsp_client.open_events(body={"input": script_input(*script_steps)}) as events:
        for gate in gates:
            assert (await events.until("response.output_text.delta")).data["delta"] == f"to {gate}"
            await control.open_gate(gate)
        await events.read_items()


async def test_stream_failure_is_final_event_with_problem(lmsp_client):
    turn = await lmsp_client.stream_events(input=script_input("half", {"raise": "secret"}))
    assert turn[-1].name == "response.failed"
    assert turn[-1].data["error"]["code"] == "model_error"
    assert "secret" not in json.dumps(turn[-1].data)


async def test_refused_stream_returns_problem_document(lmsp_client):
    reply = await lmsp_client.send_request(input=[message("word " * 200)], model="scripted-small", stream=True)
    await lmsp_client.check_problem(reply, 400, "context_length_exceeded", "input")


async def test_cancelled_response_ends_with_cancelled_event(lmsp_client, client, control, name):
    async with lmsp_client.open_events(body={"input": script_input("half", {"gate": name()}), "store": True}) as events:
        await events.until("response.output_text.delta")
        response_id = events.received[0].data["response_id"]
        assert (await client.cancel(response_id)).status == 200
        await events.read_items()
    assert events.received[-1].name == "response.cancelled"
    response = (await lmsp_client.get(f"/responses/{response_id}")).json()
    assert (response["status"], response["incomplete_details"]) == ("cancelled", None)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_disconnect_stops_generation(lmsp_client, control, name, streamed):
    run = name()
    body = {
        "model": "scripted",
        "stream": streamed,
        "input": script_input({"run": run}, {"forever": "on ", "every": 0.02}),
    }
    async with lmsp_client.open_request(body) as connection:
        await control.wait_for(run, "started")
        if streamed:
            await connection.head()
        await connection.disconnect()
    await control.wait_for(run, "ended")


async def test_websockets_compaction_and_models_are_absent(lmsp_client):
    reply = await lmsp_client.get("/responses")
    await lmsp_client.check_problem(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    for method, path in (("POST", "/responses/compact"), ("GET", "/models")):
        reply = await lmsp_client.request(method, path, json={"model": "scripted", "input": []})
        assert reply.status in (404, 405), "these would be ids"


# 6.4, ids and reconnection.


async def test_response_stream_belongs_to_its_connection(lmsp_client):
    response = await lmsp_client.complete(input=script_input("text"), store=True)
    repeated = await lmsp_client.get(f"/responses/{response['id']}?stream=true&after=0", headers={"Last-Event-ID": "1"})
    assert repeated.json() == response


@pytest.mark.parametrize("by", ["query", "header"])
async def test_task_is_resumed_from_every_event(lmsp_client, control, name, by):
    gates = [name(), name()]
    script_steps = ["a ", {"gate": gates[0]}, "b ", call("f", {}), {"gate": gates[1]}, "c"]
    task = await lmsp_client.create_task(input=script_input(*script_steps), tools=functions("f"))
    async with lmsp_client.follow_task(task["id"]) as first:
        await first.until("response.output_text.delta")
        event_id = first.received[-1].id
        async with lmsp_client.follow_task(task["id"], event_id, by=by) as second:
            await control.open_gate(gates[0])
            assert (await second.next()).id == event_id + 1
            await control.open_gate(gates[1])
            await second.rest()
        check_stream(await first.rest())
    assert second.received == first.received[event_id:]
    for place in range(len(first.received) + 3):
        async with lmsp_client.follow_task(task["id"], place, by=by) as repeated:
            assert await repeated.rest() == first.received[place:], f"after {place}"


CUTS = 50


async def test_task_resumed_50_times_has_no_gap_and_no_repeat(lmsp_client, control, name):
    chance, gates = Random(name()), [name() for _ in range(CUTS)]
    script_steps = [
        step for number, gate in enumerate(gates) for step in (f"{number} a ", f"{number} b ", {"gate": gate})
    ]
    task = await lmsp_client.create_task(input=script_input(*script_steps, call("f", {})), tools=functions("f"))
    turn = []
    for number, gate in enumerate([*gates, None]):
        by = chance.choice(["query", "header"])
        async with lmsp_client.follow_task(task["id"], len(turn), by=by) as events:
            if gate is None:
                turn += await events.rest()
                break
            # Each gate adds two deltas after the two events that open a message.
            for _ in range(chance.randint(0, 4 + 2 * number - len(turn))):
                turn.append(await events.next())
            await events.connection.disconnect(reset=chance.random() < 0.5)
        await control.open_gate(gate)
    assert number == CUTS
    (message, _) = check_stream(turn)
    assert message["content"][0]["text"] == "".join(step for step in script_steps if isinstance(step, str))
    async with lmsp_client.follow_task(task["id"]) as events:
        assert await events.rest() == turn


async def test_after_query_precedes_last_event_id_header(lmsp_client):
    task = await lmsp_client.create_task(input=script_input("a", "b"))
    await lmsp_client.wait_for_task(task["id"])
    path = f"/tasks/{task['id']}/events?after=2"
    for event_id in ("5", "none"):
        async with lmsp_client.open_events("GET", path, headers={"Last-Event-ID": event_id}) as events:
            assert [event.id for event in await events.rest()] == [3, 4, 5, 6]
    for query, headers, param in (("?after=x", {}, "after"), ("", {"Last-Event-ID": "x"}, "Last-Event-ID")):
        reply = await lmsp_client.get(f"/tasks/{task['id']}/events{query}", headers=headers)
        await lmsp_client.check_problem(reply, 400, "invalid_request", param)


@pytest.mark.clock
async def test_expired_events_are_unavailable_and_task_keeps_result(lmsp_client, control):
    task = await lmsp_client.create_task(input=script_input("a"))
    ended = await lmsp_client.wait_for_task(task["id"])
    await control.advance_clock(2 * 60 * 60)
    for path in ("/events", "/events?after=2"):
        reply = await lmsp_client.get(f"/tasks/{task['id']}{path}")
        await lmsp_client.check_problem(reply, 410, "event_history_expired")
    assert (await lmsp_client.get(f"/tasks/{task['id']}")).json() == ended
    assert ended["response"]["output"][0]["content"][0]["text"] == "a"


async def test_task_survives_disconnect_and_stores_response(lmsp_client, control, name):
    gate = name()
    task = await lmsp_client.create_task(input=script_input("half ", {"gate": gate}, "whole"))
    assert task["status"] == "in_progress"
    async with lmsp_client.follow_task(task["id"]) as events:
        await events.until("response.output_text.delta")
        await events.connection.disconnect()
    await control.open_gate(gate)
    ended = await lmsp_client.wait_for_task(task["id"])
    assert ended["status"] == ended["response"]["status"] == "completed"
    assert ended["response"]["output"][0]["content"][0]["text"] == "half whole"
    assert (await lmsp_client.get(f"/responses/{ended['response']['id']}")).json() == ended["response"]


async def test_task_is_cancelled(lmsp_client, control, name):
    run = name()
    task = await lmsp_client.create_task(input=script_input({"run": run}, "half", {"gate": name()}))
    await control.wait_for(run, "started")
    async with lmsp_client.follow_task(task["id"]) as events:
        reply = await lmsp_client.request("POST", f"/tasks/{task['id']}/cancel")
        assert (reply.status, reply.json()["status"]) == (200, "cancelled")
        await events.read_items()
    assert events.received[-1].name == "response.cancelled"
    await control.wait_for(run, "ended")


# 6.5, tools.


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_function_call_arrives_whole_for_client(lmsp_client, streamed):
    fields = {"input": script_input(call("f", {"a": 1}), call("g", {})), "tools": functions("f", "g")}
    if streamed:
        async with lmsp_client.open_events(body={**fields, "tool_choice": "required"}) as events:
            calls = await events.read_items()
        assert not [event for event in events.received if "arguments" in event.name]
    else:
        calls = (await lmsp_client.complete(**fields))["output"]
    assert [(item["name"], json.loads(item["arguments"])) for item in calls] == [("f", {"a": 1}), ("g", {})]


async def test_server_tools_are_refused(lmsp_client):
    for kind in ("test:add", "web_search", "mcp"):
        reply = await lmsp_client.send_request(input=[message("hello")], tools=[{"type": kind, "name": "x"}])
        await lmsp_client.check_problem(reply, 400, "invalid_request", "tools[0].type")


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "name": "f"}])
async def test_tool_choice_is_enforced(lmsp_client, choice):
    fields = {"tools": functions("f", "g"), "tool_choice": choice}
    reply = await lmsp_client.send_request(input=script_input(call("f", {}) if choice != "none" else "text"), **fields)
    assert reply.status == 200
    broken = {"none": call("f", {}), "auto": call("h", {}), "required": "text"}
    reply = await lmsp_client.send_request(input=script_input(broken.get(str(choice), call("g", {}))), **fields)
    await lmsp_client.check_problem(reply, 500, "tool_call_missing" if choice == "required" else "tool_not_allowed")


async def test_function_output_must_be_string(lmsp_client):
    response = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for output in ({"a": 1}, [{"type": "input_text", "text": "a"}], None, 1):
        items = [response, {"type": "function_call_output", "call_id": "c", "output": output}]
        await lmsp_client.check_problem(
            await lmsp_client.send_request(input=items), 400, "invalid_request", "input[1].output"
        )


# Headers.


async def test_version_header_is_sent_and_other_major_is_refused(lmsp_client):
    for version in ("1.0", "1", "1.9"):
        await lmsp_client.complete(input=[message("hello")], headers={"LMSP-Version": version})
    for version in ("2.0", "0.9", "new"):
        reply = await lmsp_client.send_request(input=[message("hello")], headers={"LMSP-Version": version})
        await lmsp_client.check_problem(reply, 400, "unsupported_version", "LMSP-Version")
    stranger = lmsp_client.with_key("Bearer stranger")
    await stranger.check_problem(await stranger.send_request(input=[message("hello")]), 401, "invalid_api_key")
    await lmsp_client.check_problem(await lmsp_client.get("/elsewhere"), 404, "not_found")
    await lmsp_client.check_problem(await lmsp_client.request("DELETE", "/tasks"), 405, "method_not_allowed")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_repeated_request_with_key_generates_once(lmsp_client, control, name, streamed):
    run, gate = name(), name()
    fields = {"input": script_input({"run": run}, "half ", {"gate": gate}, "whole"), "stream": streamed}
    headers, bodies = {"Idempotency-Key": name()}, []

    async def ask():
        reply = await lmsp_client.send_request(headers=headers, **fields)
        assert reply.status == 200
        bodies.append([block for block in reply.body.split(b"\n\n") if not block.startswith(b":")])

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
        await control.wait_for(run, "started")
        await control.open_gate(gate)
    await ask()
    assert len(bodies) == 4
    assert all(body == bodies[0] for body in bodies)
    assert (await control.trace(run)).count("started") == 1
    reply = await lmsp_client.send_request(headers=headers, input=[message("another")])
    await lmsp_client.check_problem(reply, 409, "idempotency_key_reused")
    reply = await lmsp_client.send_request(headers=headers, **{**fields, "store": False})
    await lmsp_client.check_problem(reply, 400, "invalid_request", "store")


async def test_repeated_task_with_key_is_the_same_task(lmsp_client, name):
    headers = {"Idempotency-Key": name()}
    tasks = [await lmsp_client.create_task(input=script_input("a"), headers=headers) for _ in range(3)]
    assert len({task["id"] for task in tasks}) == 1


# The draft's examples.


def without_ids(value):
    """Return the value with ids reduced to their prefixes and times to 0."""
    match value:
        case dict():
            return {
                key: 0 if key == "created_at" else _prefix(member) if key.endswith("id") else without_ids(member)
                for key, member in value.items()
            }
        case list():
            return [without_ids(member) for member in value]
    return value


def _prefix(value):
    return value.partition("_")[0]


def usage(input_tokens, output_tokens):
    total = input_tokens + output_tokens
    return {"input_tokens": input_tokens, "output_tokens": output_tokens, "total_tokens": total}


def text_part(text, kind="output_text"):
    return [{"type": kind, "text": text}]


DESCRIBE = {
    "model": QWEN,
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": text_part("Describe a local model service in one sentence.", "input_text"),
        }
    ],
    "stream": False,
    "max_output_tokens": 512,
    "temperature": 0.7,
    "response_format": {"type": "text"},
    "store": True,
}
ENVELOPE = {"id": "resp", "object": "response", "created_at": 0, "status": "completed", "model": QWEN}


async def test_response_example_is_reproduced(lmsp_client, name):
    headers = {"Authorization": "Bearer alice", "Idempotency-Key": name(), "LMSP-Version": "1.0"}
    reply = await lmsp_client.request("POST", "/responses", json=DESCRIBE, headers=headers)
    assert reply.status == 200
    sentence = (
        "A local model service is a resident interface layer that discovers, manages and calls models on the "
        "user's own device."
    )
    assert without_ids(reply.json()) == ENVELOPE | {
        "output": [{"id": "msg", "type": "message", "role": "assistant", "content": text_part(sentence)}],
        "usage": usage(28, 31),
        "error": None,
        "incomplete_details": None,
    }


STREAMED = [
    ("response.created", {"response_id": "resp", "status": "in_progress"}),
    (
        "response.output_item.added",
        {
            "response_id": "resp",
            "output_index": 0,
            "item": {"id": "msg", "type": "message", "role": "assistant", "content": []},
        },
    ),
    ("response.output_text.delta", {"response_id": "resp", "item_id": "msg", "delta": "A local model "}),
    (
        "response.output_text.delta",
        {"response_id": "resp", "item_id": "msg", "delta": "service is a resident interface layer."},
    ),
    (
        "response.output_item.done",
        {
            "response_id": "resp",
            "output_index": 0,
            "item": {
                "id": "msg",
                "type": "message",
                "role": "assistant",
                "content": text_part("A local model service is a resident interface layer."),
            },
        },
    ),
    ("response.completed", {"response_id": "resp", "status": "completed", "usage": usage(28, 12)}),
]
"""The draft's example of a stream, which does not show the request."""
DESCRIBE_BRIEFLY = DESCRIBE | {"input": [message("Describe a local model service in a few words.")], "stream": True}


async def test_stream_example_is_reproduced(lmsp_client):
    turn = await lmsp_client.stream_events(**DESCRIBE_BRIEFLY)
    assert [event.id for event in turn] == [1, 2, 3, 4, 5, 6]
    assert [(event.name, without_ids(event.data)) for event in turn] == STREAMED


@pytest.mark.parametrize("by", ["query", "header"])
async def test_reconnection_example_is_reproduced(lmsp_client, by):
    task = await lmsp_client.create_task(**DESCRIBE_BRIEFLY)
    async with lmsp_client.follow_task(task["id"], 2, by=by) as events:
        turn = await events.rest()
    assert [event.id for event in turn] == [3, 4, 5, 6]
    assert [(event.name, without_ids(event.data)) for event in turn] == STREAMED[2:]


async def test_tool_call_example_is_reproduced(lmsp_client):
    question = message("What is the weather in Hangzhou?")
    fields = {"model": QWEN, "tools": [WEATHER], "tool_choice": "auto"}
    response = await lmsp_client.complete(input=[question], **fields)
    assert without_ids(response) == ENVELOPE | {
        "output": [
            {
                "id": "fc",
                "type": "function_call",
                "call_id": "call",
                "name": "get_weather",
                "arguments": '{"city":"Hangzhou"}',
            }
        ],
        "usage": usage(74, 18),
        "error": None,
        "incomplete_details": None,
    }
    (call_item,) = response["output"]
    output = {
        "type": "function_call_output",
        "call_id": call_item["call_id"],
        "output": '{"temperature_c":17,"condition":"light rain"}',
    }
    second = await lmsp_client.complete(input=[question, call_item, output], **fields)
    assert second["output"][0]["content"] == text_part('{"temperature_c":17,"condition":"light rain"}')


# Both wire protocols.


def _plain(response):
    """Return the members of a response that both wire protocols have."""
    items = []
    for item in response["output"]:
        match item["type"]:
            case "message":
                parts = [part.get("text", part.get("refusal")) for part in item["content"]]
                items.append(("message", parts))
            case "function_call":
                items.append(("function_call", item["name"], item["arguments"]))
            case "reasoning":
                items.append(("reasoning", [part["text"] for part in item["summary"]]))
    counts = response["usage"] and {name: response["usage"][name] for name in usage(0, 0)}
    details = response["incomplete_details"] if response["status"] == "incomplete" else None
    return items, counts, response["status"], details


SCRIPTS = {
    "text": ["one ", "two"],
    "everything": [
        {"Reasoning": {"text": "long"}},
        {"ReasoningSummary": {"text": "short", "new_part": True}},
        "te",
        "xt",
        {"Refusal": {"text": "no"}},
        {"Message": {}},
        "more",
        call("f", {"a": 1}),
        call("g", {}),
        {"Usage": {"input_tokens": 5, "output_tokens": 7, "cached_tokens": 2, "reasoning_tokens": 3}},
    ],
    "extension item": ["a", {"Item": {"type": "acme:thing", "fields": {"x": 1}}}, "b"],
    "truncated": ["half", {"Finish": {"reason": "max_output_tokens"}}],
    "filtered": ["half", {"Finish": {"reason": "content_filter"}}],
    "nothing": [],
}


@pytest.mark.parametrize("script_steps", SCRIPTS.values(), ids=SCRIPTS)
async def test_both_dialects_give_equal_results(lmsp_client, client, script_steps):
    fields = {"input": script_input(*script_steps), "tools": functions("f", "g"), "temperature": 0.5}
    other = await client.create(**fields)
    ours = await lmsp_client.complete(**fields, store=True)
    assert _plain(ours) == _plain(other)
    async with lmsp_client.open_events(body=fields) as events:
        items = await events.read_items()
    assert _plain({**ours, "output": items}) == _plain(other)
    assert events.received[-1].name == f"response.{other['status']}"
    # A response that one protocol stored can be retrieved with the other one.
    assert _plain((await client.get(f"/responses/{ours['id']}")).json()) == _plain(ours)
    assert _plain((await lmsp_client.get(f"/responses/{other['id']}")).json()) == _plain(other)
