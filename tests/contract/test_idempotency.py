"""Idempotency-Key: a request that is sent again is not answered anew, but told the answer that there is."""

from __future__ import annotations

import json

import anyio
import pytest

from tests.support.conformance import check_response

from .client import PATIENCE, Reply, functions, output_text, script, to_bytes
from .hosts import FARTHEST
from .test_leaving import KINDS

pytestmark = [pytest.mark.anyio, pytest.mark.unbound]

SERVED_BY = FARTHEST
DONE = b"data: [DONE]"


async def posted(client, key, **fields):
    """`POST /responses` with a key, whatever comes of it; a stream is read whole."""
    body = {"model": "puppet", **fields}
    return await client.request("POST", "/responses", json=body, headers={"Idempotency-Key": key})


def without_comments(body):
    return [block for block in body.split(b"\n\n") if not block.startswith(b":")]


async def generations(hand, run):
    return (await hand.record(run)).count("started")


@pytest.mark.parametrize("model", KINDS)
async def test_requests_with_one_key_at_once_are_one_generation(client, hand, name, stream, model):
    key, run, gate = name(), name(), name()
    fields = {"model": model, "stream": stream, "input": script({"run": run}, "half", {"gate": gate}, " whole")}
    replies = []

    async def post():
        replies.append(await posted(client, key, **fields))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(post)
        await hand.seen(run, "started")
        replies_before = len(replies)
        await hand.open(gate)
    assert replies_before == 0
    replies.append(await posted(client, key, **fields))
    assert {reply.status for reply in replies} == {200}
    assert len({tuple(without_comments(reply.body)) for reply in replies}) == 1
    assert await generations(hand, run) == 1
    if stream:
        assert replies[0].body.endswith(b"\n\n" + DONE + b"\n\n")
        assert {reply.headers["content-type"].split(";")[0] for reply in replies} == {"text/event-stream"}
    else:
        check_response(replies[0].json())
        assert output_text(replies[0].json()) == "half whole"
        assert (await client.get(f"/responses/{replies[0].json()['id']}")).json() == replies[0].json()


async def test_a_stream_that_is_asked_for_again_is_told_from_its_beginning_and_live(client, hand, name):
    key, run, gates = name(), name(), [name(), name()]
    fields = {"input": script({"run": run}, "a ", {"gate": gates[0]}, "b ", {"gate": gates[1]}, "c")}
    headers = {"Idempotency-Key": key}
    async with client.stream(headers, **fields) as first:
        await first.until("response.output_text.delta")
        await hand.open(gates[0])
        assert (await first.until("response.output_text.delta"))["delta"] == "b "
        async with client.stream(headers, **fields) as second:
            assert (await second.until("response.output_text.delta"))["delta"] == "a "
            await hand.open(gates[1])
            final = await second.rest()
            assert await first.rest() == final
    assert first.events == second.events
    assert output_text(final) == "a b c"
    assert await generations(hand, run) == 1


async def test_an_answer_with_a_key_is_what_it_is_without(client, name, stream):
    fields = {"stream": stream, "input": script("text"), "metadata": {"a": "b"}}
    plain = await client.request("POST", "/responses", json={"model": "puppet", **fields})
    keyed = await posted(client, name(), **fields)
    assert plain.status == keyed.status == 200
    assert plain.headers.keys() == keyed.headers.keys()
    changing = ("id", "created_at", "completed_at", "item_id")

    def bare(value):
        if isinstance(value, dict):
            return {key: bare(member) for key, member in value.items() if key not in changing}
        return [bare(member) for member in value] if isinstance(value, list) else value

    def told(reply):
        if not stream:
            return bare(reply.json())
        blocks = [block.partition(b"\ndata: ")[2] for block in without_comments(reply.body)]
        return [bare(json.loads(block)) for block in blocks if block]

    assert told(keyed) == told(plain)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("model", KINDS)
