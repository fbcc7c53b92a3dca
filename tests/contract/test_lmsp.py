"""LMSP 1.0 (draft), rule by rule as its chapter "Responses and streaming" states them, and its examples, replayed."""

from __future__ import annotations

import json
from random import Random

import anyio
import pytest

from tests.http.lmsp.conformance import check_stream

from .client import Client, call, functions, script
from .hosts import DJANGO_WSGI, EVERYDAY, MOUNTS, WAITRESS
from .lmsp import Speaker, said

pytestmark = pytest.mark.anyio

SERVED_BY = [*EVERYDAY, *MOUNTS, DJANGO_WSGI, WAITRESS]

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
def speaker(server):
    return Speaker(server.port)


@pytest.fixture
def client(server):
    """The same kit in its other dialect."""
    return Client(server.port)


def moves(*played):
    """The input that makes the puppet do these moves."""
    return [said(script(*played))]


# 6.1, the request.


async def test_input_is_a_list_of_items_and_nothing_else(speaker):
    await speaker.problem(await speaker.ask(input="hello"), 400, "invalid_request", "input")
    assert (await speaker.made(input=[said("hello")]))["status"] == "completed"


async def test_content_is_parts_of_text_and_nothing_else(speaker):
    for content, param in (
        ("hello", "content"),
        ([{"type": "input_image", "image_url": "data:image/png;base64,AA=="}], "content[0].type"),
        ([{"type": "input_audio", "data": "AA=="}], "content[0].type"),
        ([{"type": "input_text", "text": "a"}, {"type": "input_file", "file_data": "AA=="}], "content[1].type"),
    ):
        reply = await speaker.ask(input=[{"type": "message", "role": "user", "content": content}])
        await speaker.problem(reply, 400, "invalid_request", f"input[0].{param}")


async def test_messages_come_from_system_user_and_assistant_alone(speaker):
    talk = [said("be brief", "system"), said("hi"), said("hello", "assistant", "output_text"), said("and now?")]
    told = json.loads((await speaker.made(input=talk))["output"][0]["content"][0]["text"])
    assert [message["role"] for message in told["messages"]] == ["system", "user", "assistant", "user"]
    reply = await speaker.ask(input=[said("be brief", "developer")])
    await speaker.problem(reply, 400, "invalid_request", "input[0].role")


async def test_what_is_asked_for_reaches_the_model(speaker):
    fields = {"max_output_tokens": 3, "temperature": 0.7, "response_format": {"type": "text"}, "extensions": {"x": 1}}
    response = await speaker.made(input=[said("hello")], tools=[WEATHER], tool_choice="none", **fields)
    told = json.loads(response["output"][0]["content"][0]["text"])
    assert (told["max_output_tokens"], told["temperature"], told["tool_choice"]) == (3, 0.7, "none")
    assert told["tools"] == [{**WEATHER, "strict": None}]
    assert told["text_format"] == {"type": "text"}


async def test_structured_output_is_asked_for_by_response_format(speaker):
    response = await speaker.made(input=moves('{"n": 1}'), response_format=AS_JSON)
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"n": 1}
    reply = await speaker.ask(input=moves('{"n": "one"}'), response_format=AS_JSON)
    await speaker.problem(reply, 500, "invalid_output_format")


async def test_what_the_model_lacks_is_an_unsupported_capability(speaker):
    for fields, param in (
        ({"model": "puppet-text", "response_format": AS_JSON}, "response_format"),
        ({"model": "puppet-text", "tools": [WEATHER]}, "tools"),
        ({"model": "puppet-forgetful", "previous_response_id": "resp_any"}, "previous_response_id"),
    ):
        for path in ("/responses", "/tasks"):
            reply = await speaker.ask(path, input=[said("hello")], **fields)
            await speaker.problem(reply, 400, "unsupported_capability", param)


async def test_without_the_conversations_capability_store_is_ignored(speaker):
    made = await speaker.made(model="puppet-forgetful", input=[said("hello")], store=True)
    await speaker.problem(await speaker.get(f"/responses/{made['id']}"), 404, "response_not_found")


