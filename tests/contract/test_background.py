"""Background responses: queued at once, generated despite disconnects, and retrieved by id."""

from __future__ import annotations

import anyio
import pytest

from tests.support.conformance import check_response

from . import hosts
from .client import DEFAULT_TIMEOUT, Client, ControlClient, call, functions, output_text, script
from .hosts import DISSIMILAR
from .test_disconnects import MODELS

SERVED_BY = DISSIMILAR

pytestmark = [pytest.mark.anyio, pytest.mark.independent]

ASK = {"role": "user", "content": "what do you see?"}


@pytest.fixture
def serial(start):
    """A client and the control of a kit that runs one background response at a time, on one host."""
    server = start(hosts.settings_host(), "serial")
    yield Client(server.port), ControlClient(server.control_port)
    server.check_log()


async def create_queued(client, **fields):
    """Create a background response and check that it is queued."""
    response = await client.create(background=True, **fields)
    assert (response["status"], response["background"], response["store"]) == ("queued", True, True)
    assert (response["output"], response["error"], response["completed_at"]) == ([], None, None)
    return response


@pytest.mark.parametrize("model", MODELS)
async def test_background_response_is_queued_generated_and_completed(client, control, name, model):
    gate, run = name(), name()
    steps = [{"run": run}, "half", {"gate": gate}, " whole"]
    first = await create_queued(client, model=model, input=script(*steps), metadata={"a": "b"})
    # The reply did not wait for the backend, which is blocked at its gate.
    assert (await control.wait_for(run, "started"))["turn"]["response_id"] == first["id"]
    under_way = await client.wait_for_status(first["id"], "in_progress")
    assert (under_way["id"], under_way["created_at"]) == (first["id"], first["created_at"])
    await control.open_gate(gate)
    final = await client.wait_for_end(first["id"])
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert {**final, **{key: first[key] for key in ("status", "output", "completed_at", "usage")}} == first
    assert (await control.wait_for(run, "ended"))["how"] == "returned"
    assert (await client.get(f"/responses/{first['id']}")).json() == final


@pytest.mark.parametrize("model", MODELS)
async def test_background_stream_starts_with_queued_event(client, control, name, model):
    gate = name()
    async with client.stream(background=True, model=model, input=script("half", {"gate": gate}, " whole")) as stream:
        await stream.until("response.output_text.delta")
        await control.open_gate(gate)
        final = await stream.rest()
        first_events = [(event["type"], event["response"]["status"]) for event in stream.events[:3]]
    assert first_events == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert (await client.get(f"/responses/{final['id']}")).json() == final


@pytest.mark.parametrize("model", MODELS)
async def test_background_stream_sends_each_delta_before_the_next_is_generated(client, control, name, model):
    gates = [name() for _ in range(5)]
    steps = [step for gate in gates for step in (f"to {gate} ", {"gate": gate})]
    async with client.stream(background=True, model=model, input=script(*steps)) as stream:
        for gate in gates:
            assert (await stream.until("response.output_text.delta"))["delta"] == f"to {gate} "
            await control.open_gate(gate)
        await stream.rest()


async def test_background_response_equals_foreground_response(client, stream):
    fields = {
        "input": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "tell"}],
        "instructions": "Speak Latin.",
        "tools": functions("f", description="F.", parameters={"type": "object", "properties": {}}, strict=True),
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "max_tool_calls": 2,
        "max_output_tokens": 999,
        "temperature": 0.5,
        "top_p": 0.25,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto",
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    fields["input"][1]["content"] = script(
        {"Reasoning": {"text": "Hm."}}, {"ReasoningSummary": {"text": "h"}}, call("f", {})
    )
    in_front = await client.complete(stream, **fields)
    async with client.stream(background=True, **fields) as following:
        behind = await following.rest()
    for response in (in_front, behind):
        for changing in ("id", "created_at", "completed_at", "background"):
            del response[changing]
        for item in response["output"]:
            del item["id"]
            item.pop("call_id", None)
            item.pop("encrypted_content", None)
    assert behind == in_front