async def test_the_first_client_may_leave_and_the_second_has_the_whole_answer(client, hand, name, stream, model, reset):
    key, run, gate = name(), name(), name()
    fields = {"model": model, "stream": stream, "input": script({"run": run}, "half", {"gate": gate}, " whole")}
    async with client.open(fields, {"Idempotency-Key": key}) as connection:
        await hand.seen(run, "started")
        if stream:
            await connection.head()
        await connection.leave(reset=reset)
    with pytest.raises(AssertionError, match="was not ended"):
        await hand.seen(run, "ended", within=1.5)
    replies = []

    async def post():
        replies.append(await posted(client, key, **fields))

    async with anyio.create_task_group() as group:
        group.start_soon(post)
        await hand.open(gate)
    (reply,) = replies
    assert reply.status == 200
    final = (
        json.loads(without_comments(reply.body)[-3].partition(b"\ndata: ")[2])["response"] if stream else reply.json()
    )
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert await generations(hand, run) == 1
    assert (await hand.seen(run, "ended"))["how"] == "returned"


async def test_a_second_client_that_leaves_takes_nothing_from_the_first(client, hand, name):
    key, run, gate = name(), name(), name()
    fields = {"input": script({"run": run}, "half", {"gate": gate}, " whole")}
    async with client.stream({"Idempotency-Key": key}, **fields) as first:
        await first.until("response.output_text.delta")
        async with client.stream({"Idempotency-Key": key}, **fields) as second:
            await second.until("response.output_text.delta")
            await second.connection.leave()
        await hand.open(gate)
        assert output_text(await first.rest()) == "half whole"
    assert await generations(hand, run) == 1


async def test_a_response_in_the_background_is_asked_for_once(client, hand, name):
    key, run, gate = name(), name(), name()
    fields = {"background": True, "input": script({"run": run}, {"gate": gate}, "text")}
    first = (await posted(client, key, **fields)).json()
    check_response(first)
    assert first["status"] == "queued"
    await client.reaches(first["id"], "in_progress")
    under_way = (await posted(client, key, **fields)).json()
    assert (under_way["id"], under_way["status"]) == (first["id"], "in_progress")
    await hand.open(gate)
    final = await client.ended(first["id"])
    assert (await posted(client, key, **fields)).json() == final
    assert await generations(hand, run) == 1


async def test_a_background_stream_with_a_key_is_told_again(client, hand, name):
    key, run = name(), name()
    fields = {"background": True, "stream": True, "input": script({"run": run}, "text")}
    first, second = [await posted(client, key, **fields) for _ in range(2)]
    assert without_comments(first.body) == without_comments(second.body)
    assert await generations(hand, run) == 1


# The same request, and another one.


async def test_the_same_request_may_be_written_otherwise(client, hand, name):
    key, run = name(), name()
    text, fields = script({"run": run}, "text"), {"metadata": {"a": "b", "c": "d"}, "temperature": 1.0}
    first = await posted(client, key, input=text, **fields)
    bodies = [
        {"temperature": 1, "metadata": {"c": "d", "a": "b"}, "input": text, "model": "puppet"},
        {"model": "puppet", "input": text, "tools": None, "client_metadata": {"try": 2}, **fields},
    ]
    for body in bodies:
        for written in (json.dumps(body), json.dumps(body, indent=4), json.dumps(body, separators=(",", ":"))):
            again = await client.request(
                "POST", "/responses", written.encode(), headers={"Idempotency-Key": key}, chunked=True
            )
            assert (again.status, again.body) == (200, first.body)
    assert await generations(hand, run) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"input": "something else"},
        {"model": "puppet-text"},
        {"temperature": 0.5},
        {"metadata": {"a": "c"}},
        {"instructions": "Be brief."},
        {"tools": functions("f")},
        {"text": {"format": {"type": "json_object"}}},
        {"background": True},
    ],
)
async def test_a_key_is_for_one_request(client, hand, name, other):
    key, run = name(), name()
    fields = {"input": script({"run": run}, '"text"'), "metadata": {"a": "b"}}
    first = await posted(client, key, **fields)
    assert first.status == 200
    for stream in (False, True):
        (await posted(client, key, **{**fields, **other, "stream": stream})).error(409, "idempotency_key_reused")
    again = await posted(client, key, **fields)
    assert (again.status, again.body) == (200, first.body)
    assert await generations(hand, run) == 1