async def test_what_does_not_fit_the_window_is_refused_and_never_cut(speaker):
    talk = [said("word " * 60), said("word " * 60)]
    for more in ({}, {"truncation": "auto"}):
        reply = await speaker.ask(model="puppet-small", input=talk, **more)
        await speaker.problem(reply, 400, "context_length_exceeded", "input")


async def test_nothing_is_stored_unless_that_is_asked_for(speaker):
    for more in ({}, {"store": False}, {"store": None}):
        made = await speaker.made(input=[said("hello")], **more)
        await speaker.problem(await speaker.get(f"/responses/{made['id']}"), 404, "response_not_found")
        reply = await speaker.ask(input=[said("on")], previous_response_id=made["id"])
        await speaker.problem(reply, 400, "previous_response_not_found", "previous_response_id")


async def test_a_stored_response_is_returned_and_continued_over_any_connection(speaker):
    first = await speaker.made(input=moves("one"), store=True)
    assert (await speaker.get(f"/responses/{first['id']}")).json() == first
    second = await speaker.made(input=[said("and then?")], previous_response_id=first["id"])
    told = json.loads(second["output"][0]["content"][0]["text"])
    assert [message["role"] for message in told["messages"]] == ["user", "assistant", "user"]


async def test_an_unknown_id_and_one_of_another_owner_are_not_found(speaker):
    made = await speaker.made(input=[said("hello")], store=True)
    task = await speaker.task(input=[said("hello")])
    stranger = speaker.other("Bearer bob")
    for response_id in (made["id"], "resp_unknown"):
        await stranger.problem(await stranger.get(f"/responses/{response_id}"), 404, "response_not_found")
    for task_id in (task["id"], "task_unknown", made["id"], made["id"].replace("resp", "task")):
        for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
            reply = await stranger.request(method, f"/tasks/{task_id}{path}")
            await stranger.problem(reply, 404, "task_not_found")


# 6.2, the answer.


async def test_a_failed_generation_is_answered_with_an_error_status_and_a_problem(speaker):
    problem = await speaker.problem(await speaker.ask(input=moves("half", {"raise": "secret"})), 500, "model_error")
    assert "secret" not in json.dumps(problem)
    refuse = {"refuse": "TooManyRequests", "message": "Too many."}
    reply = await speaker.ask(input=moves(refuse))
    await speaker.problem(reply, 429, "too_many_requests")
    assert reply.headers["retry-after"] == "1"


async def test_a_stored_response_that_failed_shows_its_problem(speaker, hand, name):
    run = name()
    await speaker.ask(input=moves({"run": run}, "half", {"raise": "no"}), store=True)
    response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
    response = (await speaker.get(f"/responses/{response_id}")).json()
    assert (response["status"], response["error"]["code"]) == ("failed", "model_error")
    assert response["error"]["status"] == 500


async def test_a_cut_answer_is_incomplete_and_says_why(speaker):
    response = await speaker.made(input=moves("half", {"Finish": {"reason": "max_output_tokens"}}))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_output_items_are_bare(speaker):
    reasoning = {"ReasoningSummary": {"text": "short", "new_part": True}}
    played = [{"Reasoning": {"text": "long"}}, reasoning, "text", {"Refusal": {"text": "no"}}, call("f", {"a": 1})]
    response = await speaker.made(input=moves(*played), tools=functions("f"))
    shown = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    assert shown == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "text"}, {"type": "output_text", "text": "no"}],
        },
        {"type": "function_call", "name": "f", "arguments": json.dumps({"a": 1})},
    ]


async def test_whatever_is_answered_is_taken_back_as_input(speaker):
    reasoning = {"ReasoningSummary": {"text": "short", "new_part": True}}
    first = moves(reasoning, "text", call("f", {"a": 1}))
    response = await speaker.made(input=first, tools=functions("f"))
    output = {"type": "function_call_output", "call_id": response["output"][2]["call_id"], "output": '{"b": 2}'}
    again = [*first, *response["output"], output, said("so?")]
    told = json.loads((await speaker.made(input=again))["output"][0]["content"][0]["text"])
    assert [item["type"] for item in told["items"][1:]] == [
        "reasoning", "message", "function_call", "function_call_output", "message"
    ]  # fmt: skip
    assert [item["id"] for item in told["items"][1:4]] == [item["id"] for item in response["output"]]


