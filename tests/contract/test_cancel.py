"""Cancellation in every mode, with every backend, at any moment, repeated and too late."""

from __future__ import annotations

import time

import anyio
import pytest

from tests.support.conformance import check_response, check_stream

from . import hosts
from .client import DEFAULT_TIMEOUT, Client, ControlClient, call, output_text, script
from .hosts import DISSIMILAR
from .test_disconnects import MODELS, stopped_soon

SERVED_BY = DISSIMILAR

pytestmark = [pytest.mark.anyio, pytest.mark.independent]

DONE = b"data: [DONE]"
ENDLESS_STEPS = {
    "waiting": [{"gate": "never"}],
    "emitting slowly": [{"forever": "on and on ", "every": 0.02}],
    # Single characters, so that the maximum text length is not reached before the cancellation.
    "emitting with checkpoints": [{"forever": "x", "every": 0.0}],
    "emitting without checkpoints": [{"often": "x", "times": 10**9}],
}


@pytest.fixture
def serial(start):
    """A client and the control of a kit that runs one background response at a time, on one host."""
    server = start(hosts.settings_host(), "serial")
    yield Client(server.port), ControlClient(server.control_port)
    server.check_log()


async def cancel_response(client, response_id, **more):
    """Cancel a response and return it; fail on an error."""
    reply = await client.cancel(response_id, **more)
    assert reply.status == 200, f"{reply.status}: {reply.body[:500]!r}"
    response = reply.json()
    check_response(response)
    assert (response["id"], response["status"]) == (response_id, "cancelled")
    assert (response["error"], response["completed_at"]) == (None, None)
    assert (await client.get(f"/responses/{response_id}")).json() == response
    return response


# Background responses.


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", ENDLESS_STEPS.values(), ids=ENDLESS_STEPS)
async def test_cancel_stops_backend_of_background_response(client, control, name, model, steps):
    run = name()
    created = await client.create(
        background=True, model=model, input=script({"run": run}, "hello ", {"mark": "reached"}, *steps)
    )
    await control.wait_for(run, "reached")
    requested_at = time.monotonic()
    response = await cancel_response(client, created["id"])
    note = await stopped_soon(control, run, requested_at)
    assert note["cancelled"] or note["how"] in ("GeneratorExit", "CancelledError")
    assert output_text(response).startswith("hello ")
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"
    assert (await client.get(f"/responses/{created['id']}")).json() == response


@pytest.mark.parametrize("model", MODELS)
async def test_follower_receives_cancelled_response(client, name, model):
    fields = {"model": model, "input": script("hello ", {"gate": "never"})}
    async with client.stream(background=True, **fields) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        async with client.follow(response_id) as all_of_it, client.follow(response_id, 2) as the_rest:
            response = await cancel_response(client, response_id)
            assert await stream.rest() == await all_of_it.rest() == response
            assert stream.events == all_of_it.events
            assert (await the_rest.blocks())[-1] == DONE
    assert stream.events[-1]["type"] == "response.incomplete"
    async with client.follow(response_id) as resumed:
        assert await resumed.rest() == response


@pytest.mark.parametrize("model", ["scripted-sync", "scripted-plain"])
async def test_cancel_abandons_unresponsive_backend(client, control, name, model):
    run = name()
    created = await client.create(
        background=True, model=model, input=script({"run": run}, {"mark": "blocked"}, {"block": 2.5})
    )
    await control.wait_for(run, "blocked")
    await cancel_response(client, created["id"], within=1)
    assert "ended" not in await control.trace(run)