async def test_another_request_is_refused_while_the_first_is_made_too(client, hand, name, stream):
    key, run, gate = name(), name(), name()
    body = {"input": script({"run": run}, {"gate": gate}, "text")}
    async with client.open(body, {"Idempotency-Key": key}) as connection:
        await hand.seen(run, "started")
        (await posted(client, key, input="another", stream=stream)).error(409, "idempotency_key_reused")
        await hand.open(gate)
        assert (await connection.head())[0] == 200
        await connection.body()


async def test_another_key_is_another_request_and_so_is_none(client, hand, name):
    run = name()
    fields = {"input": script({"run": run}, "text")}
    replies = [await posted(client, name(), **fields) for _ in range(2)]
    replies += [await client.post(**fields) for _ in range(2)]
    assert len({reply.json()["id"] for reply in replies}) == 4
    assert await generations(hand, run) == 4


@pytest.mark.parametrize("key", ["", "x" * 256, "x" * 5000])
async def test_a_key_that_is_none_or_too_long_is_a_400(client, hand, name, stream, key):
    run = name()
    fields = {"model": "puppet", "stream": stream, "input": script({"run": run}, "text")}
    async with client.connect() as connection:
        path, body = f"{client.prefix}/responses", to_bytes(fields)
        request = client.request_bytes(connection, "POST", path, body, {"Idempotency-Key": key or "none"})
        # The client itself sends no header that is empty.
        await connection.send_bytes(request if key else request.replace(b"Key: none", b"Key: "))
        with anyio.fail_after(PATIENCE):
            reply = Reply(*await connection.head(), await connection.body())
    reply.error(400, param="Idempotency-Key")
    assert await hand.record(run) == []


@pytest.mark.parametrize("key", ["x", "x" * 255, 'a key, with; all = kinds "of" {things}', "caf\u00e9 \u00fc"])
async def test_any_other_key_will_do(client, hand, name, key):
    run = name()
    key = f"{key}{run}"[-255:]
    fields = {"input": script({"run": run}, "text")}
    first, second = [await posted(client, key.encode("latin-1"), **fields) for _ in range(2)]
    assert first.status == 200
    assert first.body == second.body
    assert await generations(hand, run) == 1


async def test_what_is_asked_for_with_a_key_has_to_be_kept(client, hand, name, stream):
    run = name()
    reply = await posted(client, name(), stream=stream, store=False, input=script({"run": run}, "text"))
    reply.error(400, param="store")
    assert await hand.record(run) == []


# What becomes of it.


@pytest.mark.parametrize(
    "ending",
    [
        ["half", {"raise": "hunter2"}],
        [{"raise": "hunter2"}],
        ["half", {"refuse": "TooManyRequests", "message": "Full."}],
        [{"refuse": "InvalidRequest", "message": "No.", "param": "input", "code": "no"}],
        ["half", {"Finish": {"reason": "max_output_tokens"}}],
    ],
)
async def test_whatever_came_of_the_first_request_comes_of_the_second(client, hand, name, stream, ending):
    key, run = name(), name()
    fields = {"stream": stream, "input": script({"run": run}, *ending)}
    first, second = [await posted(client, key, **fields) for _ in range(2)]
    assert first.status == second.status
    assert without_comments(first.body) == without_comments(second.body)
    assert b"hunter2" not in first.body
    assert await generations(hand, run) == 1
    if first.status != 200:
        first.error(first.status)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": 99}, "temperature"), ({"previous_response_id": "resp_x"}, "previous_response_id")],
)
async def test_a_request_that_was_refused_does_not_use_its_key_up(client, hand, name, stream, fields, param):
    key, run = name(), name()
    good = {"stream": stream, "input": script({"run": run}, "text")}
    for _ in range(2):
        (await posted(client, key, **good, **fields)).error(400, param=param)
    assert (await posted(client, key, **good)).status == 200
    assert await generations(hand, run) == 1


