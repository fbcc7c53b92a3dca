"""Responses in the background: queued at once, made whoever leaves, and asked for by their ids."""

from __future__ import annotations

import anyio
import pytest

from tests.support.conformance import check_response

from . import hosts
from .client import PATIENCE, Client, Hand, call, functions, output_text, script
from .hosts import FARTHEST
from .test_leaving import KINDS

SERVED_BY = FARTHEST

pytestmark = [pytest.mark.anyio, pytest.mark.unbound]

ASK = {"role": "user", "content": "what do you see?"}


@pytest.fixture
def single(start):
    """A client of a kit that makes one background response at a time, and its hand; the same on every host."""
    server = start(hosts.single(), "single")
    yield Client(server.port), Hand(server.control)
    server.check_log()


async def queued(client, **fields):
    """A background response that has just been asked for."""
    response = await client.create(background=True, **fields)
    assert (response["status"], response["background"], response["store"]) == ("queued", True, True)
    assert (response["output"], response["error"], response["completed_at"]) == ([], None, None)
    return response


@pytest.mark.parametrize("model", KINDS)
async def test_a_background_response_is_queued_made_and_completed(client, hand, name, model):
    gate, run = name(), name()
    moves = [{"run": run}, "half", {"gate": gate}, " whole"]
    first = await queued(client, model=model, input=script(*moves), metadata={"a": "b"})
    # Nothing of the puppet has been waited for: it stands at its gate.
    assert (await hand.seen(run, "started"))["turn"]["response_id"] == first["id"]
    under_way = await client.reaches(first["id"], "in_progress")
    assert (under_way["id"], under_way["created_at"]) == (first["id"], first["created_at"])
    await hand.open(gate)
    final = await client.ended(first["id"])
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert {**final, **{key: first[key] for key in ("status", "output", "completed_at", "usage")}} == first
    assert (await hand.seen(run, "ended"))["how"] == "returned"
    assert (await client.get(f"/responses/{first['id']}")).json() == final


@pytest.mark.parametrize("model", KINDS)
async def test_a_background_stream_tells_that_it_was_queued_and_all_the_rest(client, hand, name, model):
    gate = name()
    async with client.stream(background=True, model=model, input=script("half", {"gate": gate}, " whole")) as stream:
        await stream.until("response.output_text.delta")
        await hand.open(gate)
        final = await stream.rest()
        begun = [(event["type"], event["response"]["status"]) for event in stream.events[:3]]
    assert begun == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert (await client.get(f"/responses/{final['id']}")).json() == final


@pytest.mark.parametrize("model", KINDS)
async def test_each_delta_of_a_background_stream_leaves_before_the_next_is_made(client, hand, name, model):
    gates = [name() for _ in range(5)]
    moves = [move for gate in gates for move in (f"to {gate} ", {"gate": gate})]
    async with client.stream(background=True, model=model, input=script(*moves)) as stream:
        for gate in gates:
            assert (await stream.until("response.output_text.delta"))["delta"] == f"to {gate} "
            await hand.open(gate)
        await stream.rest()


async def test_a_background_response_is_what_it_would_be_in_the_foreground(client, stream):
    fields = {
        "input": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "tell"}],
        "instructions": "Speak Latin.",
        "tools": functions("f", description="F.", parameters={"type": "object", "properties": {}}, strict=True),
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "max_tool_calls": 2,
        "max_output_tokens": 999,
        "temperature": 0.5,
        "top_p": 0.25,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto",
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    fields["input"][1]["content"] = script(
        {"Reasoning": {"text": "Hm."}}, {"ReasoningSummary": {"text": "h"}}, call("f", {})
    )
    in_front = await client.made(stream, **fields)
    async with client.stream(background=True, **fields) as following:
        behind = await following.rest()
    for response in (in_front, behind):
        for changing in ("id", "created_at", "completed_at", "background"):
            del response[changing]
        for item in response["output"]:
            del item["id"]
            item.pop("call_id", None)
            item.pop("encrypted_content", None)
    assert behind == in_front