# 6.3, the stream.


async def test_events_are_numbered_from_1_and_hold_what_is_listed_and_no_more(speaker):
    reasoning = {"ReasoningSummary": {"text": "short", "new_part": True}}
    played = [{"Reasoning": {"text": "long"}}, reasoning, "te", "xt", {"Refusal": {"text": "no"}}, call("f", {"a": 1})]
    for ending in ([], [{"Finish": {"reason": "max_output_tokens"}}], [{"raise": "no"}]):
        async with speaker.events(
            body={"input": moves(*played, *ending), "tools": functions("f"), "store": True}
        ) as events:
            items = await events.items()
        response = (await speaker.get(f"/responses/{events.told[0].data['response_id']}")).json()
        assert items == response["output"]
        final = events.told[-1]
        assert final.name == f"response.{response['status']}"
        assert {name: response[name] for name in final.data if name != "response_id"} == {
            name: value for name, value in final.data.items() if name != "response_id"
        }


async def test_a_stream_has_no_done_and_is_closed_after_its_final_event(speaker):
    reply = await speaker.ask(input=moves("text"), stream=True)
    assert b"[DONE]" not in reply.body
    assert reply.body.rpartition(b"event: ")[2].startswith(b"response.completed\n")


async def test_each_delta_leaves_before_the_next_is_made(speaker, hand, name):
    gates = [name() for _ in range(3)]
    played = [move for gate in gates for move in (f"to {gate}", {"gate": gate})]
    async with speaker.events(body={"input": moves(*played)}) as events:
        for gate in gates:
            assert (await events.until("response.output_text.delta")).data["delta"] == f"to {gate}"
            await hand.open(gate)
        await events.items()


async def test_a_failure_in_a_stream_is_its_final_event_and_a_problem(speaker):
    told = await speaker.told(input=moves("half", {"raise": "secret"}))
    assert told[-1].name == "response.failed"
    assert told[-1].data["error"]["code"] == "model_error"
    assert "secret" not in json.dumps(told[-1].data)


async def test_a_stream_that_cannot_begin_is_a_problem_and_no_stream(speaker):
    reply = await speaker.ask(input=[said("word " * 200)], model="puppet-small", stream=True)
    await speaker.problem(reply, 400, "context_length_exceeded", "input")


async def test_a_cancelled_response_ends_with_its_own_event(speaker, client, hand, name):
    async with speaker.events(body={"input": moves("half", {"gate": name()}), "store": True}) as events:
        await events.until("response.output_text.delta")
        response_id = events.told[0].data["response_id"]
        assert (await client.cancel(response_id)).status == 200
        await events.items()
    assert events.told[-1].name == "response.cancelled"
    response = (await speaker.get(f"/responses/{response_id}")).json()
    assert (response["status"], response["incomplete_details"]) == ("cancelled", None)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_closes_stops_the_generation(speaker, hand, name, streamed):
    run = name()
    body = {"model": "puppet", "stream": streamed, "input": moves({"run": run}, {"forever": "on ", "every": 0.02})}
    async with speaker.open(body) as connection:
        await hand.seen(run, "started")
        if streamed:
            await connection.head()
        await connection.leave()
    await hand.seen(run, "ended")