async def test_background_turn_equals_foreground_turn(client, control, name):
    previous = await client.create(input="before", tools=functions("f"))
    runs = [name(), name()]
    for run, background in zip(runs, (False, True), strict=True):
        response = await client.create(
            background=background,
            input=[ASK, {"role": "user", "content": script({"run": run}, "{}")}],
            previous_response_id=previous["id"],
            tools=functions("f"),
            instructions="Be brief.",
            metadata={"a": "b"},
            temperature=0.5,
            text={"format": {"type": "json_object"}},
        )
        await client.wait_for_end(response["id"])
    front, behind = [(await control.wait_for(run, "started"))["turn"] for run in runs]
    for turn in (front, behind):
        del turn["response_id"]
        for item in turn["items"][-2:]:
            del item["id"]
        for key in ("items", "messages"):
            (turn[key][-1]["content"], *_) = [None]  # the script, which names the run
    assert behind == front


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("model", MODELS)
async def test_background_response_survives_disconnect_of_its_stream(client, control, name, model, reset):
    gate, run = name(), name()
    steps = [{"run": run}, "half", {"gate": gate}, " whole"]
    async with client.stream(background=True, model=model, input=script(*steps)) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        await stream.connection.disconnect(reset=reset)
    # A foreground response would have been cancelled by now.
    with pytest.raises(AssertionError, match="no 'ended'"):
        await control.wait_for(run, "ended", within=1.5)
    assert (await client.get(f"/responses/{response_id}")).json()["status"] == "in_progress"
    await control.open_gate(gate)
    final = await client.wait_for_end(response_id)
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert (await control.wait_for(run, "ended"))["how"] == "returned"


async def test_background_response_is_generated_after_immediate_disconnect(client, control, name):
    run = name()
    async with client.open_request({"background": True, "input": script({"run": run}, "text")}) as connection:
        response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
        await connection.disconnect()
    assert output_text(await client.wait_for_end(response_id)) == "text"


async def test_background_response_is_not_delayed_by_unread_stream(client, control, name):
    run, piece, times = name(), "x" * 10_000, 400
    steps = [{"run": run}, {"often": piece, "times": times}, {"mark": "all sent"}, "end"]
    async with client.stream(background=True, input=script(*steps)) as stream:
        stream.connection.shrink_receive_buffer()
        await control.wait_for(run, "all sent", within=DEFAULT_TIMEOUT)
        final = await stream.rest()
    assert len(output_text(final)) == times * len(piece) + 3


async def test_background_is_refused_with_store_false(client, stream):
    reply = await client.post(stream=stream, background=True, store=False, input="hi")
    reply.error(400, param="background")


@pytest.mark.parametrize("value", ["yes", 1, {}, []])
async def test_background_must_be_boolean(client, value):
    (await client.post(background=value, input="hi")).error(400, param="background")


async def test_invalid_background_request_is_refused_before_queueing(client, stream):
    for fields, code, param in [
        ({"model": "nobody", "input": "hi"}, "model_not_found", "model"),
        ({"input": "hi", "previous_response_id": "resp_x"}, "previous_response_not_found", "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "item_not_found", "input[0].id"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": "hi", "temperature": 99}, "invalid_request", "temperature"),
    ]:
        (await client.post(stream=stream, background=True, **fields)).error(400, code, param)
    (await client.with_key("Bearer stranger").post(stream=stream, background=True, input="hi")).error(401)


async def test_input_items_are_available_during_generation(client, control, name):
    gate = name()
    items = [ASK, {"role": "user", "content": script({"gate": gate}, "text")}]
    first = await create_queued(client, input=items)
    path = f"/responses/{first['id']}/input_items?order=asc"
    page = (await client.get(path)).json()
    assert [item["content"][0]["text"] for item in page["data"]] == [item["content"] for item in items]
    await client.wait_for_status(first["id"], "in_progress")
    assert (await client.get(path)).json() == page
    await control.open_gate(gate)
    await client.wait_for_end(first["id"])
    assert (await client.get(path)).json() == page


async def test_background_response_cannot_be_continued_while_in_progress(client, control, name, stream):
    gate = name()
    first = await create_queued(client, input=script({"gate": gate}, "text"))
    for _ in range(2):  # first queued or in progress, then in progress
        for background in (False, True):
            reply = await client.post(
                stream=stream, background=background, input="on", previous_response_id=first["id"]
            )
            reply.error(400, "previous_response_in_progress", "previous_response_id")
        await client.wait_for_status(first["id"], "in_progress")
    await control.open_gate(gate)
    await client.wait_for_end(first["id"])
    turn = await client.describe_turn(stream, input="on", previous_response_id=first["id"])
    assert [message["content"] for message in turn["messages"]][1:] == ["text", "on"]


async def test_foreground_response_cannot_be_continued_while_in_progress(client, control, name):
    gate = name()
    async with client.stream(input=script("text", {"gate": gate})) as stream:
        created = (await stream.until("response.created"))["response"]
        reply = await client.post(input="on", previous_response_id=created["id"])
        reply.error(400, "previous_response_in_progress", "previous_response_id")
        await control.open_gate(gate)
        await stream.rest()