async def test_the_backend_is_given_what_it_would_be_given_in_the_foreground(client, hand, name):
    previous = await client.create(input="before", tools=functions("f"))
    runs = [name(), name()]
    for run, background in zip(runs, (False, True), strict=True):
        made = await client.create(
            background=background,
            input=[ASK, {"role": "user", "content": script({"run": run}, "{}")}],
            previous_response_id=previous["id"],
            tools=functions("f"),
            instructions="Be brief.",
            metadata={"a": "b"},
            temperature=0.5,
            text={"format": {"type": "json_object"}},
        )
        await client.ended(made["id"])
    front, behind = [(await hand.seen(run, "started"))["turn"] for run in runs]
    for turn in (front, behind):
        del turn["response_id"]
        for item in turn["items"][-2:]:
            del item["id"]
        for key in ("items", "messages"):
            (turn[key][-1]["content"], *_) = [None]  # the script, which names the run
    assert behind == front


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("model", KINDS)
async def test_a_client_that_leaves_a_background_stream_does_not_end_it(client, hand, name, model, reset):
    gate, run = name(), name()
    moves = [{"run": run}, "half", {"gate": gate}, " whole"]
    async with client.stream(background=True, model=model, input=script(*moves)) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        await stream.connection.leave(reset=reset)
    # Longer than a foreground response would have.
    with pytest.raises(AssertionError, match="was not ended"):
        await hand.seen(run, "ended", within=1.5)
    assert (await client.get(f"/responses/{response_id}")).json()["status"] == "in_progress"
    await hand.open(gate)
    final = await client.ended(response_id)
    assert (final["status"], output_text(final)) == ("completed", "half whole")
    assert (await hand.seen(run, "ended"))["how"] == "returned"


async def test_a_client_that_asks_and_leaves_without_waiting_is_served_all_the_same(client, hand, name):
    run = name()
    async with client.open({"background": True, "input": script({"run": run}, "text")}) as connection:
        response_id = (await hand.seen(run, "started"))["turn"]["response_id"]
        await connection.leave()
    assert output_text(await client.ended(response_id)) == "text"


async def test_a_reader_that_does_not_read_does_not_hold_a_background_response_up(client, hand, name):
    run, piece, times = name(), "x" * 10_000, 400
    moves = [{"run": run}, {"often": piece, "times": times}, {"mark": "all made"}, "end"]
    async with client.stream(background=True, input=script(*moves)) as stream:
        stream.connection.narrow()
        await hand.seen(run, "all made", within=PATIENCE)
        final = await stream.rest()
    assert len(output_text(final)) == times * len(piece) + 3


async def test_a_background_response_has_to_be_kept(client, stream):
    reply = await client.post(stream=stream, background=True, store=False, input="hi")
    reply.error(400, param="background")


@pytest.mark.parametrize("value", ["yes", 1, {}, []])
async def test_background_is_true_or_false(client, value):
    (await client.post(background=value, input="hi")).error(400, param="background")


async def test_a_background_response_that_cannot_be_is_refused_before_it_is_queued(client, stream):
    for fields, code, param in [
        ({"model": "nobody", "input": "hi"}, "model_not_found", "model"),
        ({"input": "hi", "previous_response_id": "resp_x"}, "previous_response_not_found", "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "item_not_found", "input[0].id"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": "hi", "temperature": 99}, "invalid_request", "temperature"),
    ]:
        (await client.post(stream=stream, background=True, **fields)).error(400, code, param)
    (await client.other("Bearer stranger").post(stream=stream, background=True, input="hi")).error(401)


async def test_input_items_are_there_while_the_response_is_made(client, hand, name):
    gate = name()
    items = [ASK, {"role": "user", "content": script({"gate": gate}, "text")}]
    first = await queued(client, input=items)
    path = f"/responses/{first['id']}/input_items?order=asc"
    page = (await client.get(path)).json()
    assert [item["content"][0]["text"] for item in page["data"]] == [item["content"] for item in items]
    await client.reaches(first["id"], "in_progress")
    assert (await client.get(path)).json() == page
    await hand.open(gate)
    await client.ended(first["id"])
    assert (await client.get(path)).json() == page


async def test_a_response_in_progress_cannot_be_continued_yet(client, hand, name, stream):
    gate = name()
    first = await queued(client, input=script({"gate": gate}, "text"))
    for _ in range(2):  # queued or in progress, and surely in progress
        for background in (False, True):
            reply = await client.post(
                stream=stream, background=background, input="on", previous_response_id=first["id"]
            )
            reply.error(400, "previous_response_in_progress", "previous_response_id")
        await client.reaches(first["id"], "in_progress")
    await hand.open(gate)
    await client.ended(first["id"])
    told = await client.told(stream, input="on", previous_response_id=first["id"])
    assert [message["content"] for message in told["messages"]][1:] == ["text", "on"]


async def test_a_foreground_response_in_progress_cannot_be_continued_either(client, hand, name):
    gate = name()
    async with client.stream(input=script("text", {"gate": gate})) as stream:
        created = (await stream.until("response.created"))["response"]
        reply = await client.post(input="on", previous_response_id=created["id"])
        reply.error(400, "previous_response_in_progress", "previous_response_id")
        await hand.open(gate)
        await stream.rest()


