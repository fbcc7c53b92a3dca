"""WebSocket mode: the same responses over a socket that stays open, one after the other."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, suppress

import anyio
import pytest

from tests.support.conformance import check_response

from . import hosts
from .client import PATIENCE, UPGRADE, Client, Hand, call, functions, output_text, script
from .hosts import MOST_SOCKETS, SOCKET_SECONDS, SOCKETS, WELCOME_ORIGIN
from .test_leaving import KINDS, WAYS, stopped_soon

pytestmark = [pytest.mark.anyio, pytest.mark.sockets]

SERVED_BY = SOCKETS
NOT_FOUND = {"status": 400, "code": "previous_response_not_found", "param": "previous_response_id"}


@pytest.fixture
def brief(start):
    """A client of a kit that allows no socket for long, and its hand; the same on every host."""
    server = start(hosts.single(sockets=True), "brief")
    yield Client(server.port), Hand(server.control)
    server.check_log()


@pytest.fixture
def few(start):
    """A client of a kit that allows few sockets; the same on every host."""
    server = start(hosts.single(sockets=True), "few")
    yield Client(server.port)
    server.check_log()


# Turns.


async def test_a_socket_gives_the_responses_that_post_gives(client):
    fields = {"input": script({"Reasoning": {"text": "Hm."}}, "Hello, ", "world."), "metadata": {"a": "b"}}
    posted = await client.streamed(**fields)
    async with client.socket() as socket:
        response = await socket.made(store=True, **fields)
    assert (await client.get(f"/responses/{response['id']}")).json() == response
    for changing in ("id", "created_at", "completed_at", "output"):
        del posted[changing], response[changing]
    assert response == posted


async def test_the_path_may_end_in_a_slash(client):
    async with client.socket(path="/responses/") as socket:
        assert output_text(await socket.made(input=script("text"))) == "text"


@pytest.mark.parametrize(
    "text", ["\U0001f600 \u2028 \x85 \r\n\n", "data: [DONE]\n\n", '"\\', "\ud83d", "x" * 1_000_000]
)
async def test_text_of_every_kind_arrives_as_it_was_made(client, text):
    async with client.socket() as socket:
        expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert output_text(await socket.made(input=script({"Text": {"text": text}}))) == expected


async def test_the_longest_text_that_is_allowed_fits_a_frame(client):
    async with client.socket() as socket:
        response = await socket.made(input="x" * 10_485_760)
        assert output_text(response) == "10485760"
        await socket.ask(input="x" * 10_485_761)
        await socket.refused(400, param="input")


@pytest.mark.parametrize("model", KINDS)
async def test_requests_are_answered_one_after_the_other(client, hand, name, model):
    first, second, gate = name(), name(), name()
    async with client.socket() as socket:
        await socket.ask(model=model, input=script({"run": first}, "one", {"gate": gate}))
        await socket.ask(model=model, input=script({"run": second}, "two"))
        await socket.ask(model=model, input=script("three"))
        await hand.seen(first, "started")
        await socket.until("response.created")
        await hand.open(gate)
        await socket.until("response.completed")
        assert [output_text(await socket.answer()) for _ in range(2)] == ["two", "three"]
    assert (await hand.seen(second, "started"))["at"] > (await hand.seen(first, "ended"))["at"]


async def test_sockets_do_not_wait_for_each_other(client, hand, name):
    gate = name()
    async with client.socket() as one, client.socket() as other:
        await one.ask(input=script("one", {"gate": gate}))
        await one.until("response.output_text.delta")
        assert output_text(await other.made(input=script("two"))) == "two"
        assert output_text(await client.create(input=script("three"))) == "three"
        await hand.open(gate)
        await one.until("response.completed")


@pytest.mark.parametrize("model", KINDS)
async def test_each_delta_leaves_before_the_next_is_made(client, hand, name, model):
    gates = [name() for _ in range(5)]
    moves = [move for gate in gates for move in (f"to {gate} ", {"gate": gate})]
    async with client.socket() as socket:
        await socket.ask(model=model, input=script(*moves))
        for gate in gates:
            assert (await socket.until("response.output_text.delta"))["delta"] == f"to {gate} "
            await hand.open(gate)
        await socket.until("response.completed")


async def test_functions_are_called_and_their_outputs_taken(client):
    tools = functions("add")
    async with client.socket() as socket:
        first = await socket.made(input=script(call("add", {"a": 1}, call_id="call_1")), tools=tools)
        output = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
        told = await socket.told(
            input=[output, {"role": "user", "content": "tell"}], previous_response_id=first["id"], tools=tools
        )
    assert [item["type"] for item in told["items"]] == ["message", "function_call", "function_call_output", "message"]


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"stream": None}, {"stream_options": {}}, {"stream": "x"}, {"background": False}]
)
async def test_what_only_says_how_to_answer_over_http_is_ignored(client, fields):
    async with client.socket() as socket:
        assert output_text(await socket.made(input=script("text"), **fields)) == "text"


async def test_a_background_response_is_refused(client):
    async with client.socket() as socket:
        await socket.ask(input="text", store=True, background=True)
        await socket.refused(400, param="background")
        assert output_text(await socket.made(input=script("text"))) == "text"


# What is wrong.


@pytest.mark.parametrize(
    ("frame", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("", "invalid_json", None),
        ("[]", "invalid_request", None),
        (b'{"type": "response.create", "input": "Hi"}', "invalid_request", None),
        ({"type": "session.update"}, "invalid_request", "type"),
        ({"input": "Hi"}, "invalid_request", "type"),
        ({"type": "response.create", "input": 1}, "invalid_request", "input"),
        ({"type": "response.create", "model": "none", "input": "Hi"}, "model_not_found", "model"),
    ],
)
async def test_a_bad_frame_gets_an_error_and_the_socket_lives_on(client, frame, code, param):
    async with client.socket() as socket:
        await socket.send(frame)
        await socket.refused(400, code, param)
        assert output_text(await socket.made(input=script("text"))) == "text"


async def test_too_many_requests_at_once_are_refused(client, hand, name):
    gate, run = name(), name()
    async with client.socket() as socket:
        await socket.ask(input=script({"run": run}, {"gate": gate}, "first"))
        await hand.seen(run, "started")
        for number in range(100):
            await socket.ask(input=script(f"{number}"))
        # The server has read them all once it answers on another connection that was opened later, and then some.
        for _ in range(20):
            await client.create(input=script("quick"))
        await hand.open(gate)
        answers = [await socket.answer() for _ in range(101)]
    made = [output_text(answer) for answer in answers if answer.get("type") != "error"]
    refused = [answer["error"]["code"] for answer in answers if answer.get("type") == "error"]
    assert made[0] == "first"
    assert made[1:] == [f"{number}" for number in range(len(made) - 1)]
    assert set(refused) == {"too_many_requests"}


@pytest.mark.parametrize("model", KINDS)
async def test_a_response_that_is_cancelled_over_http_ends_in_one_frame(client, hand, name, model):
    run = name()
    async with client.socket() as socket:
        await socket.ask(model=model, input=script({"run": run}, "half", {"gate": "never"}), store=True)
        created = (await socket.until("response.created"))["response"]
        await socket.until("response.output_text.delta")
        assert (await client.request("POST", f"/responses/{created['id']}/cancel")).status == 200
        last = await socket.until("response.incomplete")
        assert last["response"]["status"] == "cancelled"
        assert output_text(await socket.made(model=model, input=script("text"))) == "text"
    await hand.seen(run, "ended")


@pytest.mark.parametrize("model", KINDS)
async def test_a_response_that_fails_ends_in_one_frame(client, model):
    async with client.socket() as socket:
        response = await socket.turn(model=model, input=script("half", {"raise": "hunter2"}), store=True)
        assert response["status"] == "failed"
        assert "hunter2" not in response["error"]["message"]
        assert (await client.get(f"/responses/{response['id']}")).json() == response
        assert output_text(await socket.made(input=script("text"))) == "text"


@pytest.mark.parametrize("moment", ["create", "update"])
async def test_a_store_that_fails_is_told_in_one_frame(client, moment):
    async with client.socket() as socket:
        answer = await socket.turn(input=script("text"), store=True, metadata={"store": f"no {moment}"})
        assert answer["error"]["code"] == "store_error"
        assert (answer.get("status"), answer.get("type")) == (
            (500, "error") if moment == "create" else ("failed", None)
        )
        assert output_text(await socket.made(input=script("text"))) == "text"


# Continuing.


async def test_what_is_not_stored_goes_on_where_it_began_and_nowhere_else(client):
    async with client.socket() as socket, client.socket() as other:
        first = await socket.made(input=script("one"))
        second = await socket.made(input=script("two"), previous_response_id=first["id"])
        told = await socket.told(input="tell", previous_response_id=second["id"])
        texts = [message["content"] for message in told["messages"] if message["role"] == "assistant"]
        assert texts == ["one", "two"]
        await other.ask(input="tell", previous_response_id=second["id"])
        await other.refused(**NOT_FOUND)
        (await client.get(f"/responses/{first['id']}")).error(404)
        (await client.post(input="tell", previous_response_id=first["id"])).error(**NOT_FOUND)
    async with client.socket() as socket:
        await socket.ask(input="tell", previous_response_id=first["id"])
        await socket.refused(**NOT_FOUND)


async def test_a_stored_conversation_goes_on_over_a_socket_stored_or_not(client):
    first = await client.create(input=script("one"))
    async with client.socket() as socket:
        second = await socket.made(input=script("two"), previous_response_id=first["id"], store=True)
        third = await socket.made(input=script("three"), previous_response_id=second["id"])
        told = await socket.told(input="tell", previous_response_id=third["id"])
    texts = [message["content"] for message in told["messages"] if message["role"] == "assistant"]
    assert texts == ["one", "two", "three"]
    assert (await client.told(input="tell", previous_response_id=second["id"]))["messages"][-2]["content"] == "two"


async def test_items_are_found_by_reference_on_their_socket_and_in_the_store(client):
    kept = await client.create(input=script("kept"))
    async with client.socket() as socket, client.socket() as other:
        local = await socket.made(input=script("local"))
        references = [{"type": "item_reference", "id": response["output"][0]["id"]} for response in (kept, local)]
        told = await socket.told(input=[*references, {"role": "user", "content": "tell"}])
        assert [message["content"] for message in told["messages"]] == ["kept", "local", "tell"]
        await other.ask(input=references)
        await other.refused(400, "item_not_found", "input[1].id")


async def test_nobody_goes_on_with_what_is_somebody_elses(client):
    bob = client.other("Bearer bob")
    kept = await client.create(input=script("kept"))
    async with client.socket() as socket, bob.socket() as stranger:
        local = await socket.made(input=script("local"))
        for response in (kept, local):
            await stranger.ask(input="tell", previous_response_id=response["id"])
            await stranger.refused(**NOT_FOUND)
            await stranger.ask(input=[{"type": "item_reference", "id": response["output"][0]["id"]}])
            await stranger.refused(400, "item_not_found")


@pytest.mark.parametrize(
    "failing",
    [
        {"input": [{"type": "function_call_output", "call_id": "call_missing", "output": "?"}]},
        {"input": script("half", {"raise": "no"})},
        {"input": script({"refuse": "TooManyRequests", "message": "Full."})},
        {"input": "Hi", "temperature": 99},
    ],
)
async def test_a_continuation_that_fails_forgets_what_it_continued(client, failing):
    async with client.socket() as socket:
        first, other = await socket.made(input=script("one")), await socket.made(input=script("two"))
        answer = await socket.turn(**failing, previous_response_id=first["id"])
        assert answer.get("type") == "error" or answer["status"] == "failed"
        await socket.ask(input="tell", previous_response_id=first["id"])
        await socket.refused(**NOT_FOUND)
        assert "two" in [
            message["content"]
            for message in (await socket.told(input="tell", previous_response_id=other["id"]))["messages"]
        ]


async def test_a_warm_up_is_completed_without_output_and_can_be_continued(client, hand, name):
    run = name()
    async with client.socket() as socket:
        warm = await socket.made(input=script({"run": run}, "never said"), instructions="Be brief.", generate=False)
        assert (warm["status"], warm["output"], warm["error"]) == ("completed", [], None)
        assert await hand.record(run) == []
        told = await socket.told(input="tell", previous_response_id=warm["id"])
        assert [message["role"] for message in told["messages"]] == ["user", "user"]


# Leaving.


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("moves", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("way", ["close frame", "closed", "reset"])
async def test_a_client_that_leaves_stops_the_backend(client, hand, name, model, moves, way):
    run, never = name(), name()
    async with client.socket() as socket:
        await socket.ask(model=model, input=script({"run": run}, "hello ", *moves), store=True)
        await socket.ask(model=model, input=script({"run": never}, "never said"))
        created = (await socket.until("response.created"))["response"]
        await socket.until("response.output_text.delta")
        left = time.monotonic()
        if way == "close frame":
            await socket.close()
        else:
            await socket.connection.leave(reset=way == "reset")
        await stopped_soon(hand, run, left)
    with anyio.fail_after(2):
        while (kept := (await client.get(f"/responses/{created['id']}")).json())["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    check_response(kept)
    assert kept["status"] == "cancelled"
    assert await hand.record(never) == []


@pytest.mark.parametrize("model", KINDS)
async def test_many_clients_that_leave_free_their_places(client, hand, name, model):
    runs = [name() for _ in range(40)]

    async def come_and_go(run):
        async with client.socket() as socket:
            await socket.ask(model=model, input=script({"run": run}, "hello", {"gate": "never"}))
            await socket.until("response.output_text.delta")

    async with anyio.create_task_group() as group:
        for run in runs:
            group.start_soon(come_and_go, run)
    for run in runs:
        await hand.seen(run, "ended")
    assert output_text(await client.create(input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", KINDS)
async def test_a_slow_reader_slows_the_backend_down_and_loses_nothing(client, hand, name, model):
    run, piece, times = name(), "x" * 2_000, 5_000
    moves = [{"run": run}, {"often": piece, "times": times}, {"mark": "all made"}, "end"]
    async with client.socket() as socket:
        socket.connection.narrow()
        await socket.ask(model=model, input=script(*moves))
        await hand.seen(run, "started")
        with pytest.raises(AssertionError, match="was not all made"):
            await hand.seen(run, "all made", within=0.5)
        size = 0
        while (event := await socket.next())["type"] != "response.output_text.done":
            size += len(event.get("delta", ""))
    assert size == times * len(piece) + 3


async def test_a_client_that_never_reads_is_taken_for_gone(brief, name):
    (client, hand), run = brief, name()
    async with client.socket() as socket:
        socket.connection.narrow()
        await socket.ask(input=script({"run": run}, {"often": "x" * 2_000, "times": 10**9}))
        await hand.seen(run, "ended")


# The door.


async def test_a_key_that_opens_nothing_is_turned_away_before_the_upgrade(client):
    reply = await client.other("Bearer stranger").get("/responses", headers=UPGRADE)
    reply.error(401)
    (await client.other("").get("/responses", headers=UPGRADE)).error(401)


async def test_a_page_of_another_site_is_turned_away_before_the_upgrade(client):
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        (await client.get("/responses", headers={**UPGRADE, "Origin": origin})).error(403, "origin_not_allowed")
    async with client.socket(headers={"Origin": f"http://127.0.0.1:{client.port}"}) as socket:
        assert output_text(await socket.made(input=script("text"))) == "text"


async def test_a_page_whose_origin_the_owner_allows_may_connect(brief):
    client, _ = brief
    async with client.socket(headers={"Origin": WELCOME_ORIGIN}) as socket:
        assert output_text(await socket.made(input=script("text"))) == "text"


async def test_without_an_upgrade_the_client_is_asked_for_one(client, server):
    reply = await client.get("/responses")
    reply.error(426)
    # PEP 3333 keeps from apps what is between two ends of a connection.
    assert reply.headers.get("upgrade", "").lower() == ("websocket" if server.host.lifespan else "")


async def let_in(client, sockets):
    """Opens a socket as soon as there is room for one."""
    with anyio.fail_after(PATIENCE):
        while True:
            with suppress(AssertionError):
                socket = await sockets.enter_async_context(client.socket())
                return await socket.made(input=script("text"))
            await anyio.lowlevel.checkpoint()


async def test_there_are_only_so_many_sockets(few):
    async with AsyncExitStack() as sockets:
        for _ in range(MOST_SOCKETS):
            await let_in(few, sockets)
        (await few.get("/responses", headers=UPGRADE)).error(503)
        assert output_text(await few.create(input=script("over HTTP"))) == "over HTTP"
    async with AsyncExitStack() as sockets:
        await let_in(few, sockets)


async def test_a_socket_is_closed_when_its_time_is_up(brief):
    client, _ = brief
    async with client.socket() as socket:
        assert output_text(await socket.made(input=script("text"))) == "text"
        await socket.refused(400, "websocket_connection_limit_reached")
        assert await socket.next() is None
        assert socket.code == 1000


async def test_a_response_in_the_making_is_finished_when_the_time_is_up(brief, name):
    (client, hand), gate = brief, name()
    async with client.socket() as socket:
        await socket.ask(input=script("one ", {"gate": gate}, "two"))
        await socket.until("response.output_text.delta")
        await anyio.sleep(2 * SOCKET_SECONDS)  # that is the time that is up
        await hand.open(gate)
        completed = await socket.until("response.completed")
        assert output_text(completed["response"]) == "one two"
        await socket.refused(400, "websocket_connection_limit_reached")
        assert await socket.next() is None
        assert socket.code == 1000
