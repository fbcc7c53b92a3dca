"""Idempotency-Key: a repeated request gets the response of the first one."""

from __future__ import annotations

import json

import anyio
import pytest

from tests.support.conformance import check_response

from .client import DEFAULT_TIMEOUT, Reply, functions, output_text, script, to_bytes
from .hosts import DISSIMILAR
from .test_disconnects import MODELS

pytestmark = [pytest.mark.anyio, pytest.mark.independent]

SERVED_BY = DISSIMILAR
DONE = b"data: [DONE]"


async def post_with_key(client, key, **fields):
    """Send `POST /responses` with a key, and return the whole reply."""
    body = {"model": "scripted", **fields}
    return await client.request("POST", "/responses", json=body, headers={"Idempotency-Key": key})


def without_comments(body):
    return [block for block in body.split(b"\n\n") if not block.startswith(b":")]


async def count_generations(control, run):
    return (await control.trace(run)).count("started")


@pytest.mark.parametrize("model", MODELS)
async def test_concurrent_requests_with_one_key_generate_once(client, control, name, stream, model):
    key, run, gate = name(), name(), name()
    fields = {"model": model, "stream": stream, "input": script({"run": run}, "half", {"gate": gate}, " whole")}
    replies = []

    async def post():
        replies.append(await post_with_key(client, key, **fields))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(post)
        await control.wait_for(run, "started")
        replies_before = len(replies)
        await control.open_gate(gate)
    assert replies_before == 0
    replies.append(await post_with_key(client, key, **fields))
    assert {reply.status for reply in replies} == {200}
    assert len({tuple(without_comments(reply.body)) for reply in replies}) == 1
    assert await count_generations(control, run) == 1
    if stream:
        assert replies[0].body.endswith(b"\n\n" + DONE + b"\n\n")
        assert {reply.headers["content-type"].split(";")[0] for reply in replies} == {"text/event-stream"}
    else:
        check_response(replies[0].json())
        assert output_text(replies[0].json()) == "half whole"
        assert (await client.get(f"/responses/{replies[0].json()['id']}")).json() == replies[0].json()


async def test_repeated_stream_request_replays_and_follows_live(client, control, name):
    key, run, gates = name(), name(), [name(), name()]
    fields = {"input": script({"run": run}, "a ", {"gate": gates[0]}, "b ", {"gate": gates[1]}, "c")}
    headers = {"Idempotency-Key": key}
    async with client.stream(headers, **fields) as first:
        await first.until("response.output_text.delta")
        await control.open_gate(gates[0])
        assert (await first.until("response.output_text.delta"))["delta"] == "b "
        async with client.stream(headers, **fields) as second:
            assert (await second.until("response.output_text.delta"))["delta"] == "a "
            await control.open_gate(gates[1])
            final = await second.rest()
            assert await first.rest() == final
    assert first.events == second.events
    assert output_text(final) == "a b c"
    assert await count_generations(control, run) == 1


async def test_response_with_key_equals_response_without(client, name, stream):
    fields = {"stream": stream, "input": script("text"), "metadata": {"a": "b"}}
    plain = await client.request("POST", "/responses", json={"model": "scripted", **fields})
    keyed = await post_with_key(client, name(), **fields)
    assert plain.status == keyed.status == 200
    assert plain.headers.keys() == keyed.headers.keys()
    changing = ("id", "created_at", "completed_at", "item_id")

    def bare(value):
        if isinstance(value, dict):
            return {key: bare(member) for key, member in value.items() if key not in changing}
        return [bare(member) for member in value] if isinstance(value, list) else value

    def comparable(reply):
        if not stream:
            return bare(reply.json())
        blocks = [block.partition(b"\ndata: ")[2] for block in without_comments(reply.body)]
        return [bare(json.loads(block)) for block in blocks if block]

    assert comparable(keyed) == comparable(plain)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("model", MODELS)