async def test_there_are_neither_sockets_nor_compaction_nor_models(speaker):
    reply = await speaker.get("/responses")
    await speaker.problem(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    for method, path in (("POST", "/responses/compact"), ("GET", "/models")):
        reply = await speaker.request(method, path, json={"model": "puppet", "input": []})
        assert reply.status in (404, 405), "these would be ids"


# 6.4, ids and reconnection.


async def test_a_stream_of_a_response_belongs_to_its_connection(speaker):
    made = await speaker.made(input=moves("text"), store=True)
    again = await speaker.get(f"/responses/{made['id']}?stream=true&after=0", headers={"Last-Event-ID": "1"})
    assert again.json() == made


@pytest.mark.parametrize("by", ["query", "header"])
async def test_a_task_is_resumed_from_every_place_and_followed_to_its_end(speaker, hand, name, by):
    gates = [name(), name()]
    played = ["a ", {"gate": gates[0]}, "b ", call("f", {}), {"gate": gates[1]}, "c"]
    task = await speaker.task(input=moves(*played), tools=functions("f"))
    async with speaker.following(task["id"]) as first:
        await first.until("response.output_text.delta")
        known = first.told[-1].id
        async with speaker.following(task["id"], known, by=by) as second:
            await hand.open(gates[0])
            assert (await second.next()).id == known + 1
            await hand.open(gates[1])
            await second.rest()
        check_stream(await first.rest())
    assert second.told == first.told[known:]
    for place in range(len(first.told) + 3):
        async with speaker.following(task["id"], place, by=by) as again:
            assert await again.rest() == first.told[place:], f"after {place}"


CUTS = 50


async def test_a_task_that_is_cut_off_50_times_is_told_without_gap_and_without_repeat(speaker, hand, name):
    chance, gates = Random(name()), [name() for _ in range(CUTS)]
    played = [move for number, gate in enumerate(gates) for move in (f"{number} a ", f"{number} b ", {"gate": gate})]
    task = await speaker.task(input=moves(*played, call("f", {})), tools=functions("f"))
    told = []
    for number, gate in enumerate([*gates, None]):
        by = chance.choice(["query", "header"])
        async with speaker.following(task["id"], len(told), by=by) as events:
            if gate is None:
                told += await events.rest()
                break
            # There are two deltas more for each gate, behind the two events that begin a message.
            for _ in range(chance.randint(0, 4 + 2 * number - len(told))):
                told.append(await events.next())
            await events.connection.leave(reset=chance.random() < 0.5)
        await hand.open(gate)
    assert number == CUTS
    (message, _) = check_stream(told)
    assert message["content"][0]["text"] == "".join(move for move in played if isinstance(move, str))
    async with speaker.following(task["id"]) as events:
        assert await events.rest() == told


async def test_after_counts_before_last_event_id(speaker):
    task = await speaker.task(input=moves("a", "b"))
    await speaker.task_ended(task["id"])
    path = f"/tasks/{task['id']}/events?after=2"
    for known in ("5", "none"):
        async with speaker.events("GET", path, headers={"Last-Event-ID": known}) as events:
            assert [event.id for event in await events.rest()] == [3, 4, 5, 6]
    for query, headers, param in (("?after=x", {}, "after"), ("", {"Last-Event-ID": "x"}, "Last-Event-ID")):
        reply = await speaker.get(f"/tasks/{task['id']}/events{query}", headers=headers)
        await speaker.problem(reply, 400, "invalid_request", param)


@pytest.mark.clock
async def test_events_older_than_the_retention_are_gone_and_the_task_has_the_result(speaker, hand):
    task = await speaker.task(input=moves("a"))
    ended = await speaker.task_ended(task["id"])
    await hand.later(2 * 60 * 60)
    for path in ("/events", "/events?after=2"):
        reply = await speaker.get(f"/tasks/{task['id']}{path}")
        await speaker.problem(reply, 410, "event_history_expired")
    assert (await speaker.get(f"/tasks/{task['id']}")).json() == ended
    assert ended["response"]["output"][0]["content"][0]["text"] == "a"


async def test_a_task_goes_on_when_its_client_leaves_and_its_response_is_stored(speaker, hand, name):
    gate = name()
    task = await speaker.task(input=moves("half ", {"gate": gate}, "whole"))
    assert task["status"] == "in_progress"
    async with speaker.following(task["id"]) as events:
        await events.until("response.output_text.delta")
        await events.connection.leave()
    await hand.open(gate)
    ended = await speaker.task_ended(task["id"])
    assert ended["status"] == ended["response"]["status"] == "completed"
    assert ended["response"]["output"][0]["content"][0]["text"] == "half whole"
    assert (await speaker.get(f"/responses/{ended['response']['id']}")).json() == ended["response"]


async def test_a_task_is_cancelled_and_says_so(speaker, hand, name):
    run = name()
    task = await speaker.task(input=moves({"run": run}, "half", {"gate": name()}))
    await hand.seen(run, "started")
    async with speaker.following(task["id"]) as events:
        reply = await speaker.request("POST", f"/tasks/{task['id']}/cancel")
        assert (reply.status, reply.json()["status"]) == (200, "cancelled")
        await events.items()
    assert events.told[-1].name == "response.cancelled"
    await hand.seen(run, "ended")


# 6.5, tools.


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_call_arrives_whole_and_the_client_alone_runs_it(speaker, streamed):
    fields = {"input": moves(call("f", {"a": 1}), call("g", {})), "tools": functions("f", "g")}
    if streamed:
        async with speaker.events(body={**fields, "tool_choice": "required"}) as events:
            calls = await events.items()
        assert not [event for event in events.told if "arguments" in event.name]
    else:
        calls = (await speaker.made(**fields))["output"]
    assert [(item["name"], json.loads(item["arguments"])) for item in calls] == [("f", {"a": 1}), ("g", {})]


async def test_tools_that_the_server_would_run_are_refused(speaker):
    for kind in ("test:add", "web_search", "mcp"):
        reply = await speaker.ask(input=[said("hello")], tools=[{"type": kind, "name": "x"}])
        await speaker.problem(reply, 400, "invalid_request", "tools[0].type")


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "name": "f"}])
async def test_tool_choice_is_held_to(speaker, choice):
    fields = {"tools": functions("f", "g"), "tool_choice": choice}
    kept = await speaker.ask(input=moves(call("f", {}) if choice != "none" else "text"), **fields)
    assert kept.status == 200
    broken = {"none": call("f", {}), "auto": call("h", {}), "required": "text"}
    reply = await speaker.ask(input=moves(broken.get(str(choice), call("g", {}))), **fields)
    await speaker.problem(reply, 500, "tool_call_missing" if choice == "required" else "tool_not_allowed")