async def test_background_responses_make_a_conversation(client):
    previous = None
    for turn in range(3):
        items = [{"role": "user", "content": f"question {turn}"}, {"role": "user", "content": script(f"answer {turn}")}]
        made = await queued(client, input=items, previous_response_id=previous)
        assert made["previous_response_id"] == previous
        previous = made["id"]
        await client.ended(previous)
    told = await client.told(input="and now?", previous_response_id=previous)
    texts = [message["content"] for message in told["messages"] if not message["content"].startswith("[")]
    assert texts == [
        *(text for turn in range(3) for text in (f"question {turn}", f"answer {turn}")),
        "and now?",
    ]


# Endings.


@pytest.mark.parametrize("model", KINDS)
async def test_a_background_response_that_fails_says_so_and_tells_no_secret(client, model):
    first = await queued(client, model=model, input=script("half", {"raise": "hunter2"}))
    final = await client.ended(first["id"])
    assert (final["status"], final["error"]["code"], output_text(final)) == ("failed", "model_error", "half")
    async with client.stream(background=True, model=model, input=script("half", {"raise": "hunter2"})) as stream:
        told = await stream.rest()
    assert (told["status"], told["error"]) == ("failed", final["error"])
    assert b"hunter2" not in b"".join(stream.writes)


async def test_a_background_response_that_the_backend_does_not_admit_fails(client, hand, name):
    gate = name()
    await hand.open(gate)
    final = await client.ended((await queued(client, input=script({"full": gate})))["id"])
    assert (final["status"], final["error"]["code"], final["output"]) == ("failed", "too_many_requests", [])
    async with client.stream(background=True, input=script({"full": gate})) as stream:
        assert (await stream.rest())["error"] == final["error"]


async def test_a_background_response_that_is_cut_is_incomplete(client):
    finish = {"Finish": {"reason": "max_output_tokens"}}
    final = await client.ended((await queued(client, input=script("half", finish)))["id"])
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_functions_are_called_in_the_background_and_their_outputs_taken(client):
    tools = functions("f")
    first = await queued(client, input=script(call("f", {"a": 1}, call_id="call_1")), tools=tools)
    final = await client.ended(first["id"])
    assert final["output"][0]["call_id"] == "call_1"
    told = await client.told(
        input=[{"type": "function_call_output", "call_id": "call_1", "output": "2"}, ASK],
        previous_response_id=first["id"],
        tools=tools,
    )
    assert [item["type"] for item in told["items"]] == ["message", "function_call", "function_call_output", "message"]


async def test_hosted_tools_work_in_the_background(client):
    moves = [{"rounds": [[call("add", {"a": 1, "b": 2})], ["three"]]}]
    async with client.stream(background=True, input=script(*moves), tools=[{"type": "test:add"}]) as stream:
        final = await stream.rest()
    assert (final["status"], output_text(final)) == ("completed", "three")
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_a_background_response_that_cannot_be_kept_is_refused_at_once(client, stream):
    reply = await client.post(stream=stream, background=True, input="hi", metadata={"store": "no create"})
    reply.error(500, "store_error")
    assert b"hunter2" not in reply.body


async def test_a_background_response_whose_store_fails_is_no_success(client):
    asked = {"background": True, "input": script("lost"), "metadata": {"store": "no update"}}
    async with client.stream(**asked) as stream:
        with anyio.fail_after(PATIENCE):
            final = await stream.rest()
    assert final["status"] == "failed"
    assert b"hunter2" not in b"".join(stream.writes)
    first = (await client.post(**asked)).json()
    with anyio.fail_after(PATIENCE):
        while True:
            reply = await client.get(f"/responses/{first['id']}")
            if reply.status == 404 or reply.json()["status"] == "failed":
                break
            await anyio.sleep(0.01)


async def test_a_background_record_is_final_before_its_terminal_event_is_sent(client):
    async with client.stream(background=True, input=script("text"), metadata={"store": "late"}) as stream:
        await stream.until("response.completed")
        terminal = stream.events[-1]["response"]
        assert (await client.get(f"/responses/{terminal['id']}")).json() == terminal
        told = await client.told(input="on", previous_response_id=terminal["id"])
    assert told["messages"][1]["content"] == "text"


# Many at once.


@pytest.mark.parametrize("model", KINDS)
async def test_more_background_responses_than_there_are_places_all_come_to_their_ends(client, model):
    firsts = {}

    async def one(number):
        firsts[number] = await queued(client, model=model, input=script(f"{number}"))

    with anyio.fail_after(2 * PATIENCE):
        async with anyio.create_task_group() as group:
            for number in range(80):
                group.start_soon(one, number)
        for number, first in firsts.items():
            assert output_text(await client.ended(first["id"])) == f"{number}"