async def test_second_client_receives_whole_response_after_first_disconnects(
    client, control, name, stream, model, reset
):
    key, run, gate = name(), name(), name()
    fields = {"model": model, "stream": stream, "input": script({"run": run}, "half", {"gate": gate}, " whole")}
    async with client.open_request(fields, {"Idempotency-Key": key}) as connection:
        await control.wait_for(run, "started")
        if stream:
            await connection.head()
        await connection.disconnect(reset=reset)
    with pytest.raises(AssertionError, match="no 'ended'"):
        await control.wait_for(run, "ended", within=1.5)
    replies = []

    async def post():
        replies.append(await post_with_key(client, key, **fields))

    async with anyio.create_task_group() as group:
        group.start_soon(post)
        await control.open_gate(gate)
    (reply,) = replies
    assert reply.status == 200
    final = (
        json.loads(without_comments(reply.body)[-3].partition(b"\ndata: ")[2])["response"] if stream else reply.json()
    )
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert await count_generations(control, run) == 1
    assert (await control.wait_for(run, "ended"))["how"] == "returned"


async def test_first_client_is_unaffected_by_disconnect_of_second(client, control, name):
    key, run, gate = name(), name(), name()
    fields = {"input": script({"run": run}, "half", {"gate": gate}, " whole")}
    async with client.stream({"Idempotency-Key": key}, **fields) as first:
        await first.until("response.output_text.delta")
        async with client.stream({"Idempotency-Key": key}, **fields) as second:
            await second.until("response.output_text.delta")
            await second.connection.disconnect()
        await control.open_gate(gate)
        assert output_text(await first.rest()) == "half whole"
    assert await count_generations(control, run) == 1


async def test_background_request_with_key_creates_one_response(client, control, name):
    key, run, gate = name(), name(), name()
    fields = {"background": True, "input": script({"run": run}, {"gate": gate}, "text")}
    first = (await post_with_key(client, key, **fields)).json()
    check_response(first)
    assert first["status"] == "queued"
    await client.wait_for_status(first["id"], "in_progress")
    under_way = (await post_with_key(client, key, **fields)).json()
    assert (under_way["id"], under_way["status"]) == (first["id"], "in_progress")
    await control.open_gate(gate)
    final = await client.wait_for_end(first["id"])
    assert (await post_with_key(client, key, **fields)).json() == final
    assert await count_generations(control, run) == 1


async def test_background_stream_with_key_is_replayed(client, control, name):
    key, run = name(), name()
    fields = {"background": True, "stream": True, "input": script({"run": run}, "text")}
    first, second = [await post_with_key(client, key, **fields) for _ in range(2)]
    assert without_comments(first.body) == without_comments(second.body)
    assert await count_generations(control, run) == 1


# Equal and different requests.


async def test_equivalent_requests_share_one_key(client, control, name):
    key, run = name(), name()
    text, fields = script({"run": run}, "text"), {"metadata": {"a": "b", "c": "d"}, "temperature": 1.0}
    first = await post_with_key(client, key, input=text, **fields)
    bodies = [
        {"temperature": 1, "metadata": {"c": "d", "a": "b"}, "input": text, "model": "scripted"},
        {"model": "scripted", "input": text, "tools": None, "client_metadata": {"try": 2}, **fields},
    ]
    for body in bodies:
        for written in (json.dumps(body), json.dumps(body, indent=4), json.dumps(body, separators=(",", ":"))):
            repeated = await client.request(
                "POST", "/responses", written.encode(), headers={"Idempotency-Key": key}, chunked=True
            )
            assert (repeated.status, repeated.body) == (200, first.body)
    assert await count_generations(control, run) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"input": "something else"},
        {"model": "scripted-text"},
        {"temperature": 0.5},
        {"metadata": {"a": "c"}},
        {"instructions": "Be brief."},
        {"tools": functions("f")},
        {"text": {"format": {"type": "json_object"}}},
        {"background": True},
    ],
)
async def test_key_of_other_request_returns_409(client, control, name, other):
    key, run = name(), name()
    fields = {"input": script({"run": run}, '"text"'), "metadata": {"a": "b"}}
    first = await post_with_key(client, key, **fields)
    assert first.status == 200
    for stream in (False, True):
        (await post_with_key(client, key, **{**fields, **other, "stream": stream})).error(409, "idempotency_key_reused")
    repeated = await post_with_key(client, key, **fields)
    assert (repeated.status, repeated.body) == (200, first.body)
    assert await count_generations(control, run) == 1