async def test_the_output_of_a_function_is_a_string(speaker):
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for output in ({"a": 1}, [{"type": "input_text", "text": "a"}], None, 1):
        items = [made, {"type": "function_call_output", "call_id": "c", "output": output}]
        await speaker.problem(await speaker.ask(input=items), 400, "invalid_request", "input[1].output")


# Headers.


async def test_every_answer_says_the_version_and_another_major_is_refused(speaker):
    for version in ("1.0", "1", "1.9"):
        await speaker.made(input=[said("hello")], headers={"LMSP-Version": version})
    for version in ("2.0", "0.9", "new"):
        reply = await speaker.ask(input=[said("hello")], headers={"LMSP-Version": version})
        await speaker.problem(reply, 400, "unsupported_version", "LMSP-Version")
    stranger = speaker.other("Bearer stranger")
    await stranger.problem(await stranger.ask(input=[said("hello")]), 401, "invalid_api_key")
    await speaker.problem(await speaker.get("/elsewhere"), 404, "not_found")
    await speaker.problem(await speaker.request("DELETE", "/tasks"), 405, "method_not_allowed")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_request_that_is_sent_again_with_its_key_is_generated_once(speaker, hand, name, streamed):
    run, gate = name(), name()
    fields = {"input": moves({"run": run}, "half ", {"gate": gate}, "whole"), "stream": streamed}
    headers, bodies = {"Idempotency-Key": name()}, []

    async def ask():
        reply = await speaker.ask(headers=headers, **fields)
        assert reply.status == 200
        bodies.append([block for block in reply.body.split(b"\n\n") if not block.startswith(b":")])

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
        await hand.seen(run, "started")
        await hand.open(gate)
    await ask()
    assert len(bodies) == 4
    assert all(body == bodies[0] for body in bodies)
    assert (await hand.record(run)).count("started") == 1
    reply = await speaker.ask(headers=headers, input=[said("another")])
    await speaker.problem(reply, 409, "idempotency_key_reused")
    reply = await speaker.ask(headers=headers, **{**fields, "store": False})
    await speaker.problem(reply, 400, "invalid_request", "store")


