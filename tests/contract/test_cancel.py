"""Cancelling: whatever the mode, the backend and the moment; once, twice, and too late."""

from __future__ import annotations

import time

import anyio
import pytest

from tests.support.conformance import check_response, check_stream

from . import hosts
from .client import PATIENCE, Client, Hand, call, output_text, script
from .hosts import FARTHEST
from .test_leaving import KINDS, stopped_soon

SERVED_BY = FARTHEST

pytestmark = [pytest.mark.anyio, pytest.mark.unbound]

DONE = b"data: [DONE]"
WAYS = {
    "while it waits": [{"gate": "never"}],
    "while it talks": [{"forever": "on and on ", "every": 0.02}],
    # By single characters: no text is endless, and this one must not reach its end before it is cancelled.
    "while it talks and yields the loop": [{"forever": "x", "every": 0.0}],
    "while it talks and never waits": [{"often": "x", "times": 10**9}],
}


@pytest.fixture
def single(start):
    """A client of a kit that makes one background response at a time, and its hand; the same on every host."""
    server = start(hosts.single(), "single")
    yield Client(server.port), Hand(server.control)
    server.check_log()


async def cancelled(client, response_id, **more):
    """The response after it was cancelled, which has to go well."""
    reply = await client.cancel(response_id, **more)
    assert reply.status == 200, f"{reply.status}: {reply.body[:500]!r}"
    response = reply.json()
    check_response(response)
    assert (response["id"], response["status"]) == (response_id, "cancelled")
    assert (response["error"], response["completed_at"]) == (None, None)
    assert (await client.get(f"/responses/{response_id}")).json() == response
    return response


# In the background.


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("moves", WAYS.values(), ids=WAYS)
async def test_a_background_response_is_cancelled_and_its_backend_stopped(client, hand, name, model, moves):
    run = name()
    made = await client.create(
        background=True, model=model, input=script({"run": run}, "hello ", {"mark": "begun"}, *moves)
    )
    await hand.seen(run, "begun")
    asked = time.monotonic()
    response = await cancelled(client, made["id"])
    note = await stopped_soon(hand, run, asked)
    assert note["cancelled"] or note["how"] in ("GeneratorExit", "CancelledError")
    assert output_text(response).startswith("hello ")
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"
    assert (await client.get(f"/responses/{made['id']}")).json() == response


@pytest.mark.parametrize("model", KINDS)
async def test_whoever_follows_a_response_is_told_that_it_was_cancelled(client, name, model):
    fields = {"model": model, "input": script("hello ", {"gate": "never"})}
    async with client.stream(background=True, **fields) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        async with client.follow(response_id) as all_of_it, client.follow(response_id, 2) as the_rest:
            response = await cancelled(client, response_id)
            assert await stream.rest() == await all_of_it.rest() == response
            assert stream.events == all_of_it.events
            assert (await the_rest.blocks())[-1] == DONE
    assert stream.events[-1]["type"] == "response.incomplete"
    async with client.follow(response_id) as again:
        assert await again.rest() == response


@pytest.mark.parametrize("model", ["puppet-sync", "puppet-plain"])
async def test_a_backend_that_heeds_nothing_is_left_behind(client, hand, name, model):
    run = name()
    made = await client.create(
        background=True, model=model, input=script({"run": run}, {"mark": "blocked"}, {"block": 2.5})
    )
    await hand.seen(run, "blocked")
    await cancelled(client, made["id"], within=1)
    assert "ended" not in await hand.record(run)


async def test_what_waits_is_cancelled_and_never_made(single, name):
    client, hand = single
    gate, run = name(), name()
    first = await client.create(background=True, input=script({"gate": gate}, "text"))
    await client.reaches(first["id"], "in_progress")
    async with client.stream(background=True, input=script({"run": run}, "never")) as stream:
        created = (await stream.until("response.queued"))["response"]
        response = await cancelled(client, created["id"])
        assert response["output"] == []
        assert await stream.rest() == response
    assert await cancelled(client, created["id"]) == response
    async with client.follow(created["id"]) as again:
        assert await again.rest() == response
    await hand.open(gate)
    assert output_text(await client.ended(first["id"])) == "text"
    third = await client.create(background=True, input=script("third"))
    assert output_text(await client.ended(third["id"])) == "third"
    assert await hand.record(run) == []
    assert (await client.get(f"/responses/{created['id']}")).json() == response


async def test_what_waited_and_was_cancelled_makes_room_within_a_second(single, name):
    client, hand = single
    gate = name()
    first = await client.create(background=True, input=script({"gate": gate}, "text"))
    second = await client.create(background=True, input=script("never"))
    (await client.post(background=True, input=script("never"))).error(429)
    await cancelled(client, second["id"])
    try:
        with anyio.fail_after(1.5):
            while True:
                reply = await client.post(background=True, input=script("third"))
                if reply.status != 429:
                    break
                await anyio.sleep(0.02)
    finally:
        await hand.open(gate)
    assert output_text(await client.ended(first["id"])) == "text"
    assert output_text(await client.ended(reply.json()["id"])) == "third"