async def test_key_of_other_running_request_returns_409(client, control, name, stream):
    key, run, gate = name(), name(), name()
    body = {"input": script({"run": run}, {"gate": gate}, "text")}
    async with client.open_request(body, {"Idempotency-Key": key}) as connection:
        await control.wait_for(run, "started")
        (await post_with_key(client, key, input="another", stream=stream)).error(409, "idempotency_key_reused")
        await control.open_gate(gate)
        assert (await connection.head())[0] == 200
        await connection.body()


async def test_other_key_or_no_key_creates_new_response(client, control, name):
    run = name()
    fields = {"input": script({"run": run}, "text")}
    replies = [await post_with_key(client, name(), **fields) for _ in range(2)]
    replies += [await client.post(**fields) for _ in range(2)]
    assert len({reply.json()["id"] for reply in replies}) == 4
    assert await count_generations(control, run) == 4


@pytest.mark.parametrize("key", ["", "x" * 256, "x" * 5000])
async def test_empty_or_long_key_returns_400(client, control, name, stream, key):
    run = name()
    fields = {"model": "scripted", "stream": stream, "input": script({"run": run}, "text")}
    async with client.connect() as connection:
        path, body = f"{client.prefix}/responses", to_bytes(fields)
        request = client.request_bytes(connection, "POST", path, body, {"Idempotency-Key": key or "none"})
        # The client omits empty headers.
        await connection.send_bytes(request if key else request.replace(b"Key: none", b"Key: "))
        with anyio.fail_after(DEFAULT_TIMEOUT):
            reply = Reply(*await connection.head(), await connection.body())
    reply.error(400, param="Idempotency-Key")
    assert await control.trace(run) == []


@pytest.mark.parametrize("key", ["x", "x" * 255, 'a key, with; all = kinds "of" {things}', "caf\u00e9 \u00fc"])
async def test_any_other_key_is_accepted(client, control, name, key):
    run = name()
    key = f"{key}{run}"[-255:]
    fields = {"input": script({"run": run}, "text")}
    first, second = [await post_with_key(client, key.encode("latin-1"), **fields) for _ in range(2)]
    assert first.status == 200
    assert first.body == second.body
    assert await count_generations(control, run) == 1


async def test_key_is_refused_with_store_false(client, control, name, stream):
    run = name()
    reply = await post_with_key(client, name(), stream=stream, store=False, input=script({"run": run}, "text"))
    reply.error(400, param="store")
    assert await control.trace(run) == []


# Outcomes.


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
async def test_repeated_request_returns_first_outcome(client, control, name, stream, ending):
    key, run = name(), name()
    fields = {"stream": stream, "input": script({"run": run}, *ending)}
    first, second = [await post_with_key(client, key, **fields) for _ in range(2)]
    assert first.status == second.status
    assert without_comments(first.body) == without_comments(second.body)
    assert b"hunter2" not in first.body
    assert await count_generations(control, run) == 1
    if first.status != 200:
        first.error(first.status)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": 99}, "temperature"), ({"previous_response_id": "resp_x"}, "previous_response_id")],
)
async def test_refused_request_leaves_key_unused(client, control, name, stream, fields, param):
    key, run = name(), name()
    good = {"stream": stream, "input": script({"run": run}, "text")}
    for _ in range(2):
        (await post_with_key(client, key, **good, **fields)).error(400, param=param)
    assert (await post_with_key(client, key, **good)).status == 200
    assert await count_generations(control, run) == 1