async def test_queued_response_is_cancelled_without_running(serial, name):
    client, control = serial
    gate, run = name(), name()
    first = await client.create(background=True, input=script({"gate": gate}, "text"))
    await client.wait_for_status(first["id"], "in_progress")
    async with client.stream(background=True, input=script({"run": run}, "never")) as stream:
        created = (await stream.until("response.queued"))["response"]
        response = await cancel_response(client, created["id"])
        assert response["output"] == []
        assert await stream.rest() == response
    assert await cancel_response(client, created["id"]) == response
    async with client.follow(created["id"]) as resumed:
        assert await resumed.rest() == response
    await control.open_gate(gate)
    assert output_text(await client.wait_for_end(first["id"])) == "text"
    third = await client.create(background=True, input=script("third"))
    assert output_text(await client.wait_for_end(third["id"])) == "third"
    assert await control.trace(run) == []
    assert (await client.get(f"/responses/{created['id']}")).json() == response


async def test_cancelled_queued_response_frees_queue_place_within_one_second(serial, name):
    client, control = serial
    gate = name()
    first = await client.create(background=True, input=script({"gate": gate}, "text"))
    second = await client.create(background=True, input=script("never"))
    (await client.post(background=True, input=script("never"))).error(429)
    await cancel_response(client, second["id"])
    try:
        with anyio.fail_after(1.5):
            while True:
                reply = await client.post(background=True, input=script("third"))
                if reply.status != 429:
                    break
                await anyio.sleep(0.02)
    finally:
        await control.open_gate(gate)
    assert output_text(await client.wait_for_end(first["id"])) == "text"
    assert output_text(await client.wait_for_end(reply.json()["id"])) == "third"


async def test_cancelled_response_frees_slot_within_one_second(serial):
    client, _ = serial
    for _ in range(3):
        created = await client.create(background=True, input=script("hello ", {"gate": "never"}))
        await client.wait_for_status(created["id"], "in_progress")
        await cancel_response(client, created["id"], within=1)
        next_response = await client.create(background=True, input=script("next"))
        assert output_text(await client.wait_for_end(next_response["id"], within=1)) == "next"


async def test_response_is_cancelled_immediately_after_creation(client, control, name):
    # The cancellation arrives before, during or after the start of the backend.
    for _ in range(20):
        run = name()
        created = await client.create(background=True, input=script({"run": run}, "hello", {"gate": "never"}))
        response = await cancel_response(client, created["id"])
        assert output_text(response) in ("", "hello")
        if "started" in await control.trace(run):
            await control.wait_for(run, "ended", within=1)


async def test_hosted_tool_is_cancelled_with_its_response(client, control, name):
    for tool in ("wait", "thread"):
        run = name()
        created = await client.create(
            background=True, input=script(call(tool, {"run": run})), tools=[{"type": f"test:{tool}"}]
        )
        await control.wait_for(run, "tool started")
        await cancel_response(client, created["id"], within=1)
        await control.wait_for(run, "tool ended", within=1)


# Foreground responses, from another connection.


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", ENDLESS_STEPS.values(), ids=ENDLESS_STEPS)
async def test_cancelled_stream_has_legal_end(client, control, name, model, steps):
    run = name()
    async with client.stream(model=model, input=script({"run": run}, "hello ", *steps)) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        requested_at = time.monotonic()
        result = {}

        async def cancel():
            result["response"] = await cancel_response(client, response_id)

        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            final = await stream.rest()
        note = await stopped_soon(control, run, requested_at)
    assert note["cancelled"] or note["how"] in ("GeneratorExit", "CancelledError")
    assert final == result["response"]
    assert stream.events[-1]["type"] == "response.incomplete"
    assert output_text(final).startswith("hello ")
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", ENDLESS_STEPS.values(), ids=ENDLESS_STEPS)
async def test_caller_receives_partial_output_of_cancelled_response(client, control, name, model, steps):
    run = name()
    body = {"model": model, "input": script({"run": run}, "hello ", {"mark": "reached"}, *steps)}
    async with client.open_request(body) as connection:
        response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
        await control.wait_for(run, "reached")
        requested_at = time.monotonic()
        response = await cancel_response(client, response_id)
        with anyio.fail_after(DEFAULT_TIMEOUT):
            status, _ = await connection.head()
            body = await connection.body()
        await stopped_soon(control, run, requested_at)
    assert status == 200
    assert body == (await client.get(f"/responses/{response_id}")).body
    assert output_text(response).startswith("hello ")