async def test_one_waits_while_another_is_made(single, name):
    client, hand = single
    gates, runs = [name(), name()], [name(), name()]
    first, second = [
        await queued(client, input=script({"run": run}, {"gate": gate}, run))
        for run, gate in zip(runs, gates, strict=True)
    ]
    await client.reaches(first["id"], "in_progress")
    waiting = (await client.get(f"/responses/{second['id']}")).json()
    check_response(waiting)
    assert waiting == second
    assert await hand.record(runs[1]) == []
    page = (await client.get(f"/responses/{second['id']}/input_items")).json()
    assert len(page["data"]) == 1
    (await client.post(input="on", previous_response_id=second["id"])).error(400, "previous_response_in_progress")
    async with client.follow(second["id"]) as stream:
        await stream.until("response.queued")
        await hand.open(gates[0])
        await stream.until("response.in_progress")
        assert output_text(await client.ended(first["id"])) == runs[0]
        await hand.open(gates[1])
        assert output_text(await stream.rest()) == runs[1]


async def test_what_there_is_no_room_for_is_refused_and_leaves_nothing_behind(single, name):
    client, hand = single
    gate, run = name(), name()
    waiting = [await queued(client, input=script({"gate": gate}, "text")) for _ in range(2)]
    for stream in (False, True):
        reply = await client.post(background=True, stream=stream, input=script({"run": run}, "never"))
        reply.error(429, "too_many_requests")
        assert int(reply.headers["retry-after"]) >= 1
    assert output_text(await client.create(input=script("in the foreground"))) == "in the foreground"
    await hand.open(gate)
    for first in waiting:
        assert output_text(await client.ended(first["id"])) == "text"
    assert output_text(await client.ended((await queued(client, input=script("room again")))["id"])) == "room again"
    assert await hand.record(run) == []


# Deleting.


@pytest.mark.parametrize("model", KINDS)
async def test_deleting_a_response_in_the_background_stops_it(client, hand, name, model):
    run = name()
    first = await queued(client, model=model, input=script({"run": run}, "half", {"gate": "never"}))
    await hand.seen(run, "started")
    path = f"/responses/{first['id']}"
    reply = await client.delete(path)
    assert (reply.status, reply.json()) == (200, {"id": first["id"], "object": "response", "deleted": True})
    note = await hand.seen(run, "ended", within=1)
    assert note["cancelled"] or note["how"] in ("GeneratorExit", "CancelledError")
    for what in ("", "/input_items", "?stream=true"):
        (await client.get(path + what)).error(404, "response_not_found")
    (await client.cancel(first["id"])).error(404, "response_not_found")
    (await client.delete(f"/responses/{first['id']}")).error(404, "response_not_found")
    (await client.post(input="on", previous_response_id=first["id"])).error(400, "previous_response_not_found")


async def test_a_response_that_waits_can_be_deleted_and_is_never_made(single, name):
    client, hand = single
    gate, run = name(), name()
    first = await queued(client, input=script({"gate": gate}, "text"))
    await client.reaches(first["id"], "in_progress")
    second = await queued(client, input=script({"run": run}, "never"))
    assert (await client.delete(f"/responses/{second['id']}")).status == 200
    (await client.get(f"/responses/{second['id']}")).error(404, "response_not_found")
    await hand.open(gate)
    assert output_text(await client.ended(first["id"])) == "text"
    assert output_text(await client.ended((await queued(client, input=script("third")))["id"])) == "third"
    assert await hand.record(run) == []
    (await client.get(f"/responses/{second['id']}")).error(404, "response_not_found")


async def test_whoever_follows_a_response_that_is_deleted_is_told_its_end(client, hand, name):
    gate = name()
    async with client.stream(background=True, input=script("half", {"gate": gate}, " whole")) as stream:
        await stream.until("response.output_text.delta")
        response_id = stream.events[0]["response"]["id"]
        assert (await client.delete(f"/responses/{response_id}")).status == 200
        final = await stream.rest()
    assert final["status"] in ("cancelled", "failed")
    await hand.open(gate)
    (await client.get(f"/responses/{response_id}")).error(404, "response_not_found")


async def test_whoever_follows_a_response_that_waits_and_is_deleted_is_told_its_end(single, name):
    client, hand = single
    gate = name()
    first = await queued(client, input=script({"gate": gate}, "text"))
    await client.reaches(first["id"], "in_progress")
    async with client.stream(background=True, input=script("never")) as stream:
        await stream.until("response.queued")
        assert (await client.delete(f"/responses/{stream.events[0]['response']['id']}")).status == 200
        final = await stream.rest()
    assert final["status"] in ("cancelled", "failed")
    await hand.open(gate)
    assert output_text(await client.ended(first["id"])) == "text"