async def test_repeated_request_is_answered_by_full_backend(client, control, name, stream):
    key, gate, run = name(), name(), name()
    fields = {"stream": stream, "input": script({"run": run}, {"full": gate}, "text")}
    first = await post_with_key(client, key, **fields)
    assert first.status == 200
    await control.open_gate(gate)
    (await post_with_key(client, name(), **fields)).error(429)
    second = await post_with_key(client, key, **fields)
    assert second.status == 200
    assert without_comments(second.body) == without_comments(first.body)
    assert await count_generations(control, run) == 1


async def test_repeated_request_is_answered_after_previous_response_is_deleted(client, control, name, stream):
    key, run = name(), name()
    previous = await client.create(input=script("before"))
    fields = {"stream": stream, "input": script({"run": run}, "text"), "previous_response_id": previous["id"]}
    first = await post_with_key(client, key, **fields)
    assert first.status == 200
    await client.delete(f"/responses/{previous['id']}")
    second = await post_with_key(client, key, **fields)
    assert second.status == 200
    assert without_comments(second.body) == without_comments(first.body)
    assert await count_generations(control, run) == 1


@pytest.mark.clock
async def test_deleting_response_frees_its_key(client, control, name, stream):
    key, run = name(), name()
    fields = {"stream": stream, "input": script({"run": run}, "text")}
    await post_with_key(client, key, **fields)
    response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
    assert (await client.delete(f"/responses/{response_id}")).status == 200
    assert (await post_with_key(client, key, **fields)).status == 200
    assert await count_generations(control, run) == 2
    await control.advance_clock(25 * 60 * 60)
    assert (await post_with_key(client, key, **fields)).status == 200
    assert await count_generations(control, run) == 3


@pytest.mark.clock
async def test_repeated_stream_request_is_synthesized_after_log_expired(client, control, name):
    # The response outlives its events, and the client can do nothing but repeat the request.
    key, run = name(), name()
    fields = {"stream": True, "input": script({"run": run}, "text")}
    first = await post_with_key(client, key, **fields)
    await control.advance_clock(2 * 60 * 60)
    second = await post_with_key(client, key, **fields)
    assert second.status == 200
    terminal = [without_comments(reply.body)[-3].partition(b"\ndata: ")[2] for reply in (first, second)]
    assert json.loads(terminal[0])["response"] == json.loads(terminal[1])["response"]
    assert await count_generations(control, run) == 1


async def test_cancellation_reaches_all_clients_of_key(client, control, name, stream):
    key, run = name(), name()
    fields = {"stream": stream, "input": script({"run": run}, "half", {"gate": "never"})}
    replies = []

    async def post():
        replies.append(await post_with_key(client, key, **fields))

    with anyio.fail_after(DEFAULT_TIMEOUT):
        async with anyio.create_task_group() as group:
            group.start_soon(post)
            response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
            group.start_soon(post)
            assert (await client.cancel(response_id)).status == 200
        replies.append(await post_with_key(client, key, **fields))
    assert {reply.status for reply in replies} == {200}
    assert len({tuple(without_comments(reply.body)) for reply in replies}) == 1
    assert b'"status":"cancelled"' in replies[0].body
    assert await count_generations(control, run) == 1


async def test_key_is_scoped_to_owner(client, control, name):
    key, run = name(), name()
    fields = {"input": script({"run": run}, "text")}
    replies = [await post_with_key(someone, key, **fields) for someone in (client, client.with_key("Bearer bob"))]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.json()["id"] for reply in replies}) == 2
    assert (await post_with_key(client.with_key("Bearer bob"), key, input="another")).error(409)
    assert await count_generations(control, run) == 2


async def test_store_failure_leaves_key_unused(client, control, name, stream):
    key, run = name(), name()
    fields = {"stream": stream, "input": script({"run": run}, "text")}
    (await post_with_key(client, key, **fields, metadata={"store": "no create"})).error(500, "store_error")
    assert await control.trace(run) == []
    assert (await post_with_key(client, key, **fields)).status == 200


async def test_invalid_body_is_refused_whatever_the_key(client, name):
    for body in (b"{", b"[]", b""):
        reply = await client.request("POST", "/responses", body, headers={"Idempotency-Key": name()})
        reply.error(400)
