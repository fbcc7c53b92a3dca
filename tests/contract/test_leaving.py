"""Clients that leave: whatever the mode, the backend and what stands between, generation stops within a second."""

from __future__ import annotations

import time

import anyio
import pytest

from tests.support.conformance import check_response

from . import hosts
from .client import output_text, script

pytestmark = pytest.mark.anyio

SERVED_BY = [*hosts.EVERYDAY, hosts.DJANGO_WSGI]

KINDS = ["puppet", "puppet-sync"]
WAYS = {
    "while it waits": [{"gate": "never"}],
    "while it talks": [{"forever": "on and on ", "every": 0.02}],
    "while it talks and yields the loop": [{"forever": "x" * 50, "every": 0.0}],
    "while it talks and never waits": [{"often": "x" * 50, "times": 10**9}],
}


async def stopped_soon(hand, run, left):
    note = await hand.seen(run, "ended", within=5)
    # Both processes read the same monotonic clock.
    # A second is the aim; where tests run side by side, each other's servers take their part.
    assert note["at"] - left < 3.0, f"generation went on for {note['at'] - left:.1f} s"
    return note


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("moves", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_reader_that_leaves_a_stream_stops_the_backend(client, hand, name, model, moves, reset):
    run = name()
    async with client.stream(model=model, input=script({"run": run}, "hello ", *moves)) as stream:
        await stream.until("response.output_text.delta")
        left = time.monotonic()
        await stream.connection.leave(reset=reset)
        note = await stopped_soon(hand, run, left)
    assert note["cancelled"] or note["how"] in ("GeneratorExit", "CancelledError")
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("moves", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_caller_that_leaves_before_the_answer_stops_the_backend(client, hand, name, model, moves, reset):
    run = name()
    async with client.open(
        {"model": model, "input": script({"run": run}, {"mark": "begun"}, "hello ", *moves)}
    ) as connection:
        await hand.seen(run, "begun")
        left = time.monotonic()
        await connection.leave(reset=reset)
        await stopped_soon(hand, run, left)
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", KINDS)
async def test_nothing_stays_in_progress_when_its_reader_has_left(client, hand, name, model):
    run = name()
    async with client.stream(model=model, input=script({"run": run}, "hello", {"gate": "never"})) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        await stream.connection.leave()
    await hand.seen(run, "ended")
    with anyio.fail_after(2):
        while (kept := (await client.get(f"/responses/{response_id}")).json())["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    check_response(kept)
    assert kept["status"] in ("cancelled", "incomplete", "failed")
    assert output_text(kept) == "hello"


@pytest.mark.parametrize("model", KINDS)
async def test_a_record_of_a_caller_that_left_without_an_answer_is_closed_as_well(client, hand, name, model):
    run = name()
    async with client.open({"model": model, "input": script({"run": run}, "hello", {"gate": "never"})}) as connection:
        response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
        await connection.leave()
    await hand.seen(run, "ended")
    with anyio.fail_after(2):
        while (kept := (await client.get(f"/responses/{response_id}")).json())["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    check_response(kept)
    assert kept["status"] in ("cancelled", "incomplete", "failed")


@pytest.mark.unbound
@pytest.mark.parametrize("model", ["puppet-sync", "puppet-plain"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_backend_that_heeds_nothing_does_not_keep_its_record_open(client, hand, name, model, streamed):
    run = name()
    moves = [{"run": run}, {"mark": "blocked"}, {"block": 2.5}]
    async with client.open({"model": model, "stream": streamed, "input": script(*moves)}) as connection:
        response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
        await hand.seen(run, "blocked")
        await connection.leave()
    with anyio.fail_after(1):
        while (await client.get(f"/responses/{response_id}")).json()["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    assert "ended" not in await hand.record(run)


@pytest.mark.parametrize("model", KINDS)
async def test_a_backend_that_never_waits_holds_up_nobody(client, hand, name, model):
    run = name()
    body = {"model": model, "input": script({"run": run}, {"often": "x", "times": 10**9}), "store": False}
    async with client.open(body) as connection:
        await hand.seen(run, "started")
        for _ in range(3):
            begun = time.monotonic()
            assert output_text(await client.create(model=model, input=script("quick"))) == "quick"
            assert time.monotonic() - begun < 3.0
        await connection.leave()
        await hand.seen(run, "ended")


@pytest.mark.parametrize("model", KINDS)
async def test_many_readers_that_leave_free_their_places(client, hand, name, model):
    # More of them than any pool of threads or slots has places.
    for _ in range(3):
        runs = [name() for _ in range(30)]

        async def come_and_go(run):
            async with client.stream(model=model, input=script({"run": run}, "hello", {"gate": "never"})) as stream:
                await stream.until("response.output_text.delta")

        async with anyio.create_task_group() as group:
            for run in runs:
                group.start_soon(come_and_go, run)
        for run in runs:
            await hand.seen(run, "ended")
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"


async def test_a_reader_that_leaves_takes_nobody_elses_answer_away(client, hand, name):
    gate, run = name(), name()
    async with client.stream(input=script("one ", {"gate": gate}, "two")) as stays:
        await stays.until("response.output_text.delta")
        async with client.stream(input=script({"run": run}, "one ", {"gate": "never"})) as leaves:
            await leaves.until("response.output_text.delta")
        await hand.seen(run, "ended")
        await hand.open(gate)
        assert output_text(await stays.rest()) == "one two"


async def test_a_client_that_leaves_while_it_is_sending_harms_nobody(client):
    async with client.connect() as connection:
        head = client.request_bytes(connection, "POST", "/v1/responses", b"x" * 100, {})[:-60]
        await connection.send_bytes(head)
        await connection.leave()
    assert output_text(await client.create(input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", KINDS)
async def test_a_slow_reader_slows_the_backend_down_and_loses_nothing(client, hand, name, model):
    # More than sockets and queues hold: while nobody reads, the backend cannot come to its end.
    run, piece, times = name(), "x" * 2_000, 5_000
    moves = [{"run": run}, {"often": piece, "times": times}, {"mark": "all made"}, "end"]
    async with client.stream(model=model, input=script(*moves), store=False) as stream:
        stream.connection.narrow()
        await hand.seen(run, "started")
        with pytest.raises(AssertionError, match="was not all made"):
            await hand.seen(run, "all made", within=0.5)
        while (await stream.next()).get("delta") != "end":
            pass
    assert len(stream.text()) == times * len(piece) + 3
