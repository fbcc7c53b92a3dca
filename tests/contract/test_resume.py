"""A stream told again: from any of its events on, byte for byte, and live to its end."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest

from tests.support.conformance import check_stream

from . import hosts
from .client import PATIENCE, Client, Hand, call, functions, output_text, script
from .hosts import ASYNC
from .test_leaving import KINDS

SERVED_BY = ASYNC

pytestmark = [pytest.mark.anyio, pytest.mark.unbound]

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
def single(start):
    """A client of a kit whose foreground streams can be resumed too, and its hand; the same on every host."""
    server = start(hosts.single(), "single")
    yield Client(server.port), Hand(server.control)
    server.check_log()


async def refused(client, response_id, query, status, code, param):
    (await client.get(f"/responses/{response_id}?stream=true{query}")).error(status, code, param)


# Again, after the end.


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("model", KINDS)
async def test_a_stream_is_told_again_from_every_place(client, model, ending):
    fields = {"input": script(*ALL_KINDS, *ENDINGS[ending]), "tools": functions("f")}
    async with client.stream(background=True, model=model, **fields) as stream:
        response_id = (await stream.next())["response"]["id"]
        blocks = [stream.writes[0].split(b"\n\n")[0], *await stream.blocks()]
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
async def test_beyond_the_end_there_is_nothing_but_done(client, beyond):
    for background in (True, False):
        final = await client.create(background=background, input=script("text"))
        await client.ended(final["id"])
        async with client.follow(final["id"]) as stream:
            await stream.rest()
        async with client.follow(final["id"], len(stream.events) - 1 + beyond) as again:
            assert await again.blocks() == [DONE]


async def test_a_stream_that_is_told_again_has_the_headers_of_a_stream(client):
    first = await client.create(background=True, input=script("text" * 100))
    await client.ended(first["id"])
    for after in (None, 2, 1000):
        async with client.follow(first["id"], after) as stream:
            assert stream.headers["content-type"].split(";")[0] == "text/event-stream"
            assert stream.headers["cache-control"] == "no-cache"
            assert stream.headers["x-accel-buffering"] == "no"
            assert "content-length" not in stream.headers
            assert "content-encoding" not in stream.headers
            await stream.blocks()


async def test_without_stream_the_response_itself_is_told(client):
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
async def test_a_place_that_is_none_is_a_400(client, hand, name, after):
    gate = name()
    first = await client.create(background=True, input=script({"gate": gate}, "text"))
    told = await client.create(input=script("text"))
    for response_id in (first["id"], told["id"]):
        await refused(client, response_id, f"&starting_after={after}", 400, "invalid_request", "starting_after")
    await hand.open(gate)
    await client.ended(first["id"])
    await refused(client, first["id"], f"&starting_after={after}", 400, "invalid_request", "starting_after")


# Live.


@pytest.mark.parametrize("model", KINDS)
async def test_a_stream_is_followed_live_from_every_place_to_its_end(client, hand, name, model):
    gates = [name() for _ in range(3)]
    moves = [*ALL_KINDS[:5], {"gate": gates[0]}, *ALL_KINDS[5:8], {"gate": gates[1]}, *ALL_KINDS[8:]]
    fields = {"model": model, "input": script(*moves, {"gate": gates[2]}), "tools": functions("f")}
    told = {}

    async def follow(response_id, after, ready):
        async with client.follow(response_id, after) as stream:
            ready.set()
            told[after] = await stream.blocks()

    async with client.stream(background=True, **fields) as stream, anyio.create_task_group() as group:
        blocks = [(await stream.frame()).raw]
        response_id = check_begun(blocks[0])
        for gate, kind in zip(
            gates, ("output_text.delta", "refusal.delta", "function_call_arguments.delta"), strict=True
        ):
            while f"response.{kind}" not in blocks[-1].decode():
                frame = await stream.frame()
                if not frame.comment:
                    blocks.append(frame.raw)
            # Whoever comes now is given what there was, and then what comes; also from a place yet to come.
            for after in (None, *range(len(blocks) + 5)):
                if after not in told:
                    told[after], ready = None, anyio.Event()
                    group.start_soon(follow, response_id, after, ready)
                    await ready.wait()
            await hand.open(gate)
        blocks += await stream.blocks()
    assert blocks[-1] == DONE
    assert told.pop(None) == blocks
    assert len(told) > 20
    for after, heard in told.items():
        assert heard == (blocks[after + 1 :] or [DONE]), f"after {after}"
    async with client.follow(response_id) as stream:
        await stream.rest()


def check_begun(block):
    """The id of the response whose stream begins with this block."""
    text = block.decode()
    assert text.startswith("event: response.created\n")
    return text.partition('"response":{"id":"')[2].partition('"')[0]


@pytest.mark.parametrize("model", KINDS)
async def test_whoever_follows_has_each_delta_before_the_next_is_made(client, hand, name, model):
    gates = [name() for _ in range(5)]
    moves = [move for gate in gates for move in (f"to {gate} ", {"gate": gate})]
    first = await client.create(background=True, model=model, input=script(*moves))
    async with client.follow(first["id"]) as stream:
        for gate in gates:
            assert (await stream.until("response.output_text.delta"))["delta"] == f"to {gate} "
            await hand.open(gate)
        assert (await stream.rest()) == (await client.get(f"/responses/{first['id']}")).json()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_client_that_lost_its_connection_goes_on_where_it_was(client, hand, name, reset):
    gates = [name(), name()]
    moves = ["a ", {"gate": gates[0]}, "b ", {"gate": gates[1]}, "c"]
    async with client.stream(background=True, input=script(*moves)) as stream:
        last = await stream.until("response.output_text.delta")
        await stream.connection.leave(reset=reset)
    events, response_id = stream.events, stream.events[0]["response"]["id"]
    await hand.open(gates[0])
    async with client.follow(response_id, last["sequence_number"]) as stream:
        last = await stream.until("response.output_text.delta")
        assert last["delta"] == "b "
        await stream.connection.leave(reset=reset)
    events += stream.events
    await hand.open(gates[1])
    await client.ended(response_id)
    async with client.follow(response_id, last["sequence_number"]) as stream:
        while await stream.next():
            pass
    assert stream.done
    final = check_stream([*events, *stream.events])
    assert final == (await client.get(f"/responses/{response_id}")).json()
    assert output_text(final) == "a b c"


@pytest.mark.parametrize("after", [None, 1, 1000])
async def test_comments_fill_the_silence_and_have_no_number(client, hand, name, after):
    gate = name()
    first = await client.create(background=True, input=script("half", {"gate": gate}, " whole"))
    async with client.follow(first["id"], after) as stream:
        with anyio.fail_after(PATIENCE):
            while stream.comments < 3:
                frame = await stream.frame()
                stream.comments += frame.comment
        await hand.open(gate)
        blocks = await stream.blocks()
    assert blocks[-1] == DONE
    async with client.follow(first["id"]) as stream:
        assert output_text(await stream.rest()) == "half whole"


async def test_a_stream_begins_at_once_though_there_is_nothing_new(single, name):
    # Whoever goes on from the last event waits for the next one, but not for the reply's head.
    client, hand = single
    gate = name()
    async with client.stream(background=True, input=script("half", {"gate": gate}, " whole")) as stream:
        last = await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        try:
            async with client.follow(response_id, last["sequence_number"]) as following:
                await hand.open(gate)
                assert (await following.next())["delta"] == " whole"
        finally:
            await hand.open(gate)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("model", KINDS)
async def test_followers_that_leave_do_not_end_what_they_followed(client, hand, name, model, reset):
    gate, run = name(), name()
    first = await client.create(
        background=True, model=model, input=script({"run": run}, "half", {"gate": gate}, " whole")
    )

    async def come_and_go():
        async with client.follow(first["id"]) as stream:
            await stream.until("response.output_text.delta")
            await stream.connection.leave(reset=reset)

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(come_and_go)
    with pytest.raises(AssertionError, match="was not ended"):
        await hand.seen(run, "ended", within=1.5)
    await hand.open(gate)
    final = await client.ended(first["id"])
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert (await hand.seen(run, "ended"))["how"] == "returned"


async def test_a_follower_that_does_not_read_holds_nobody_up_and_misses_nothing(client, hand, name):
    run, gate, piece, times = name(), name(), "x" * 10_000, 400
    moves = [{"run": run}, {"gate": gate}, {"often": piece, "times": times}, {"mark": "all made"}, "end"]
    first = await client.create(background=True, input=script(*moves))
    async with client.follow(first["id"]) as slow:
        slow.connection.narrow()
        await slow.until("response.in_progress")
        await hand.open(gate)
        async with client.follow(first["id"]) as fast:
            assert (await fast.blocks())[-1] == DONE
        await hand.seen(run, "all made")
        assert len(output_text(await slow.rest())) == times * len(piece) + 3


async def test_32_followers_are_told_the_same(client, hand, name):
    gate = name()
    moves = ["a ", {"gate": gate}, *(f"{number} " for number in range(50))]
    first = await client.create(background=True, input=script(*moves))
    told = []
    async with AsyncExitStack() as streams, anyio.create_task_group() as group:
        followers = [await streams.enter_async_context(client.follow(first["id"])) for _ in range(32)]

        async def hear(stream):
            told.append(await stream.blocks())

        for stream in followers:
            group.start_soon(hear, stream)
        await hand.open(gate)
    assert len(told) == 32
    assert all(heard == told[0] for heard in told)


# What was not streamed, or not kept.


@pytest.mark.parametrize("ending", ENDINGS)
async def test_what_was_not_streamed_is_told_as_the_stream_that_it_implies(client, hand, name, ending):
    run = name()
    moves = [{"run": run}, *ALL_KINDS, *ENDINGS[ending]]
    fields = {"tools": functions("f"), "include": ["reasoning.encrypted_content"]}
    await client.post(input=script(*moves), **fields)
    response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
    final = await client.ended(response_id)
    assert final["status"] == ending
    async with client.follow(response_id) as stream:
        assert await stream.rest() == final
    async with client.follow(response_id) as stream:
        blocks = await stream.blocks()
    for number in range(len(blocks) - 1):
        async with client.follow(response_id, number) as stream:
            assert await stream.blocks() == blocks[number + 1 :], f"after {number}"


@pytest.mark.parametrize(
    "moves",
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
async def test_a_response_of_any_shape_can_be_told(client, hand, name, moves):
    run = name()
    await client.post(
        input=script({"run": run}, *moves), tools=functions("f"), include=["message.output_text.logprobs"]
    )
    final = await client.ended((await hand.seen(run, "started"))["turn"]["response_id"])
    async with client.follow(final["id"]) as stream:
        assert await stream.rest() == final


async def test_what_hosted_tools_did_can_be_told(client):
    moves = [{"rounds": [["let me see", call("add", {"a": 1, "b": 2}), call("add", {"a": 99, "b": 2})], ["three"]]}]
    fields = {"input": script(*moves), "tools": [{"type": "test:add"}]}
    final = await client.create(**fields)
    async with client.follow(final["id"]) as stream:
        assert await stream.rest() == final
    async with client.stream(background=True, **fields) as stream:
        final = await stream.rest()
    async with client.follow(final["id"]) as stream:
        assert await stream.rest() == final


async def test_what_is_not_streamed_cannot_be_followed_while_it_is_made(client, hand, name):
    gate, run = name(), name()
    async with client.open({"input": script({"run": run}, {"gate": gate}, "text")}) as connection:
        response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
        await refused(client, response_id, "", 400, "events_not_kept", "stream")
        await refused(client, response_id, "&starting_after=0", 400, "events_not_kept", "stream")
        await hand.open(gate)
        assert (await connection.head())[0] == 200
        await connection.body()
    async with client.follow(response_id) as stream:
        assert output_text(await stream.rest()) == "text"


async def test_a_foreground_stream_that_is_not_kept_cannot_be_resumed(client, hand, name):
    gate = name()
    async with client.stream(input=script("half", {"gate": gate}, " whole")) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        await refused(client, response_id, "", 400, "events_not_kept", "stream")
        await refused(client, response_id, "&starting_after=2", 400, "events_not_kept", "stream")
        await hand.open(gate)
        final = await stream.rest()
    # Other events may have been told than those that the response implies: the places are not the same.
    await refused(client, response_id, "&starting_after=2", 400, "events_not_kept", "starting_after")
    async with client.follow(response_id) as stream:
        assert await stream.rest() == final


async def test_a_foreground_stream_that_is_kept_can_be_resumed_while_its_client_is_there(single, name):
    client, hand = single
    gate = name()
    async with client.stream(input=script("half", {"gate": gate}, " whole")) as stream:
        blocks = [(await stream.frame()).raw]
        response_id = check_begun(blocks[0])
        async with client.follow(response_id, 1) as following:
            await hand.open(gate)
            blocks += await stream.blocks()
            assert await following.blocks() == blocks[2:]
    for number in range(len(blocks) - 1):
        async with client.follow(response_id, number) as again:
            assert await again.blocks() == blocks[number + 1 :]


async def test_a_foreground_stream_that_is_kept_still_ends_with_its_client(single, name):
    client, hand = single
    run = name()
    async with client.stream(input=script({"run": run}, "half", {"gate": "never"})) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        async with client.follow(response_id) as following:
            await stream.connection.leave()
            final = await following.rest()
    assert (final["status"], output_text(final)) == ("cancelled", "half")
    await hand.seen(run, "ended")
    assert (await client.get(f"/responses/{response_id}")).json() == final


@pytest.mark.clock
async def test_events_go_before_their_response_does(client, hand):
    final = await client.create(background=True, input=script("text"))
    final = await client.ended(final["id"])
    await hand.later(2 * 60 * 60)
    (await client.get(f"/responses/{final['id']}?stream=true&starting_after=1")).error(400, "events_not_kept")
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_what_does_not_exist_cannot_be_told(client):
    gone = await client.create(background=True, input=script("text"))
    await client.ended(gone["id"])
    await client.delete(f"/responses/{gone['id']}")
    unkept = await client.create(store=False, input=script("text"))
    for response_id in ("resp_of_nobody", gone["id"], unkept["id"]):
        for query in ("", "&starting_after=0", "&starting_after=1000"):
            await refused(client, response_id, query, 404, "response_not_found", None)