@pytest.mark.parametrize("model", ["scripted-sync", "scripted-plain"])
async def test_stream_of_unresponsive_backend_is_cancelled(client, control, name, model):
    run = name()
    steps = [{"run": run}, {"mark": "blocked"}, {"block": 2.5}]
    async with client.stream(model=model, input=script(*steps)) as stream:
        created = await stream.until("response.created")
        await control.wait_for(run, "blocked")
        response = await cancel_response(client, created["response"]["id"], within=1)
        assert await stream.rest() == response
    assert "ended" not in await control.trace(run)


async def test_unread_stream_is_cancelled(client, control, name):
    run = name()
    async with client.stream(input=script({"run": run}, {"often": "x" * 2_000, "times": 10**9})) as stream:
        created = await stream.until("response.created")
        stream.connection.shrink_receive_buffer()
        with pytest.raises(AssertionError, match="no 'ended'"):  # until all buffers are full
            await control.wait_for(run, "ended", within=0.5)
        requested_at = time.monotonic()
        response = await cancel_response(client, created["response"]["id"])
        await stopped_soon(control, run, requested_at)
        while await stream.next():
            pass
    # Events that were not sent in time may be missing at the end, but nowhere else.
    numbers = [event["sequence_number"] for event in stream.events]
    assert numbers == list(range(len(numbers)))
    assert "error" not in {event["type"] for event in stream.events}
    if stream.done:
        assert check_stream(stream.events) == response


@pytest.mark.websockets
async def test_websocket_survives_cancellation_of_its_response(client, control, name):
    run = name()
    async with client.websocket() as socket:
        await socket.send_request(
            input=script({"run": run}, "hello", {"mark": "reached"}, {"gate": "never"}), store=True
        )
        await control.wait_for(run, "reached")
        response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
        requested_at = time.monotonic()
        response = await cancel_response(client, response_id)
        assert await socket.read_response() == response
        await stopped_soon(control, run, requested_at)
        assert output_text(await socket.complete(input=script("text"))) == "text"


async def test_unstored_response_cannot_be_cancelled(client, control, name):
    gate = name()
    async with client.stream(store=False, input=script({"gate": gate}, "text")) as stream:
        created = await stream.until("response.created")
        (await client.cancel(created["response"]["id"])).error(404, "response_not_found")
        await control.open_gate(gate)
        assert output_text(await stream.rest()) == "text"


# Repeated and late cancellations.


@pytest.mark.parametrize("background", [True, False])
async def test_cancel_is_idempotent(client, background):
    async with client.stream(background=background, input=script("hello", {"gate": "never"})) as stream:
        response_id = (await stream.until("response.created"))["response"]["id"]
        replies = []

        async def cancel():
            replies.append(await client.cancel(response_id))

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(cancel)
        final = await stream.rest()
    replies.append(await client.cancel(response_id))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1
    assert replies[0].json() == final


ENDINGS = {
    "completed": ["text"],
    "incomplete": ["half", {"Finish": {"reason": "max_output_tokens"}}],
    "failed": ["half", {"raise": "no"}],
}


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_cancel_refuses_finished_response(client, ending, background):
    async with client.stream(background=background, input=script(*ENDINGS[ending])) as stream:
        final = await stream.rest()
    assert final["status"] == ending
    for _ in range(2):
        (await client.cancel(final["id"])).error(400, "response_already_ended")
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_response_ends_once_if_it_finishes_during_cancellation(client, control, name):
    for _ in range(10):
        gate = name()
        async with client.stream(background=True, input=script("half", {"gate": gate}, " whole")) as stream:
            await stream.until("response.output_text.delta")
            response_id = stream.events[0]["response"]["id"]
            async with anyio.create_task_group() as group:
                group.start_soon(control.open_gate, gate)
                reply = await client.cancel(response_id)
            final = await stream.rest()
        if reply.status == 200:
            assert reply.json() == final
            assert final["status"] == "cancelled"
        else:
            reply.error(400, "response_already_ended")
            assert final["status"] == "completed"
        assert (await client.get(f"/responses/{response_id}")).json() == final


