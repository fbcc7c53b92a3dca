"""Disconnects: generation stops within a second in every mode, with every backend and host."""

from __future__ import annotations

import time

import anyio
import pytest

from tests.support.conformance import check_response

from . import hosts
from .client import output_text, script

pytestmark = pytest.mark.anyio

SERVED_BY = [*hosts.DEFAULT_HOSTS, hosts.DJANGO_WSGI]

MODELS = ["scripted", "scripted-sync"]
ENDLESS_STEPS = {
    "waiting": [{"gate": "never"}],
    "emitting slowly": [{"forever": "on and on ", "every": 0.02}],
    "emitting with checkpoints": [{"forever": "x" * 50, "every": 0.0}],
    "emitting without checkpoints": [{"often": "x" * 50, "times": 10**9}],
}


async def stopped_soon(control, run, disconnected_at):
    note = await control.wait_for(run, "ended", within=5)
    # Both processes read the same monotonic clock. The goal is one second; parallel tests need more.
    assert note["at"] - disconnected_at < 3.0, f"generation went on for {note['at'] - disconnected_at:.1f} s"
    return note


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", ENDLESS_STEPS.values(), ids=ENDLESS_STEPS)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_disconnect_from_stream_stops_backend(client, control, name, model, steps, reset):
    run = name()
    async with client.stream(model=model, input=script({"run": run}, "hello ", *steps)) as stream:
        await stream.until("response.output_text.delta")
        disconnected_at = time.monotonic()
        await stream.connection.disconnect(reset=reset)
        note = await stopped_soon(control, run, disconnected_at)
    assert note["cancelled"] or note["how"] in ("GeneratorExit", "CancelledError")
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", ENDLESS_STEPS.values(), ids=ENDLESS_STEPS)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_disconnect_before_answer_stops_backend(client, control, name, model, steps, reset):
    run = name()
    async with client.open_request(
        {"model": model, "input": script({"run": run}, {"mark": "reached"}, "hello ", *steps)}
    ) as connection:
        await control.wait_for(run, "reached")
        disconnected_at = time.monotonic()
        await connection.disconnect(reset=reset)
        await stopped_soon(control, run, disconnected_at)
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", MODELS)
async def test_record_is_final_after_disconnect_from_stream(client, control, name, model):
    run = name()
    async with client.stream(model=model, input=script({"run": run}, "hello", {"gate": "never"})) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        await stream.connection.disconnect()
    await control.wait_for(run, "ended")
    with anyio.fail_after(2):
        while (stored := (await client.get(f"/responses/{response_id}")).json())["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    check_response(stored)
    assert stored["status"] in ("cancelled", "incomplete", "failed")
    assert output_text(stored) == "hello"


@pytest.mark.parametrize("model", MODELS)
async def test_record_is_final_after_disconnect_before_answer(client, control, name, model):
    run = name()
    async with client.open_request(
        {"model": model, "input": script({"run": run}, "hello", {"gate": "never"})}
    ) as connection:
        response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
        await connection.disconnect()
    await control.wait_for(run, "ended")
    with anyio.fail_after(2):
        while (stored := (await client.get(f"/responses/{response_id}")).json())["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    check_response(stored)
    assert stored["status"] in ("cancelled", "incomplete", "failed")


@pytest.mark.independent
@pytest.mark.parametrize("model", ["scripted-sync", "scripted-plain"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_record_is_final_despite_unresponsive_backend(client, control, name, model, streamed):
    run = name()
    steps = [{"run": run}, {"mark": "blocked"}, {"block": 2.5}]
    async with client.open_request({"model": model, "stream": streamed, "input": script(*steps)}) as connection:
        response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
        await control.wait_for(run, "blocked")
        await connection.disconnect()
    with anyio.fail_after(1):
        while (await client.get(f"/responses/{response_id}")).json()["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    assert "ended" not in await control.trace(run)


@pytest.mark.parametrize("model", MODELS)
async def test_backend_without_awaits_does_not_block_server(client, control, name, model):
    run = name()
    body = {"model": model, "input": script({"run": run}, {"often": "x", "times": 10**9}), "store": False}
    async with client.open_request(body) as connection:
        await control.wait_for(run, "started")
        for _ in range(3):
            started = time.monotonic()
            assert output_text(await client.create(model=model, input=script("quick"))) == "quick"
            assert time.monotonic() - started < 3.0
        await connection.disconnect()
        await control.wait_for(run, "ended")


@pytest.mark.parametrize("model", MODELS)
async def test_many_disconnects_free_their_slots(client, control, name, model):
    # More than any pool of threads or slots has.
    for _ in range(3):
        runs = [name() for _ in range(30)]

        async def connect_and_disconnect(run):
            async with client.stream(model=model, input=script({"run": run}, "hello", {"gate": "never"})) as stream:
                await stream.until("response.output_text.delta")

        async with anyio.create_task_group() as group:
            for run in runs:
                group.start_soon(connect_and_disconnect, run)
        for run in runs:
            await control.wait_for(run, "ended")
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"


async def test_disconnect_does_not_affect_other_responses(client, control, name):
    gate, run = name(), name()
    async with client.stream(input=script("one ", {"gate": gate}, "two")) as stays:
        await stays.until("response.output_text.delta")
        async with client.stream(input=script({"run": run}, "one ", {"gate": "never"})) as leaves:
            await leaves.until("response.output_text.delta")
        await control.wait_for(run, "ended")
        await control.open_gate(gate)
        assert output_text(await stays.rest()) == "one two"


async def test_disconnect_during_upload_is_harmless(client):
    async with client.connect() as connection:
        head = client.request_bytes(connection, "POST", "/v1/responses", b"x" * 100, {})[:-60]
        await connection.send_bytes(head)
        await connection.disconnect()
    assert output_text(await client.create(input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", MODELS)
async def test_slow_reader_gets_backpressure_and_all_events(client, control, name, model):
    # More than sockets and queues hold, so that the backend cannot finish while the client does not read.
    run, piece, times = name(), "x" * 2_000, 5_000
    steps = [{"run": run}, {"often": piece, "times": times}, {"mark": "all sent"}, "end"]
    async with client.stream(model=model, input=script(*steps), store=False) as stream:
        stream.connection.shrink_receive_buffer()
        await control.wait_for(run, "started")
        with pytest.raises(AssertionError, match="no 'all sent'"):
            await control.wait_for(run, "all sent", within=0.5)
        while (await stream.next()).get("delta") != "end":
            pass
    assert len(stream.text()) == times * len(piece) + 3