async def test_an_answer_that_is_there_needs_no_room_in_a_backend_that_is_full(client, hand, name, stream):
    key, gate, run = name(), name(), name()
    fields = {"stream": stream, "input": script({"run": run}, {"full": gate}, "text")}
    first = await posted(client, key, **fields)
    assert first.status == 200
    await hand.open(gate)
    (await posted(client, name(), **fields)).error(429)
    second = await posted(client, key, **fields)
    assert second.status == 200
    assert without_comments(second.body) == without_comments(first.body)
    assert await generations(hand, run) == 1


async def test_an_answer_that_is_there_outlives_what_it_continued(client, hand, name, stream):
    key, run = name(), name()
    before = await client.create(input=script("before"))
    fields = {"stream": stream, "input": script({"run": run}, "text"), "previous_response_id": before["id"]}
    first = await posted(client, key, **fields)
    assert first.status == 200
    await client.delete(f"/responses/{before['id']}")
    second = await posted(client, key, **fields)
    assert second.status == 200
    assert without_comments(second.body) == without_comments(first.body)
    assert await generations(hand, run) == 1


@pytest.mark.clock
async def test_a_key_goes_with_its_response(client, hand, name, stream):
    key, run = name(), name()
    fields = {"stream": stream, "input": script({"run": run}, "text")}
    await posted(client, key, **fields)
    response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
    assert (await client.delete(f"/responses/{response_id}")).status == 200
    assert (await posted(client, key, **fields)).status == 200
    assert await generations(hand, run) == 2
    await hand.later(25 * 60 * 60)
    assert (await posted(client, key, **fields)).status == 200
    assert await generations(hand, run) == 3


@pytest.mark.clock
async def test_a_stream_is_told_again_though_its_events_are_gone(client, hand, name):
    # The response outlives its events; whoever asks again must not be refused, for it cannot ask for anything else.
    key, run = name(), name()
    fields = {"stream": True, "input": script({"run": run}, "text")}
    first = await posted(client, key, **fields)
    await hand.later(2 * 60 * 60)
    second = await posted(client, key, **fields)
    assert second.status == 200
    terminal = [without_comments(reply.body)[-3].partition(b"\ndata: ")[2] for reply in (first, second)]
    assert json.loads(terminal[0])["response"] == json.loads(terminal[1])["response"]
    assert await generations(hand, run) == 1


async def test_cancelling_tells_all_who_asked(client, hand, name, stream):
    key, run = name(), name()
    fields = {"stream": stream, "input": script({"run": run}, "half", {"gate": "never"})}
    replies = []

    async def post():
        replies.append(await posted(client, key, **fields))

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(post)
            response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
            group.start_soon(post)
            assert (await client.cancel(response_id)).status == 200
        replies.append(await posted(client, key, **fields))
    assert {reply.status for reply in replies} == {200}
    assert len({tuple(without_comments(reply.body)) for reply in replies}) == 1
    assert b'"status":"cancelled"' in replies[0].body
    assert await generations(hand, run) == 1


async def test_a_key_is_its_owners_alone(client, hand, name):
    key, run = name(), name()
    fields = {"input": script({"run": run}, "text")}
    replies = [await posted(someone, key, **fields) for someone in (client, client.other("Bearer bob"))]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.json()["id"] for reply in replies}) == 2
    assert (await posted(client.other("Bearer bob"), key, input="another")).error(409)
    assert await generations(hand, run) == 2


async def test_a_store_that_fails_does_not_use_a_key_up(client, hand, name, stream):
    key, run = name(), name()
    asked = {"stream": stream, "input": script({"run": run}, "text")}
    (await posted(client, key, **asked, metadata={"store": "no create"})).error(500, "store_error")
    assert await hand.record(run) == []
    assert (await posted(client, key, **asked)).status == 200


async def test_a_body_that_is_no_request_is_told_so_whatever_the_key(client, name):
    for body in (b"{", b"[]", b""):
        reply = await client.request("POST", "/responses", body, headers={"Idempotency-Key": name()})
        reply.error(400)