async def test_background_responses_form_conversation(client):
    previous = None
    for turn in range(3):
        items = [{"role": "user", "content": f"question {turn}"}, {"role": "user", "content": script(f"answer {turn}")}]
        response = await create_queued(client, input=items, previous_response_id=previous)
        assert response["previous_response_id"] == previous
        previous = response["id"]
        await client.wait_for_end(previous)
    seen_turn = await client.describe_turn(input="and now?", previous_response_id=previous)
    texts = [message["content"] for message in seen_turn["messages"] if not message["content"].startswith("[")]
    assert texts == [
        *(text for turn in range(3) for text in (f"question {turn}", f"answer {turn}")),
        "and now?",
    ]


# Outcomes.


@pytest.mark.parametrize("model", MODELS)
async def test_background_failure_is_reported_without_secrets(client, model):
    first = await create_queued(client, model=model, input=script("half", {"raise": "hunter2"}))
    final = await client.wait_for_end(first["id"])
    assert (final["status"], final["error"]["code"], output_text(final)) == ("failed", "model_error", "half")
    async with client.stream(background=True, model=model, input=script("half", {"raise": "hunter2"})) as stream:
        turn = await stream.rest()
    assert (turn["status"], turn["error"]) == ("failed", final["error"])
    assert b"hunter2" not in b"".join(stream.chunks)


async def test_background_response_fails_if_backend_refuses_admission(client, control, name):
    gate = name()
    await control.open_gate(gate)
    final = await client.wait_for_end((await create_queued(client, input=script({"full": gate})))["id"])
    assert (final["status"], final["error"]["code"], final["output"]) == ("failed", "too_many_requests", [])
    async with client.stream(background=True, input=script({"full": gate})) as stream:
        assert (await stream.rest())["error"] == final["error"]


async def test_truncated_background_response_is_incomplete(client):
    finish = {"Finish": {"reason": "max_output_tokens"}}
    final = await client.wait_for_end((await create_queued(client, input=script("half", finish)))["id"])
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_background_response_calls_functions_and_accepts_outputs(client):
    tools = functions("f")
    first = await create_queued(client, input=script(call("f", {"a": 1}, call_id="call_1")), tools=tools)
    final = await client.wait_for_end(first["id"])
    assert final["output"][0]["call_id"] == "call_1"
    turn = await client.describe_turn(
        input=[{"type": "function_call_output", "call_id": "call_1", "output": "2"}, ASK],
        previous_response_id=first["id"],
        tools=tools,
    )
    assert [item["type"] for item in turn["items"]] == ["message", "function_call", "function_call_output", "message"]


async def test_hosted_tools_run_in_background(client):
    steps = [{"rounds": [[call("add", {"a": 1, "b": 2})], ["three"]]}]
    async with client.stream(background=True, input=script(*steps), tools=[{"type": "test:add"}]) as stream:
        final = await stream.rest()
    assert (final["status"], output_text(final)) == ("completed", "three")
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_background_request_fails_if_store_refuses_it(client, stream):
    reply = await client.post(stream=stream, background=True, input="hi", metadata={"store": "no create"})
    reply.error(500, "store_error")
    assert b"hunter2" not in reply.body


async def test_background_response_fails_if_store_fails_during_generation(client):
    request = {"background": True, "input": script("lost"), "metadata": {"store": "no update"}}
    async with client.stream(**request) as stream:
        with anyio.fail_after(DEFAULT_TIMEOUT):
            final = await stream.rest()
    assert final["status"] == "failed"
    assert b"hunter2" not in b"".join(stream.chunks)
    first = (await client.post(**request)).json()
    with anyio.fail_after(DEFAULT_TIMEOUT):
        while True:
            reply = await client.get(f"/responses/{first['id']}")
            if reply.status == 404 or reply.json()["status"] == "failed":
                break
            await anyio.sleep(0.01)


async def test_background_record_is_final_before_terminal_event(client):
    async with client.stream(background=True, input=script("text"), metadata={"store": "late"}) as stream:
        await stream.until("response.completed")
        terminal = stream.events[-1]["response"]
        assert (await client.get(f"/responses/{terminal['id']}")).json() == terminal
        turn = await client.describe_turn(input="on", previous_response_id=terminal["id"])
    assert turn["messages"][1]["content"] == "text"


# Concurrency.


@pytest.mark.parametrize("model", MODELS)
async def test_queued_background_responses_all_finish(client, model):
    firsts = {}

    async def create_one(number):
        firsts[number] = await create_queued(client, model=model, input=script(f"{number}"))

    with anyio.fail_after(2 * DEFAULT_TIMEOUT):
        async with anyio.create_task_group() as group:
            for number in range(80):
                group.start_soon(create_one, number)
        for number, first in firsts.items():
            assert output_text(await client.wait_for_end(first["id"])) == f"{number}"