async def test_the_slot_of_a_cancelled_response_is_free_within_a_second(single):
    client, _ = single
    for _ in range(3):
        made = await client.create(background=True, input=script("hello ", {"gate": "never"}))
        await client.reaches(made["id"], "in_progress")
        await cancelled(client, made["id"], within=1)
        after = await client.create(background=True, input=script("next"))
        assert output_text(await client.ended(after["id"], within=1)) == "next"


async def test_a_response_is_cancelled_the_moment_it_was_asked_for(client, hand, name):
    # Before, while and after its backend begins, as it comes.
    for _ in range(20):
        run = name()
        made = await client.create(background=True, input=script({"run": run}, "hello", {"gate": "never"}))
        response = await cancelled(client, made["id"])
        assert output_text(response) in ("", "hello")
        if "started" in await hand.record(run):
            await hand.seen(run, "ended", within=1)


async def test_a_hosted_tool_is_cancelled_with_its_response(client, hand, name):
    for tool in ("wait", "thread"):
        run = name()
        made = await client.create(
            background=True, input=script(call(tool, {"run": run})), tools=[{"type": f"test:{tool}"}]
        )
        await hand.seen(run, "begun")
        await cancelled(client, made["id"], within=1)
        await hand.seen(run, "over", within=1)


# In the foreground, from another connection.


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("moves", WAYS.values(), ids=WAYS)
async def test_a_stream_that_is_cancelled_ends_as_every_stream_does(client, hand, name, model, moves):
    run = name()
    async with client.stream(model=model, input=script({"run": run}, "hello ", *moves)) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        asked = time.monotonic()
        result = {}

        async def cancel():
            result["response"] = await cancelled(client, response_id)

        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            final = await stream.rest()
        note = await stopped_soon(hand, run, asked)
    assert note["cancelled"] or note["how"] in ("GeneratorExit", "CancelledError")
    assert final == result["response"]
    assert stream.events[-1]["type"] == "response.incomplete"
    assert output_text(final).startswith("hello ")
    assert output_text(await client.create(model=model, input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("moves", WAYS.values(), ids=WAYS)
async def test_a_caller_is_given_what_was_made_until_it_was_cancelled(client, hand, name, model, moves):
    run = name()
    body = {"model": model, "input": script({"run": run}, "hello ", {"mark": "begun"}, *moves)}
    async with client.open(body) as connection:
        response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
        await hand.seen(run, "begun")
        asked = time.monotonic()
        response = await cancelled(client, response_id)
        with anyio.fail_after(PATIENCE):
            status, _ = await connection.head()
            body = await connection.body()
        await stopped_soon(hand, run, asked)
    assert status == 200
    assert body == (await client.get(f"/responses/{response_id}")).body
    assert output_text(response).startswith("hello ")


@pytest.mark.parametrize("model", ["puppet-sync", "puppet-plain"])
async def test_a_stream_of_a_backend_that_heeds_nothing_is_cancelled_all_the_same(client, hand, name, model):
    run = name()
    moves = [{"run": run}, {"mark": "blocked"}, {"block": 2.5}]
    async with client.stream(model=model, input=script(*moves)) as stream:
        created = await stream.until("response.created")
        await hand.seen(run, "blocked")
        response = await cancelled(client, created["response"]["id"], within=1)
        assert await stream.rest() == response
    assert "ended" not in await hand.record(run)


async def test_a_stream_whose_reader_does_not_read_is_cancelled_all_the_same(client, hand, name):
    run = name()
    async with client.stream(input=script({"run": run}, {"often": "x" * 2_000, "times": 10**9})) as stream:
        created = await stream.until("response.created")
        stream.connection.narrow()
        with pytest.raises(AssertionError, match="was not ended"):  # until everything between them is full
            await hand.seen(run, "ended", within=0.5)
        asked = time.monotonic()
        response = await cancelled(client, created["response"]["id"])
        await stopped_soon(hand, run, asked)
        while await stream.next():
            pass
    # What did not get through in time may be missing at the end, but nowhere else.
    numbers = [event["sequence_number"] for event in stream.events]
    assert numbers == list(range(len(numbers)))
    assert "error" not in {event["type"] for event in stream.events}
    if stream.done:
        assert check_stream(stream.events) == response


@pytest.mark.sockets
async def test_a_response_over_a_socket_is_cancelled_and_the_socket_lives_on(client, hand, name):
    run = name()
    async with client.socket() as socket:
        await socket.ask(input=script({"run": run}, "hello", {"mark": "begun"}, {"gate": "never"}), store=True)
        await hand.seen(run, "begun")
        response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
        asked = time.monotonic()
        response = await cancelled(client, response_id)
        assert await socket.answer() == response
        await stopped_soon(hand, run, asked)
        assert output_text(await socket.made(input=script("text"))) == "text"


async def test_what_is_not_kept_cannot_be_cancelled(client, hand, name):
    gate = name()
    async with client.stream(store=False, input=script({"gate": gate}, "text")) as stream:
        created = await stream.until("response.created")
        (await client.cancel(created["response"]["id"])).error(404, "response_not_found")
        await hand.open(gate)
        assert output_text(await stream.rest()) == "text"


# Twice, too late, and never.


@pytest.mark.parametrize("background", [True, False])
async def test_cancelling_twice_does_no_harm(client, background):
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
async def test_what_has_ended_cannot_be_cancelled_any_more(client, ending, background):
    async with client.stream(background=background, input=script(*ENDINGS[ending])) as stream:
        final = await stream.rest()
    assert final["status"] == ending
    for _ in range(2):
        (await client.cancel(final["id"])).error(400, "response_already_ended")
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_a_response_that_ends_while_it_is_cancelled_has_one_end(client, hand, name):
    for _ in range(10):
        gate = name()
        async with client.stream(background=True, input=script("half", {"gate": gate}, " whole")) as stream:
            await stream.until("response.output_text.delta")
            response_id = stream.events[0]["response"]["id"]
            async with anyio.create_task_group() as group:
                group.start_soon(hand.open, gate)
                reply = await client.cancel(response_id)
            final = await stream.rest()
        if reply.status == 200:
            assert reply.json() == final
            assert final["status"] == "cancelled"
        else:
            reply.error(400, "response_already_ended")
            assert final["status"] == "completed"
        assert (await client.get(f"/responses/{response_id}")).json() == final


async def test_what_does_not_exist_cannot_be_cancelled(client):
    gone = await client.create(input=script("text"))
    await client.delete(f"/responses/{gone['id']}")
    for response_id in ("resp_of_nobody", gone["id"], "%20", "x" * 3000):
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
async def test_a_body_makes_no_difference(client, body, headers, slash):
    made = await client.create(background=True, input=script("hello", {"gate": "never"}))
    path = f"/responses/{made['id']}/cancel{slash}"
    reply = await client.request("POST", path, body, headers=headers)
    assert (reply.status, reply.json()["status"]) == (200, "cancelled")
    reply = await client.request("POST", path, body, headers=headers, chunked=body is not None)
    assert (reply.status, reply.json()["status"]) == (200, "cancelled")


async def test_a_connection_goes_on_after_a_body_that_nobody_needs(client):
    made = await client.create(background=True, input=script("hello", {"gate": "never"}))
    async with client.connect() as connection:
        for _ in range(3):
            path = f"{client.prefix}/responses/{made['id']}/cancel"
            await connection.send_bytes(client.request_bytes(connection, "POST", path, b"x" * 10_000, {}))
            with anyio.fail_after(PATIENCE):
                assert (await connection.head())[0] == 200
                await connection.body()
            connection.next_cycle()


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
async def test_only_post_cancels(client, hand, name, method):
    gate = name()
    made = await client.create(background=True, input=script({"gate": gate}, "text"))
    reply = await client.request(method, f"/responses/{made['id']}/cancel")
    reply.error(405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    await hand.open(gate)
    assert (await client.ended(made["id"]))["status"] == "completed"


# Afterwards.


@pytest.mark.parametrize("background", [True, False])
async def test_a_conversation_can_go_on_from_what_was_cancelled(client, background):
    async with client.stream(background=background, input=script("half", {"gate": "never"})) as stream:
        await stream.until("response.output_text.delta")
        response = await cancelled(client, stream.events[0]["response"]["id"])
    told = await client.told(input="go on", previous_response_id=response["id"])
    assert [message["content"] for message in told["messages"]][1:] == ["half", "go on"]


async def test_what_was_cancelled_is_deleted_once(client):
    made = await client.create(background=True, input=script("half", {"gate": "never"}))
    await cancelled(client, made["id"])
    assert (await client.delete(f"/responses/{made['id']}")).status == 200
    (await client.delete(f"/responses/{made['id']}")).error(404, "response_not_found")
    (await client.cancel(made["id"])).error(404, "response_not_found")


async def test_cancelling_one_takes_nobody_elses_answer_away(client, hand, name):
    gate = name()
    async with client.stream(input=script("one ", {"gate": gate}, "two")) as stays:
        await stays.until("response.output_text.delta")
        behind = await client.create(background=True, input=script("one ", {"gate": gate}, "two"))
        goes = await client.create(background=True, input=script("one ", {"gate": gate}, "two"))
        await cancelled(client, goes["id"])
        await hand.open(gate)
        assert output_text(await stays.rest()) == "one two"
    assert output_text(await client.ended(behind["id"])) == "one two"