async def test_cancel_returns_404_for_unknown_id(client):
    deleted = await client.create(input=script("text"))
    await client.delete(f"/responses/{deleted['id']}")
    for response_id in ("resp_of_nobody", deleted["id"], "%20", "x" * 3000):
        (await client.cancel(response_id)).error(404)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (None, {}),
        (b"", {}),
        (b"{}", {}),
        (b"null", {"Content-Type": "application/json; charset=utf-8"}),
        (b"{", {}),
        (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}),
        (b"x" * 100_000, {"Content-Type": "text/plain"}),
        (b"{}", {"Content-Encoding": "br"}),
    ],
)
@pytest.mark.parametrize("slash", ["", "/"])
async def test_cancel_ignores_request_body(client, body, headers, slash):
    created = await client.create(background=True, input=script("hello", {"gate": "never"}))
    path = f"/responses/{created['id']}/cancel{slash}"
    reply = await client.request("POST", path, body, headers=headers)
    assert (reply.status, reply.json()["status"]) == (200, "cancelled")
    reply = await client.request("POST", path, body, headers=headers, chunked=body is not None)
    assert (reply.status, reply.json()["status"]) == (200, "cancelled")


async def test_connection_is_reused_after_ignored_body(client):
    created = await client.create(background=True, input=script("hello", {"gate": "never"}))
    async with client.connect() as connection:
        for _ in range(3):
            path = f"{client.prefix}/responses/{created['id']}/cancel"
            await connection.send_bytes(client.request_bytes(connection, "POST", path, b"x" * 10_000, {}))
            with anyio.fail_after(DEFAULT_TIMEOUT):
                assert (await connection.head())[0] == 200
                await connection.body()
            connection.next_cycle()


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
async def test_cancel_requires_post(client, control, name, method):
    gate = name()
    created = await client.create(background=True, input=script({"gate": gate}, "text"))
    reply = await client.request(method, f"/responses/{created['id']}/cancel")
    reply.error(405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    await control.open_gate(gate)
    assert (await client.wait_for_end(created["id"]))["status"] == "completed"


# After the cancellation.


@pytest.mark.parametrize("background", [True, False])
async def test_cancelled_response_can_be_continued(client, background):
    async with client.stream(background=background, input=script("half", {"gate": "never"})) as stream:
        await stream.until("response.output_text.delta")
        response = await cancel_response(client, stream.events[0]["response"]["id"])
    turn = await client.describe_turn(input="go on", previous_response_id=response["id"])
    assert [message["content"] for message in turn["messages"]][1:] == ["half", "go on"]


async def test_cancelled_response_is_deleted_once(client):
    created = await client.create(background=True, input=script("half", {"gate": "never"}))
    await cancel_response(client, created["id"])
    assert (await client.delete(f"/responses/{created['id']}")).status == 200
    (await client.delete(f"/responses/{created['id']}")).error(404, "response_not_found")
    (await client.cancel(created["id"])).error(404, "response_not_found")


async def test_cancel_does_not_affect_other_responses(client, control, name):
    gate = name()
    async with client.stream(input=script("one ", {"gate": gate}, "two")) as stays:
        await stays.until("response.output_text.delta")
        behind = await client.create(background=True, input=script("one ", {"gate": gate}, "two"))
        goes = await client.create(background=True, input=script("one ", {"gate": gate}, "two"))
        await cancel_response(client, goes["id"])
        await control.open_gate(gate)
        assert output_text(await stays.rest()) == "one two"
    assert output_text(await client.wait_for_end(behind["id"])) == "one two"