async def test_background_response_waits_for_free_place(serial, name):
    client, control = serial
    gates, runs = [name(), name()], [name(), name()]
    first, second = [
        await create_queued(client, input=script({"run": run}, {"gate": gate}, run))
        for run, gate in zip(runs, gates, strict=True)
    ]
    await client.wait_for_status(first["id"], "in_progress")
    waiting = (await client.get(f"/responses/{second['id']}")).json()
    check_response(waiting)
    assert waiting == second
    assert await control.trace(runs[1]) == []
    page = (await client.get(f"/responses/{second['id']}/input_items")).json()
    assert len(page["data"]) == 1
    (await client.post(input="on", previous_response_id=second["id"])).error(400, "previous_response_in_progress")
    async with client.follow(second["id"]) as stream:
        await stream.until("response.queued")
        await control.open_gate(gates[0])
        await stream.until("response.in_progress")
        assert output_text(await client.wait_for_end(first["id"])) == runs[0]
        await control.open_gate(gates[1])
        assert output_text(await stream.rest()) == runs[1]


async def test_full_queue_refuses_and_stores_nothing(serial, name):
    client, control = serial
    gate, run = name(), name()
    waiting = [await create_queued(client, input=script({"gate": gate}, "text")) for _ in range(2)]
    for stream in (False, True):
        reply = await client.post(background=True, stream=stream, input=script({"run": run}, "never"))
        reply.error(429, "too_many_requests")
        assert int(reply.headers["retry-after"]) >= 1
    assert output_text(await client.create(input=script("in the foreground"))) == "in the foreground"
    await control.open_gate(gate)
    for first in waiting:
        assert output_text(await client.wait_for_end(first["id"])) == "text"
    assert (
        output_text(await client.wait_for_end((await create_queued(client, input=script("room again")))["id"]))
        == "room again"
    )
    assert await control.trace(run) == []


# Deletion.


@pytest.mark.parametrize("model", MODELS)
async def test_deleting_background_response_stops_it(client, control, name, model):
    run = name()
    first = await create_queued(client, model=model, input=script({"run": run}, "half", {"gate": "never"}))
    await control.wait_for(run, "started")
    path = f"/responses/{first['id']}"
    reply = await client.delete(path)
    assert (reply.status, reply.json()) == (200, {"id": first["id"], "object": "response", "deleted": True})
    note = await control.wait_for(run, "ended", within=1)
    assert note["cancelled"] or note["how"] in ("GeneratorExit", "CancelledError")
    for what in ("", "/input_items", "?stream=true"):
        (await client.get(path + what)).error(404, "response_not_found")
    (await client.cancel(first["id"])).error(404, "response_not_found")
    (await client.delete(f"/responses/{first['id']}")).error(404, "response_not_found")
    (await client.post(input="on", previous_response_id=first["id"])).error(400, "previous_response_not_found")


async def test_deleted_queued_response_is_never_generated(serial, name):
    client, control = serial
    gate, run = name(), name()
    first = await create_queued(client, input=script({"gate": gate}, "text"))
    await client.wait_for_status(first["id"], "in_progress")
    second = await create_queued(client, input=script({"run": run}, "never"))
    assert (await client.delete(f"/responses/{second['id']}")).status == 200
    (await client.get(f"/responses/{second['id']}")).error(404, "response_not_found")
    await control.open_gate(gate)
    assert output_text(await client.wait_for_end(first["id"])) == "text"
    assert output_text(await client.wait_for_end((await create_queued(client, input=script("third")))["id"])) == "third"
    assert await control.trace(run) == []
    (await client.get(f"/responses/{second['id']}")).error(404, "response_not_found")


async def test_follower_receives_end_of_deleted_running_response(client, control, name):
    gate = name()
    async with client.stream(background=True, input=script("half", {"gate": gate}, " whole")) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        assert (await client.delete(f"/responses/{response_id}")).status == 200
        final = await stream.rest()
    assert final["status"] in ("cancelled", "failed")
    await control.open_gate(gate)
    (await client.get(f"/responses/{response_id}")).error(404, "response_not_found")


async def test_follower_receives_end_of_deleted_queued_response(serial, name):
    client, control = serial
    gate = name()
    first = await create_queued(client, input=script({"gate": gate}, "text"))
    await client.wait_for_status(first["id"], "in_progress")
    async with client.stream(background=True, input=script("never")) as stream:
        await stream.until("response.queued")
        assert (await client.delete(f"/responses/{stream.events[0]['response']['id']}")).status == 200
        final = await stream.rest()
    assert final["status"] in ("cancelled", "failed")
    await control.open_gate(gate)
    assert output_text(await client.wait_for_end(first["id"])) == "text"
