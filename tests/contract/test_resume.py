"""Resumed streams: from any event on, byte for byte, and live to the end."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest

from tests.support.conformance import check_stream

from . import hosts
from .client import DEFAULT_TIMEOUT, Client, ControlClient, call, functions, output_text, script
from .hosts import ASYNC_HOSTS
from .test_disconnects import MODELS

SERVED_BY = ASYNC_HOSTS

pytestmark = [pytest.mark.anyio, pytest.mark.independent]

DONE = b"data: [DONE]"
ALL_KINDS = [
    {"ReasoningSummary": {"text": "h", "new_part": True}},
    {"ReasoningSummary": {"text": "m"}},
    {"Reasoning": {"text": "hmm"}},
    {"Message": {"phase": "commentary"}},
    "one \U0001f600 ",
    "data: [DONE]\n\nevent: x\n\n",
    {"Annotation": {"url": "https://example.com", "title": "t", "start_index": 0, "end_index": 3}},
    {"Refusal": {"text": "no"}},
    {"Item": {"type": "acme:thing", "fields": {"a": [1]}}},
    {"ToolCall": {"name": "f", "arguments": '{"a"'}},
    {"ToolArguments": {"delta": ": 1}"}},
    call("f", {"b": 2}),
    {"Usage": {"input_tokens": 3, "output_tokens": 2}},
]
ENDINGS = {
    "completed": [],
    "incomplete": ["half", {"Finish": {"reason": "max_output_tokens"}}],
    "failed": ["half", {"raise": "no"}],
}


@pytest.fixture
def serial(start):
    """A client and the control of a kit that logs the events of foreground streams, on one host."""
    server = start(hosts.settings_host(), "serial")
    yield Client(server.port), ControlClient(server.control_port)
    server.check_log()


async def check_refused(client, response_id, query, status, code, param):
    (await client.get(f"/responses/{response_id}?stream=true{query}")).error(status, code, param)


# After the end.


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("model", MODELS)
async def test_finished_stream_is_resumed_from_every_event(client, model, ending):
    fields = {"input": script(*ALL_KINDS, *ENDINGS[ending]), "tools": functions("f")}
    async with client.stream(background=True, model=model, **fields) as stream:
        response_id = (await stream.next())["response"]["id"]
        blocks = [stream.chunks[0].split(b"\n\n")[0], *await stream.blocks()]
    assert blocks.pop() == DONE
    async with client.follow(response_id) as stream:
        final = await stream.rest()
    assert final["status"] == ending
    assert (await client.get(f"/responses/{response_id}")).json() == final
    assert [event["sequence_number"] for event in stream.events] == list(range(len(blocks)))
    async with client.follow(response_id) as stream:
        assert await stream.blocks() == [*blocks, DONE]
    for number in range(len(blocks)):
        async with client.follow(response_id, number) as stream:
            assert await stream.blocks() == [*blocks[number + 1 :], DONE], f"after {number}"


@pytest.mark.parametrize("beyond", [0, 1, 100, 999_999_999_999])
async def test_resume_beyond_end_sends_only_done(client, beyond):
    for background in (True, False):
        final = await client.create(background=background, input=script("text"))
        await client.wait_for_end(final["id"])
        async with client.follow(final["id"]) as stream:
            await stream.rest()
        async with client.follow(final["id"], len(stream.events) - 1 + beyond) as resumed:
            assert await resumed.blocks() == [DONE]


async def test_resumed_stream_has_stream_headers(client):
    first = await client.create(background=True, input=script("text" * 100))
    await client.wait_for_end(first["id"])
    for after in (None, 2, 1000):
        async with client.follow(first["id"], after) as stream:
            assert stream.headers["content-type"].split(";")[0] == "text/event-stream"
            assert stream.headers["cache-control"] == "no-cache"
            assert stream.headers["x-accel-buffering"] == "no"
            assert "content-length" not in stream.headers
            assert "content-encoding" not in stream.headers
            await stream.blocks()


async def test_get_without_stream_returns_response_object(client):
    final = await client.create(input=script("text"))
    for query in ("", "?stream=false", "?include[]=x", "?unknown=1"):
        assert (await client.get(f"/responses/{final['id']}{query}")).json() == final
    async with client.connect() as connection:
        path = f"{client.prefix}/responses/{final['id']}/?stream=true"
        await connection.send_bytes(client.request_bytes(connection, "GET", path, None, {"Accept": "text/html"}))
        status, headers = await connection.head()
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        assert (await connection.body()).endswith(b"\n\n" + DONE + b"\n\n")


@pytest.mark.parametrize(
    "after", ["-1", "x", "1.5", "1e3", "%2B1", "%20", "0x1", "null", "%D9%A3", "1,2", "9" * 20, "9" * 5000]
)
async def test_invalid_starting_after_returns_400(client, control, name, after):
    gate = name()
    first = await client.create(background=True, input=script({"gate": gate}, "text"))
    turn = await client.create(input=script("text"))
    for response_id in (first["id"], turn["id"]):
        await check_refused(client, response_id, f"&starting_after={after}", 400, "invalid_request", "starting_after")
    await control.open_gate(gate)
    await client.wait_for_end(first["id"])
    await check_refused(client, first["id"], f"&starting_after={after}", 400, "invalid_request", "starting_after")


# Live.


@pytest.mark.parametrize("model", MODELS)
async def test_running_stream_is_followed_from_every_event(client, control, name, model):
    gates = [name() for _ in range(3)]
    steps = [*ALL_KINDS[:5], {"gate": gates[0]}, *ALL_KINDS[5:8], {"gate": gates[1]}, *ALL_KINDS[8:]]
    fields = {"model": model, "input": script(*steps, {"gate": gates[2]}), "tools": functions("f")}
    turn = {}

    async def follow(response_id, after, ready):
        async with client.follow(response_id, after) as stream:
            ready.set()
            turn[after] = await stream.blocks()

    async with client.stream(background=True, **fields) as stream, anyio.create_task_group() as group:
        blocks = [(await stream.frame()).raw]
        response_id = check_begun(blocks[0])
        for gate, kind in zip(
            gates, ("output_text.delta", "refusal.delta", "function_call_arguments.delta"), strict=True
        ):
            while f"response.{kind}" not in blocks[-1].decode():
                frame = await stream.frame()
                if not frame.is_comment:
                    blocks.append(frame.raw)
            # A follower gets the logged events and then the live ones, also from a future position.
            for after in (None, *range(len(blocks) + 5)):
                if after not in turn:
                    turn[after], ready = None, anyio.Event()
                    group.start_soon(follow, response_id, after, ready)
                    await ready.wait()
            await control.open_gate(gate)
        blocks += await stream.blocks()
    assert blocks[-1] == DONE
    assert turn.pop(None) == blocks
    assert len(turn) > 20
    for after, received in turn.items():
        assert received == (blocks[after + 1 :] or [DONE]), f"after {after}"
    async with client.follow(response_id) as stream:
        await stream.rest()


def check_begun(block):
    """Return the id of the response whose stream begins with this block."""
    text = block.decode()
    assert text.startswith("event: response.created\n")
    return text.partition('"response":{"id":"')[2].partition('"')[0]


@pytest.mark.parametrize("model", MODELS)
async def test_follower_receives_each_delta_before_the_next_is_generated(client, control, name, model):
    gates = [name() for _ in range(5)]
    steps = [step for gate in gates for step in (f"to {gate} ", {"gate": gate})]
    first = await client.create(background=True, model=model, input=script(*steps))
    async with client.follow(first["id"]) as stream:
        for gate in gates:
            assert (await stream.until("response.output_text.delta"))["delta"] == f"to {gate} "
            await control.open_gate(gate)
        assert (await stream.rest()) == (await client.get(f"/responses/{first['id']}")).json()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_client_resumes_after_lost_connection(client, control, name, reset):
    gates = [name(), name()]
    steps = ["a ", {"gate": gates[0]}, "b ", {"gate": gates[1]}, "c"]
    async with client.stream(background=True, input=script(*steps)) as stream:
        last = await stream.until("response.output_text.delta")
        await stream.connection.disconnect(reset=reset)
    events, response_id = stream.events, stream.events[0]["response"]["id"]
    await control.open_gate(gates[0])
    async with client.follow(response_id, last["sequence_number"]) as stream:
        last = await stream.until("response.output_text.delta")
        assert last["delta"] == "b "
        await stream.connection.disconnect(reset=reset)
    events += stream.events
    await control.open_gate(gates[1])
    await client.wait_for_end(response_id)
    async with client.follow(response_id, last["sequence_number"]) as stream:
        while await stream.next():
            pass
    assert stream.done
    final = check_stream([*events, *stream.events])
    assert final == (await client.get(f"/responses/{response_id}")).json()
    assert output_text(final) == "a b c"


@pytest.mark.parametrize("after", [None, 1, 1000])
async def test_idle_resumed_stream_gets_comments(client, control, name, after):
    gate = name()
    first = await client.create(background=True, input=script("half", {"gate": gate}, " whole"))
    async with client.follow(first["id"], after) as stream:
        with anyio.fail_after(DEFAULT_TIMEOUT):
            while stream.comments < 3:
                frame = await stream.frame()
                stream.comments += frame.is_comment
        await control.open_gate(gate)
        blocks = await stream.blocks()
    assert blocks[-1] == DONE
    async with client.follow(first["id"]) as stream:
        assert output_text(await stream.rest()) == "half whole"


async def test_resumed_stream_starts_immediately_without_new_events(serial, name):
    # A client that resumes after the last event waits for the next one, but not for the reply's head.
    client, control = serial
    gate = name()
    async with client.stream(background=True, input=script("half", {"gate": gate}, " whole")) as stream:
        last = await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        try:
            async with client.follow(response_id, last["sequence_number"]) as following:
                await control.open_gate(gate)
                assert (await following.next())["delta"] == " whole"
        finally:
            await control.open_gate(gate)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("model", MODELS)
async def test_disconnect_of_followers_does_not_end_response(client, control, name, model, reset):
    gate, run = name(), name()
    first = await client.create(
        background=True, model=model, input=script({"run": run}, "half", {"gate": gate}, " whole")
    )

    async def connect_and_disconnect():
        async with client.follow(first["id"]) as stream:
            await stream.until("response.output_text.delta")
            await stream.connection.disconnect(reset=reset)

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(connect_and_disconnect)
    with pytest.raises(AssertionError, match="no 'ended'"):
        await control.wait_for(run, "ended", within=1.5)
    await control.open_gate(gate)
    final = await client.wait_for_end(first["id"])
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert (await control.wait_for(run, "ended"))["how"] == "returned"


async def test_slow_follower_delays_nothing_and_misses_nothing(client, control, name):
    run, gate, piece, times = name(), name(), "x" * 10_000, 400
    steps = [{"run": run}, {"gate": gate}, {"often": piece, "times": times}, {"mark": "all sent"}, "end"]
    first = await client.create(background=True, input=script(*steps))
    async with client.follow(first["id"]) as slow:
        slow.connection.shrink_receive_buffer()
        await slow.until("response.in_progress")
        await control.open_gate(gate)
        async with client.follow(first["id"]) as fast:
            assert (await fast.blocks())[-1] == DONE
        await control.wait_for(run, "all sent")
        assert len(output_text(await slow.rest())) == times * len(piece) + 3


async def test_32_followers_receive_the_same_events(client, control, name):
    gate = name()
    steps = ["a ", {"gate": gate}, *(f"{number} " for number in range(50))]
    first = await client.create(background=True, input=script(*steps))
    turn = []
    async with AsyncExitStack() as streams, anyio.create_task_group() as group:
        followers = [await streams.enter_async_context(client.follow(first["id"])) for _ in range(32)]

        async def hear(stream):
            turn.append(await stream.blocks())

        for stream in followers:
            group.start_soon(hear, stream)
        await control.open_gate(gate)
    assert len(turn) == 32
    assert all(received == turn[0] for received in turn)


# Responses that were not streamed or not logged.


@pytest.mark.parametrize("ending", ENDINGS)
async def test_unstreamed_response_is_synthesized_as_stream(client, control, name, ending):
    run = name()
    steps = [{"run": run}, *ALL_KINDS, *ENDINGS[ending]]
    fields = {"tools": functions("f"), "include": ["reasoning.encrypted_content"]}
    await client.post(input=script(*steps), **fields)
    response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
    final = await client.wait_for_end(response_id)
    assert final["status"] == ending
    async with client.follow(response_id) as stream:
        assert await stream.rest() == final
    async with client.follow(response_id) as stream:
        blocks = await stream.blocks()
    for number in range(len(blocks) - 1):
        async with client.follow(response_id, number) as stream:
            assert await stream.blocks() == blocks[number + 1 :], f"after {number}"


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [""],
        [{"Message": {}}, {"Message": {}}],
        ["a", {"Message": {}}, "b", {"Message": {"phase": "final_answer"}}, "c"],
        [{"Refusal": {"text": "no"}}, "but", {"Refusal": {"text": "no"}}],
        [{"Reasoning": {"text": ""}}, "a", {"Reasoning": {"text": "b"}}],
        [{"Reasoning": {"text": "a"}}, {"ReasoningSummary": {"text": "b"}}, {"Reasoning": {"text": "c"}}],
        [{"ReasoningSummary": {"text": "a", "new_part": True}}, {"ReasoningSummary": {"text": "b", "new_part": True}}],
        [{"ToolCall": {"name": "f", "arguments": ""}}],
        [{"ToolCall": {"name": "f", "arguments": "{broken"}}],
        [{"ToolCall": {"name": "f", "arguments": "{"}}, {"Finish": {"reason": "max_output_tokens"}}],
        [{"Reasoning": {"text": "cut"}}, {"Finish": {"reason": "content_filter"}}],
        [{"Finish": {"reason": "max_output_tokens"}}],
        [{"Item": {"type": "acme:thing", "status": "failed", "fields": {}}}, "after"],
        [{"Item": {"type": "acme:thing", "status": "in_progress", "key": "a"}}],
        [{"Item": {"type": "acme:thing", "status": "in_progress", "key": "a"}}, {"raise": "no"}],
        ["a\u2028\ud83d \U0001f600" * 100],
        [{"raise": "at once"}],
        [{"Text": {"text": "a", "logprobs": [{"token": "a", "logprob": "-inf", "top": []}]}}],
    ],
)
async def test_response_of_any_shape_is_synthesized(client, control, name, steps):
    run = name()
    await client.post(
        input=script({"run": run}, *steps), tools=functions("f"), include=["message.output_text.logprobs"]
    )
    final = await client.wait_for_end((await control.wait_for(run, "started"))["turn"]["response_id"])
    async with client.follow(final["id"]) as stream:
        assert await stream.rest() == final


async def test_hosted_tool_items_are_replayed(client):
    steps = [{"rounds": [["let me see", call("add", {"a": 1, "b": 2}), call("add", {"a": 99, "b": 2})], ["three"]]}]
    fields = {"input": script(*steps), "tools": [{"type": "test:add"}]}
    final = await client.create(**fields)
    async with client.follow(final["id"]) as stream:
        assert await stream.rest() == final
    async with client.stream(background=True, **fields) as stream:
        final = await stream.rest()
    async with client.follow(final["id"]) as stream:
        assert await stream.rest() == final


async def test_unstreamed_response_cannot_be_followed_while_in_progress(client, control, name):
    gate, run = name(), name()
    async with client.open_request({"input": script({"run": run}, {"gate": gate}, "text")}) as connection:
        response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
        await check_refused(client, response_id, "", 400, "events_not_kept", "stream")
        await check_refused(client, response_id, "&starting_after=0", 400, "events_not_kept", "stream")
        await control.open_gate(gate)
        assert (await connection.head())[0] == 200
        await connection.body()
    async with client.follow(response_id) as stream:
        assert output_text(await stream.rest()) == "text"


async def test_unlogged_foreground_stream_cannot_be_resumed(client, control, name):
    gate = name()
    async with client.stream(input=script("half", {"gate": gate}, " whole")) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        await check_refused(client, response_id, "", 400, "events_not_kept", "stream")
        await check_refused(client, response_id, "&starting_after=2", 400, "events_not_kept", "stream")
        await control.open_gate(gate)
        final = await stream.rest()
    # The stream may have had other events than those synthesized from the response, at other positions.
    await check_refused(client, response_id, "&starting_after=2", 400, "events_not_kept", "starting_after")
    async with client.follow(response_id) as stream:
        assert await stream.rest() == final


async def test_logged_foreground_stream_is_resumed_while_connected(serial, name):
    client, control = serial
    gate = name()
    async with client.stream(input=script("half", {"gate": gate}, " whole")) as stream:
        blocks = [(await stream.frame()).raw]
        response_id = check_begun(blocks[0])
        async with client.follow(response_id, 1) as following:
            await control.open_gate(gate)
            blocks += await stream.blocks()
            assert await following.blocks() == blocks[2:]
    for number in range(len(blocks) - 1):
        async with client.follow(response_id, number) as resumed:
            assert await resumed.blocks() == blocks[number + 1 :]


async def test_logged_foreground_stream_ends_with_its_client(serial, name):
    client, control = serial
    run = name()
    async with client.stream(input=script({"run": run}, "half", {"gate": "never"})) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        async with client.follow(response_id) as following:
            await stream.connection.disconnect()
            final = await following.rest()
    assert (final["status"], output_text(final)) == ("cancelled", "half")
    await control.wait_for(run, "ended")
    assert (await client.get(f"/responses/{response_id}")).json() == final


@pytest.mark.clock
async def test_event_log_expires_before_response(client, control):
    final = await client.create(background=True, input=script("text"))
    final = await client.wait_for_end(final["id"])
    await control.advance_clock(2 * 60 * 60)
    (await client.get(f"/responses/{final['id']}?stream=true&starting_after=1")).error(400, "events_not_kept")
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_resume_returns_404_for_unknown_id(client):
    expired = await client.create(background=True, input=script("text"))
    await client.wait_for_end(expired["id"])
    await client.delete(f"/responses/{expired['id']}")
    unkept = await client.create(store=False, input=script("text"))
    for response_id in ("resp_of_nobody", expired["id"], unkept["id"]):
        for query in ("", "&starting_after=0", "&starting_after=1000"):
            await check_refused(client, response_id, query, 404, "response_not_found", None)
