"""WebSocket mode: the same responses over one connection, one after the other."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, suppress

import anyio
import pytest

from tests.support.conformance import check_response

from . import hosts
from .client import DEFAULT_TIMEOUT, UPGRADE, Client, ControlClient, call, functions, output_text, script
from .hosts import ALLOWED_ORIGIN, MAX_WEBSOCKETS, WEBSOCKET_HOSTS, WEBSOCKET_TIMEOUT
from .test_disconnects import ENDLESS_STEPS, MODELS, stopped_soon

pytestmark = [pytest.mark.anyio, pytest.mark.websockets]

SERVED_BY = WEBSOCKET_HOSTS
NOT_FOUND = {"status": 400, "code": "previous_response_not_found", "param": "previous_response_id"}


@pytest.fixture
def short_timeouts(start):
    """A client and the control of a kit with short timeouts for WebSockets, on one host."""
    server = start(hosts.settings_host(websockets=True), "short_timeouts")
    yield Client(server.port), ControlClient(server.control_port)
    server.check_log()


@pytest.fixture
def few_websockets(start):
    """A client of a kit that allows few WebSockets, on one host."""
    server = start(hosts.settings_host(websockets=True), "few_websockets")
    yield Client(server.port)
    server.check_log()


# Requests.


async def test_websocket_gives_same_responses_as_post(client):
    fields = {"input": script({"Reasoning": {"text": "Hm."}}, "Hello, ", "world."), "metadata": {"a": "b"}}
    posted = await client.streamed(**fields)
    async with client.websocket() as socket:
        response = await socket.complete(store=True, **fields)
    assert (await client.get(f"/responses/{response['id']}")).json() == response
    for changing in ("id", "created_at", "completed_at", "output"):
        del posted[changing], response[changing]
    assert response == posted


async def test_websocket_path_accepts_trailing_slash(client):
    async with client.websocket(path="/responses/") as socket:
        assert output_text(await socket.complete(input=script("text"))) == "text"


@pytest.mark.parametrize(
    "text", ["\U0001f600 \u2028 \x85 \r\n\n", "data: [DONE]\n\n", '"\\', "\ud83d", "x" * 1_000_000]
)
async def test_text_of_every_kind_arrives_unchanged(client, text):
    async with client.websocket() as socket:
        expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert output_text(await socket.complete(input=script({"Text": {"text": text}}))) == expected


async def test_longest_allowed_text_fits_one_frame(client):
    async with client.websocket() as socket:
        response = await socket.complete(input="x" * 10_485_760)
        assert output_text(response) == "10485760"
        await socket.send_request(input="x" * 10_485_761)
        await socket.read_error(400, param="input")


@pytest.mark.parametrize("model", MODELS)
async def test_requests_are_answered_in_order(client, control, name, model):
    first, second, gate = name(), name(), name()
    async with client.websocket() as socket:
        await socket.send_request(model=model, input=script({"run": first}, "one", {"gate": gate}))
        await socket.send_request(model=model, input=script({"run": second}, "two"))
        await socket.send_request(model=model, input=script("three"))
        await control.wait_for(first, "started")
        await socket.until("response.created")
        await control.open_gate(gate)
        await socket.until("response.completed")
        assert [output_text(await socket.read_response()) for _ in range(2)] == ["two", "three"]
    assert (await control.wait_for(second, "started"))["at"] > (await control.wait_for(first, "ended"))["at"]


async def test_websockets_run_concurrently(client, control, name):
    gate = name()
    async with client.websocket() as first, client.websocket() as other:
        await first.send_request(input=script("one", {"gate": gate}))
        await first.until("response.output_text.delta")
        assert output_text(await other.complete(input=script("two"))) == "two"
        assert output_text(await client.create(input=script("three"))) == "three"
        await control.open_gate(gate)
        await first.until("response.completed")


@pytest.mark.parametrize("model", MODELS)
async def test_websocket_sends_each_delta_before_the_next_is_generated(client, control, name, model):
    gates = [name() for _ in range(5)]
    steps = [step for gate in gates for step in (f"to {gate} ", {"gate": gate})]
    async with client.websocket() as socket:
        await socket.send_request(model=model, input=script(*steps))
        for gate in gates:
            assert (await socket.until("response.output_text.delta"))["delta"] == f"to {gate} "
            await control.open_gate(gate)
        await socket.until("response.completed")


async def test_functions_are_called_and_outputs_accepted(client):
    tools = functions("add")
    async with client.websocket() as socket:
        first = await socket.complete(input=script(call("add", {"a": 1}, call_id="call_1")), tools=tools)
        output = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
        turn = await socket.describe_turn(
            input=[output, {"role": "user", "content": "tell"}], previous_response_id=first["id"], tools=tools
        )
    assert [item["type"] for item in turn["items"]] == ["message", "function_call", "function_call_output", "message"]


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"stream": None}, {"stream_options": {}}, {"stream": "x"}, {"background": False}]
)
async def test_http_only_fields_are_ignored(client, fields):
    async with client.websocket() as socket:
        assert output_text(await socket.complete(input=script("text"), **fields)) == "text"


async def test_background_is_refused(client):
    async with client.websocket() as socket:
        await socket.send_request(input="text", store=True, background=True)
        await socket.read_error(400, param="background")
        assert output_text(await socket.complete(input=script("text"))) == "text"


# Errors.


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
async def test_websocket_survives_bad_frame_with_error(client, frame, code, param):
    async with client.websocket() as socket:
        await socket.send(frame)
        await socket.read_error(400, code, param)
        assert output_text(await socket.complete(input=script("text"))) == "text"


async def test_too_many_queued_requests_are_refused(client, control, name):
    gate, run = name(), name()
    async with client.websocket() as socket:
        await socket.send_request(input=script({"run": run}, {"gate": gate}, "first"))
        await control.wait_for(run, "started")
        for number in range(100):
            await socket.send_request(input=script(f"{number}"))
        # A reply on a connection that was opened later shows that the server has read all of them.
        for _ in range(20):
            await client.create(input=script("quick"))
        await control.open_gate(gate)
        answers = [await socket.read_response() for _ in range(101)]
    texts = [output_text(answer) for answer in answers if answer.get("type") != "error"]
    refused = [answer["error"]["code"] for answer in answers if answer.get("type") == "error"]
    assert texts[0] == "first"
    assert texts[1:] == [f"{number}" for number in range(len(texts) - 1)]
    assert set(refused) == {"too_many_requests"}


@pytest.mark.parametrize("model", MODELS)
async def test_response_cancelled_over_http_ends_with_one_frame(client, control, name, model):
    run = name()
    async with client.websocket() as socket:
        await socket.send_request(model=model, input=script({"run": run}, "half", {"gate": "never"}), store=True)
        created = (await socket.until("response.created"))["response"]
        await socket.until("response.output_text.delta")
        assert (await client.request("POST", f"/responses/{created['id']}/cancel")).status == 200
        last = await socket.until("response.incomplete")
        assert last["response"]["status"] == "cancelled"
        assert output_text(await socket.complete(model=model, input=script("text"))) == "text"
    await control.wait_for(run, "ended")


@pytest.mark.parametrize("model", MODELS)
async def test_failed_response_ends_with_one_frame(client, model):
    async with client.websocket() as socket:
        response = await socket.exchange(model=model, input=script("half", {"raise": "hunter2"}), store=True)
        assert response["status"] == "failed"
        assert "hunter2" not in response["error"]["message"]
        assert (await client.get(f"/responses/{response['id']}")).json() == response
        assert output_text(await socket.complete(input=script("text"))) == "text"


@pytest.mark.parametrize("moment", ["create", "update"])
async def test_store_failure_ends_with_one_frame(client, moment):
    async with client.websocket() as socket:
        answer = await socket.exchange(input=script("text"), store=True, metadata={"store": f"no {moment}"})
        assert answer["error"]["code"] == "store_error"
        assert (answer.get("status"), answer.get("type")) == (
            (500, "error") if moment == "create" else ("failed", None)
        )
        assert output_text(await socket.complete(input=script("text"))) == "text"


# Continuation.


async def test_unstored_response_is_continued_on_its_websocket_only(client):
    async with client.websocket() as socket, client.websocket() as other:
        first = await socket.complete(input=script("one"))
        second = await socket.complete(input=script("two"), previous_response_id=first["id"])
        turn = await socket.describe_turn(input="tell", previous_response_id=second["id"])
        texts = [message["content"] for message in turn["messages"] if message["role"] == "assistant"]
        assert texts == ["one", "two"]
        await other.send_request(input="tell", previous_response_id=second["id"])
        await other.read_error(**NOT_FOUND)
        (await client.get(f"/responses/{first['id']}")).error(404)
        (await client.post(input="tell", previous_response_id=first["id"])).error(**NOT_FOUND)
    async with client.websocket() as socket:
        await socket.send_request(input="tell", previous_response_id=first["id"])
        await socket.read_error(**NOT_FOUND)


async def test_stored_conversation_is_continued_over_websocket(client):
    first = await client.create(input=script("one"))
    async with client.websocket() as socket:
        second = await socket.complete(input=script("two"), previous_response_id=first["id"], store=True)
        third = await socket.complete(input=script("three"), previous_response_id=second["id"])
        turn = await socket.describe_turn(input="tell", previous_response_id=third["id"])
    texts = [message["content"] for message in turn["messages"] if message["role"] == "assistant"]
    assert texts == ["one", "two", "three"]
    assert (await client.describe_turn(input="tell", previous_response_id=second["id"]))["messages"][-2][
        "content"
    ] == "two"


async def test_item_references_resolve_on_websocket_and_in_store(client):
    stored = await client.create(input=script("kept"))
    async with client.websocket() as socket, client.websocket() as other:
        local = await socket.complete(input=script("local"))
        references = [{"type": "item_reference", "id": response["output"][0]["id"]} for response in (stored, local)]
        turn = await socket.describe_turn(input=[*references, {"role": "user", "content": "tell"}])
        assert [message["content"] for message in turn["messages"]] == ["kept", "local", "tell"]
        await other.send_request(input=references)
        await other.read_error(400, "item_not_found", "input[1].id")


async def test_foreign_response_cannot_be_continued_over_websocket(client):
    bob = client.with_key("Bearer bob")
    stored = await client.create(input=script("kept"))
    async with client.websocket() as socket, bob.websocket() as stranger:
        local = await socket.complete(input=script("local"))
        for response in (stored, local):
            await stranger.send_request(input="tell", previous_response_id=response["id"])
            await stranger.read_error(**NOT_FOUND)
            await stranger.send_request(input=[{"type": "item_reference", "id": response["output"][0]["id"]}])
            await stranger.read_error(400, "item_not_found")


@pytest.mark.parametrize(
    "failing",
    [
        {"input": [{"type": "function_call_output", "call_id": "call_missing", "output": "?"}]},
        {"input": script("half", {"raise": "no"})},
        {"input": script({"refuse": "TooManyRequests", "message": "Full."})},
        {"input": "Hi", "temperature": 99},
    ],
)
async def test_failed_continuation_evicts_previous_response(client, failing):
    async with client.websocket() as socket:
        first, other = await socket.complete(input=script("one")), await socket.complete(input=script("two"))
        answer = await socket.exchange(**failing, previous_response_id=first["id"])
        assert answer.get("type") == "error" or answer["status"] == "failed"
        await socket.send_request(input="tell", previous_response_id=first["id"])
        await socket.read_error(**NOT_FOUND)
        assert "two" in [
            message["content"]
            for message in (await socket.describe_turn(input="tell", previous_response_id=other["id"]))["messages"]
        ]


async def test_warm_up_completes_without_output_and_can_be_continued(client, control, name):
    run = name()
    async with client.websocket() as socket:
        warm = await socket.complete(input=script({"run": run}, "never said"), instructions="Be brief.", generate=False)
        assert (warm["status"], warm["output"], warm["error"]) == ("completed", [], None)
        assert await control.trace(run) == []
        turn = await socket.describe_turn(input="tell", previous_response_id=warm["id"])
        assert [message["role"] for message in turn["messages"]] == ["user", "user"]


# Disconnects.


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", ENDLESS_STEPS.values(), ids=ENDLESS_STEPS)
@pytest.mark.parametrize("closing", ["close frame", "closed", "reset"])
async def test_websocket_disconnect_stops_backend(client, control, name, model, steps, closing):
    run, never = name(), name()
    async with client.websocket() as socket:
        await socket.send_request(model=model, input=script({"run": run}, "hello ", *steps), store=True)
        await socket.send_request(model=model, input=script({"run": never}, "never said"))
        created = (await socket.until("response.created"))["response"]
        await socket.until("response.output_text.delta")
        disconnected_at = time.monotonic()
        if closing == "close frame":
            await socket.close()
        else:
            await socket.connection.disconnect(reset=closing == "reset")
        await stopped_soon(control, run, disconnected_at)
    with anyio.fail_after(2):
        while (stored := (await client.get(f"/responses/{created['id']}")).json())["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    check_response(stored)
    assert stored["status"] == "cancelled"
    assert await control.trace(never) == []


@pytest.mark.parametrize("model", MODELS)
async def test_many_websocket_disconnects_free_their_slots(client, control, name, model):
    runs = [name() for _ in range(40)]

    async def connect_and_disconnect(run):
        async with client.websocket() as socket:
            await socket.send_request(model=model, input=script({"run": run}, "hello", {"gate": "never"}))
            await socket.until("response.output_text.delta")

    async with anyio.create_task_group() as group:
        for run in runs:
            group.start_soon(connect_and_disconnect, run)
    for run in runs:
        await control.wait_for(run, "ended")
    assert output_text(await client.create(input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", MODELS)
async def test_slow_websocket_reader_gets_backpressure_and_all_events(client, control, name, model):
    run, piece, times = name(), "x" * 2_000, 5_000
    steps = [{"run": run}, {"often": piece, "times": times}, {"mark": "all sent"}, "end"]
    async with client.websocket() as socket:
        socket.connection.shrink_receive_buffer()
        await socket.send_request(model=model, input=script(*steps))
        await control.wait_for(run, "started")
        with pytest.raises(AssertionError, match="no 'all sent'"):
            await control.wait_for(run, "all sent", within=0.5)
        size = 0
        while (event := await socket.next())["type"] != "response.output_text.done":
            size += len(event.get("delta", ""))
    assert size == times * len(piece) + 3


async def test_unread_websocket_is_closed(short_timeouts, name):
    (client, control), run = short_timeouts, name()
    async with client.websocket() as socket:
        socket.connection.shrink_receive_buffer()
        await socket.send_request(input=script({"run": run}, {"often": "x" * 2_000, "times": 10**9}))
        await control.wait_for(run, "ended")


# Connecting, limits and timeouts.


async def test_invalid_key_is_refused_before_upgrade(client):
    reply = await client.with_key("Bearer stranger").get("/responses", headers=UPGRADE)
    reply.error(401)
    (await client.with_key("").get("/responses", headers=UPGRADE)).error(401)


async def test_foreign_origin_is_refused_before_upgrade(client):
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        (await client.get("/responses", headers={**UPGRADE, "Origin": origin})).error(403, "origin_not_allowed")
    async with client.websocket(headers={"Origin": f"http://127.0.0.1:{client.port}"}) as socket:
        assert output_text(await socket.complete(input=script("text"))) == "text"


async def test_allowed_origin_may_connect(short_timeouts):
    client, _ = short_timeouts
    async with client.websocket(headers={"Origin": ALLOWED_ORIGIN}) as socket:
        assert output_text(await socket.complete(input=script("text"))) == "text"


async def test_get_without_upgrade_returns_426(client, server):
    reply = await client.get("/responses")
    reply.error(426)
    # PEP 3333 does not let apps send hop-by-hop headers.
    assert reply.headers.get("upgrade", "").lower() == ("websocket" if server.host.has_lifespan else "")


async def open_websocket(client, sockets):
    """Open a WebSocket as soon as the limit allows it."""
    with anyio.fail_after(DEFAULT_TIMEOUT):
        while True:
            with suppress(AssertionError):
                socket = await sockets.enter_async_context(client.websocket())
                return await socket.complete(input=script("text"))
            await anyio.lowlevel.checkpoint()


async def test_websockets_beyond_limit_are_refused(few_websockets):
    async with AsyncExitStack() as sockets:
        for _ in range(MAX_WEBSOCKETS):
            await open_websocket(few_websockets, sockets)
        (await few_websockets.get("/responses", headers=UPGRADE)).error(503)
        assert output_text(await few_websockets.create(input=script("over HTTP"))) == "over HTTP"
    async with AsyncExitStack() as sockets:
        await open_websocket(few_websockets, sockets)


async def test_websocket_is_closed_at_timeout(short_timeouts):
    client, _ = short_timeouts
    async with client.websocket() as socket:
        assert output_text(await socket.complete(input=script("text"))) == "text"
        await socket.read_error(400, "websocket_connection_limit_reached")
        assert await socket.next() is None
        assert socket.code == 1000


async def test_running_response_finishes_after_websocket_timeout(short_timeouts, name):
    (client, control), gate = short_timeouts, name()
    async with client.websocket() as socket:
        await socket.send_request(input=script("one ", {"gate": gate}, "two"))
        await socket.until("response.output_text.delta")
        await anyio.sleep(2 * WEBSOCKET_TIMEOUT)  # longer than the timeout
        await control.open_gate(gate)
        completed = await socket.until("response.completed")
        assert output_text(completed["response"]) == "one two"
        await socket.read_error(400, "websocket_connection_limit_reached")
        assert await socket.next() is None
        assert socket.code == 1000