async def test_a_task_that_is_created_again_with_its_key_is_the_same(speaker, name):
    headers = {"Idempotency-Key": name()}
    tasks = [await speaker.task(input=moves("a"), headers=headers) for _ in range(3)]
    assert len({task["id"] for task in tasks}) == 1


# The draft's examples, replayed.


def without_ids(value):
    """The same with ids cut down to their prefixes, and times to nought."""
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


def usage(given, made):
    return {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}


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


async def test_the_example_of_a_response_is_replayed(speaker, name):
    headers = {"Authorization": "Bearer alice", "Idempotency-Key": name(), "LMSP-Version": "1.0"}
    reply = await speaker.request("POST", "/responses", json=DESCRIBE, headers=headers)
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
"""The draft's example of a stream; it does not show what was asked."""
IN_SHORT = DESCRIBE | {"input": [said("Describe a local model service in a few words.")], "stream": True}


async def test_the_example_of_a_stream_is_replayed(speaker):
    told = await speaker.told(**IN_SHORT)
    assert [event.id for event in told] == [1, 2, 3, 4, 5, 6]
    assert [(event.name, without_ids(event.data)) for event in told] == STREAMED


@pytest.mark.parametrize("by", ["query", "header"])
async def test_the_example_of_a_reconnection_is_replayed(speaker, by):
    task = await speaker.task(**IN_SHORT)
    async with speaker.following(task["id"], 2, by=by) as events:
        told = await events.rest()
    assert [event.id for event in told] == [3, 4, 5, 6]
    assert [(event.name, without_ids(event.data)) for event in told] == STREAMED[2:]


async def test_the_example_of_a_tool_call_is_replayed_with_its_second_turn(speaker):
    question = said("What is the weather in Hangzhou?")
    fields = {"model": QWEN, "tools": [WEATHER], "tool_choice": "auto"}
    response = await speaker.made(input=[question], **fields)
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
    (made,) = response["output"]
    output = {
        "type": "function_call_output",
        "call_id": made["call_id"],
        "output": '{"temperature_c":17,"condition":"light rain"}',
    }
    second = await speaker.made(input=[question, made, output], **fields)
    assert second["output"][0]["content"] == text_part('{"temperature_c":17,"condition":"light rain"}')


# One run, two dialects.


def _plain(response):
    """Text, items, usage and end of a response in either dialect, as far as both can say them."""
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


SAME = {
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
    "items of the backend's own": ["a", {"Item": {"type": "acme:thing", "fields": {"x": 1}}}, "b"],
    "a cut": ["half", {"Finish": {"reason": "max_output_tokens"}}],
    "a filter": ["half", {"Finish": {"reason": "content_filter"}}],
    "nothing": [],
}


@pytest.mark.parametrize("played", SAME.values(), ids=SAME)
async def test_the_same_run_says_the_same_in_both_dialects(speaker, client, played):
    fields = {"input": moves(*played), "tools": functions("f", "g"), "temperature": 0.5}
    theirs = await client.create(**fields)
    ours = await speaker.made(**fields, store=True)
    assert _plain(ours) == _plain(theirs)
    async with speaker.events(body=fields) as events:
        items = await events.items()
    assert _plain({**ours, "output": items}) == _plain(theirs)
    assert events.told[-1].name == f"response.{theirs['status']}"
    # And what one dialect has stored the other shows.
    assert _plain((await client.get(f"/responses/{ours['id']}")).json()) == _plain(ours)
    assert _plain((await speaker.get(f"/responses/{theirs['id']}")).json()) == _plain(theirs)
