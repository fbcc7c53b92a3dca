"""The contract's rules "State": saved before it is sent, complete, and visible to its owner only."""

from __future__ import annotations

import anyio
import pytest

from tests.support.conformance import check_item, check_response

from .client import DEFAULT_TIMEOUT, functions, output_text, script, strict_json
from .hosts import STORE_HOSTS

pytestmark = pytest.mark.anyio

SERVED_BY = STORE_HOSTS

ASK = {"role": "user", "content": "what do you see?"}


async def test_response_exists_from_created_event_on(client, control, name):
    gate = name()
    async with client.stream(input=script("half", {"gate": gate}, " whole")) as stream:
        created = (await stream.until("response.created"))["response"]
        stored = (await client.get(f"/responses/{created['id']}")).json()
        check_response(stored)
        assert (stored["id"], stored["status"], stored["completed_at"]) == (created["id"], "in_progress", None)
        await stream.until("response.output_text.delta")
        await control.open_gate(gate)
        final = await stream.rest()
    assert output_text((await client.get(f"/responses/{final['id']}")).json()) == "half whole"


@pytest.mark.parametrize("steps", [["text"], ["cut", {"Finish": {"reason": "max_output_tokens"}}], [{"raise": "no"}]])
async def test_record_is_final_before_terminal_event(client, steps):
    async with client.stream(input=script(*steps), metadata={"store": "late"}) as stream:
        while event := await stream.next():
            if "response" in event and event["response"]["status"] != "in_progress":
                # Retrieved on another connection while the stream is still open.
                stored = (await client.get(f"/responses/{event['response']['id']}")).json()
                assert stored == event["response"]


async def test_record_is_final_before_whole_response_is_sent(client):
    final = await client.create(input=script("text"), metadata={"store": "late"})
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_whole_chain_reaches_model_in_order(client, stream):
    previous = None
    for turn in range(4):
        final = await client.complete(
            stream,
            input=[
                {"role": "user", "content": f"question {turn}"},
                {"role": "user", "content": script(f"answer {turn}")},
            ],
            previous_response_id=previous,
        )
        assert final["previous_response_id"] == previous
        previous = final["id"]
    seen_turn = await client.describe_turn(stream, input="and now?", previous_response_id=previous)
    texts = [item["content"][0]["text"] for item in seen_turn["items"]]
    assert [text for text in texts if not text.startswith("[")] == [
        *(text for turn in range(4) for text in (f"question {turn}", f"answer {turn}")),
        "and now?",
    ]
    assert len(texts) == 13


async def test_next_turn_holds_same_items_with_same_ids(client, stream):
    steps = [
        {"ReasoningSummary": {"text": "hm"}},
        {"Reasoning": {"text": "hmm"}},
        {"Message": {"phase": "commentary"}},
        "one",
        {"Item": {"type": "acme:thing", "fields": {"a": [1]}}},
        {"ToolCall": {"name": "f", "arguments": "{}"}},
    ]
    first = await client.complete(stream, input=script(*steps), tools=functions("f"))
    call = first["output"][-1]
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    turn = await client.describe_turn(stream, input=[answer, ASK], previous_response_id=first["id"])
    assert turn["items"][1 : 1 + len(first["output"])] == first["output"]
    listed = (await client.get(f"/responses/{first['id']}/input_items")).json()["data"]
    assert turn["items"][0]["id"] == listed[0]["id"]


async def test_instructions_do_not_carry_over_but_system_messages_do(client, stream):
    first = await client.complete(
        stream,
        instructions="Speak Latin.",
        input=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": script("Salve!")}],
    )
    turn = await client.describe_turn(stream, input="go on", previous_response_id=first["id"])
    assert turn["instructions"] is None
    assert "Speak Latin." not in str(turn["messages"])
    assert turn["messages"][0] == {"role": "system", "content": "Be kind."}
    second = await client.complete(stream, input="x", instructions="Speak Greek.", previous_response_id=first["id"])
    assert second["instructions"] == "Speak Greek."


async def test_response_can_be_continued_twice(client):
    first = await client.create(input="the beginning")
    left, right = [
        await client.describe_turn(input=word, previous_response_id=first["id"]) for word in ("left", "right")
    ]
    assert [item["content"][0]["text"] for item in left["items"]][2:] == ["left"]
    assert [item["content"][0]["text"] for item in right["items"]][2:] == ["right"]


async def test_incomplete_response_can_be_continued(client, stream):
    first = await client.complete(stream, input=script("half a", {"Finish": {"reason": "max_output_tokens"}}))
    turn = await client.describe_turn(stream, input="go on", previous_response_id=first["id"])
    assert turn["messages"][1] == {"role": "assistant", "content": "half a"}


async def test_unknown_previous_response_returns_400_with_code_and_param(client, stream):
    reply = await client.post(stream=stream, input="hi", previous_response_id="resp_of_nobody")
    error = reply.error(400, "previous_response_not_found", "previous_response_id")
    assert "resp_of_nobody" not in error["message"]


async def test_response_fails_if_final_save_fails(client):
    fields = {"input": script("lost"), "metadata": {"store": "no update"}}
    reply = await client.post(**fields)
    assert reply.error(500, "store_error")["type"] == "server_error"
    assert b"hunter2" not in reply.body
    async with client.stream(**fields) as stream:
        final = await stream.rest()
        kinds = [event["type"] for event in stream.events]
    assert (final["status"], final["error"]["code"]) == ("failed", "store_error")
    assert "response.completed" not in kinds
    assert b"hunter2" not in b"".join(stream.chunks)


async def test_failed_creation_returns_http_error_streamed_or_not(client, stream):
    reply = await client.post(stream=stream, input="hi", metadata={"store": "no create"})
    reply.error(500, "store_error")
    assert b"hunter2" not in reply.body


async def test_unreachable_store_returns_500_without_details(client, stream):
    replies = [
        await client.get("/responses/resp_unreachable"),
        await client.get("/responses/resp_unreachable/input_items"),
        await client.post(stream=stream, input="hi", previous_response_id="resp_unreachable"),
    ]
    for reply in replies:
        assert reply.error(500)["type"] == "server_error"
        assert b"hunter2" not in reply.body


async def test_store_false_works_without_store(client, stream):
    final = await client.complete(stream, input=script("told"), store=False, metadata={"store": "no create"})
    assert output_text(final) == "told"


async def test_store_false_stores_nothing(client, stream):
    final = await client.complete(stream, input=script("gone"), store=False)
    assert final["store"] is False
    (await client.get(f"/responses/{final['id']}")).error(404, "response_not_found")
    (await client.get(f"/responses/{final['id']}/input_items")).error(404, "response_not_found")
    (await client.delete(f"/responses/{final['id']}")).error(404, "response_not_found")
    (await client.post(input="x", previous_response_id=final["id"])).error(400, "previous_response_not_found")
    (await client.post(input=[{"type": "item_reference", "id": final["output"][0]["id"]}])).error(400)


async def test_store_false_continues_stored_response(client, stream):
    first = await client.create(input="kept")
    turn = await client.describe_turn(stream, input="on", previous_response_id=first["id"], store=False)
    assert turn["items"][0]["content"][0]["text"] == "kept"


async def test_response_is_deleted_once(client):
    final = await client.create(input=script("soon gone"))
    path = f"/responses/{final['id']}"
    reply = await client.delete(path)
    assert reply.status == 200
    assert reply.json() == {"id": final["id"], "object": "response", "deleted": True}
    (await client.delete(path)).error(404, "response_not_found")
    (await client.get(path)).error(404, "response_not_found")
    (await client.get(f"{path}/input_items")).error(404, "response_not_found")
    (await client.post(input="x", previous_response_id=final["id"])).error(400, "previous_response_not_found")
    (await client.post(input=[{"type": "item_reference", "id": final["output"][0]["id"]}])).error(400)


async def test_conversation_with_deleted_start_is_refused(client):
    first = await client.create(input="one")
    second = await client.create(input="two", previous_response_id=first["id"])
    await client.delete(f"/responses/{first['id']}")
    (await client.post(input="three", previous_response_id=second["id"])).error(400, "previous_response_not_found")
    assert (await client.get(f"/responses/{second['id']}")).status == 200


async def test_response_deleted_during_generation_is_not_restored(client, control, name):
    gate = name()
    async with client.stream(input=script("a", {"gate": gate}, "b")) as stream:
        created = (await stream.until("response.output_text.delta")) and stream.events[0]["response"]
        assert (await client.delete(f"/responses/{created['id']}")).status == 200
        await control.open_gate(gate)
        final = await stream.rest()
    assert (final["id"], output_text(final)[:1]) == (created["id"], "a")
    (await client.get(f"/responses/{created['id']}")).error(404, "response_not_found")


async def test_deletion_stops_generation(client, control, name):
    run = name()
    async with client.open_request({"input": script({"run": run}, "a", {"gate": "never"})}) as connection:
        response_id = (await control.wait_for(run, "started"))["turn"]["response_id"]
        assert (await client.delete(f"/responses/{response_id}")).status == 200
        await control.wait_for(run, "ended", within=1)
        with anyio.fail_after(DEFAULT_TIMEOUT):
            assert (await connection.head())[0] == 200
            answer = strict_json(await connection.body())
    check_response(answer)
    assert (answer["id"], answer["status"]) == (response_id, "cancelled")
    (await client.get(f"/responses/{response_id}")).error(404, "response_not_found")
    (await client.delete(f"/responses/{response_id}")).error(404, "response_not_found")


async def test_input_items_are_paginated(client):
    items = [{"role": "user", "content": str(number)} for number in range(25)]
    final = await client.create(input=items)
    path = f"/responses/{final['id']}/input_items"

    async def page(query=""):
        body = (await client.get(path + query)).json()
        assert (body["object"], set(body)) == ("list", {"object", "data", "first_id", "last_id", "has_more"})
        if body["data"]:
            assert (body["first_id"], body["last_id"]) == (body["data"][0]["id"], body["data"][-1]["id"])
        return body, [int(item["content"][0]["text"]) for item in body["data"]]

    body, numbers = await page()
    assert (numbers, body["has_more"]) == (list(range(24, 4, -1)), True)
    body, numbers = await page("?order=asc&limit=10")
    assert (numbers, body["has_more"]) == (list(range(10)), True)
    body, numbers = await page(f"?order=asc&limit=10&after={body['last_id']}")
    assert (numbers, body["has_more"]) == (list(range(10, 20)), True)
    body, numbers = await page(f"?order=asc&limit=10&after={body['last_id']}")
    assert (numbers, body["has_more"]) == (list(range(20, 25)), False)
    body, numbers = await page(f"?order=asc&after={body['last_id']}")
    assert (numbers, body["has_more"], body["first_id"], body["last_id"]) == ([], False, None, None)
    body, numbers = await page("?limit=100&include[]=nothing&unknown=1")
    assert (len(numbers), body["has_more"]) == (25, False)
    body, numbers = await page("?limit=25")
    assert (len(numbers), body["has_more"]) == (25, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("limit=1.5", "limit"),
        ("limit=%D9%A3", "limit"),
        ("order=sideways", "order"),
        ("after=msg_of_nobody", "after"),
    ],
)
async def test_invalid_page_returns_400(client, query, param):
    final = await client.create(input="hi")
    (await client.get(f"/responses/{final['id']}/input_items?{query}")).error(400, param=param)


async def test_input_items_of_every_kind_follow_specification(client):
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {"role": "user", "content": [{"type": "input_file", "filename": "a.txt", "file_data": "aGk="}]},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "c", "phase": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "d"}], "phase": "final_answer"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "e"}], "content": None},
        {"type": "function_call", "call_id": "f", "name": "f", "arguments": "{}", "status": None},
        {"type": "function_call_output", "call_id": "f", "output": [{"type": "input_text", "text": "g"}]},
        {"type": "acme:thing", "status": "done", "deep": {"a": [None]}},
        {"role": "user", "content": "and?"},
    ]
    final = await client.create(input=items)
    page = (await client.get(f"/responses/{final['id']}/input_items?order=asc")).json()
    assert len(page["data"]) == len(items)
    for item in page["data"]:
        check_item(item)
    ids = [item["id"] for item in page["data"]]
    assert len(set(ids)) == len(ids)


async def test_input_items_are_the_request_input(client):
    first = await client.create(input="one")
    second = await client.create(input=[{"role": "developer", "content": "two"}, ASK], previous_response_id=first["id"])
    page = (await client.get(f"/responses/{second['id']}/input_items?order=asc")).json()
    assert [(item["type"], item["role"], item["status"]) for item in page["data"]] == [
        ("message", "developer", "completed"),
        ("message", "user", "completed"),
    ]
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "two"}]
    assert all(item["id"] for item in page["data"])


async def test_foreign_id_answers_as_unknown_id(client):
    final = await client.create(input=script("a secret"))
    items = (await client.get(f"/responses/{final['id']}/input_items")).json()["data"]
    other = client.with_key("Bearer mallory")

    async def same(method, path, **fields):
        return [
            (reply.status, reply.body)
            for reply in [
                await other.request(method, path.format(response_id), **fields)
                for response_id in (final["id"], "resp_of_nobody")
            ]
        ]

    for method, path in (("GET", "/responses/{}"), ("GET", "/responses/{}/input_items"), ("DELETE", "/responses/{}")):
        foreign, unknown = await same(method, path)
        assert foreign == unknown
        assert foreign[0] == 404
    for stream in (False, True):
        foreign, unknown = [
            await other.post(stream=stream, input="x", previous_response_id=response_id)
            for response_id in (final["id"], "resp_of_nobody")
        ]
        assert (foreign.status, foreign.body) == (unknown.status, unknown.body)
        for item_id in (final["output"][0]["id"], items[0]["id"]):
            foreign, unknown = [
                await other.post(stream=stream, input=[{"type": "item_reference", "id": reference}])
                for reference in (item_id, "msg_of_nobody")
            ]
            assert (foreign.status, foreign.body) == (unknown.status, unknown.body)
            assert foreign.status == 400
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_foreign_item_id_resolves_to_nothing(client):
    final = await client.create(input=script("the secret"))
    (item,) = final["output"]
    own_message = {"role": "assistant", "id": item["id"], "content": "my own words"}
    other = client.with_key("Bearer mallory")
    turn = await other.describe_turn(input=[own_message, ASK])
    assert turn["items"][0]["content"][0]["text"] == "my own words"
    own = await client.describe_turn(input=[{"type": "item_reference", "id": item["id"]}, ASK])
    assert own["items"][0]["content"][0]["text"] == "the secret"


async def test_invalid_key_returns_401_on_every_path(client):
    stranger = client.with_key("Bearer stranger")
    (await stranger.post(input="hi")).error(401, "invalid_api_key")
    (await stranger.post(input="hi", stream=True)).error(401, "invalid_api_key")
    for path in ("/responses/resp_x", "/responses/resp_x/input_items", "/models", "/models/scripted"):
        (await stranger.get(path)).error(401, "invalid_api_key")
    (await stranger.delete("/responses/resp_x")).error(401, "invalid_api_key")


async def test_turn_holds_owner(client, stream):
    assert (await client.describe_turn(stream, input="hi"))["owner"] == "Bearer alice"
    assert (await client.with_key("Bearer bob").describe_turn(stream, input="hi"))["owner"] == "Bearer bob"


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_32_concurrent_streams_do_not_mix(client, model):
    finals = {}

    async def stream_one(number):
        own = client.with_key(f"Bearer {number % 5}")
        steps = [f"{number}:{step} " for step in range(20)]
        async with own.stream(model=model, input=script(*steps), metadata={"number": str(number)}) as stream:
            final = await stream.rest()
        assert stream.text() == output_text(final) == "".join(steps)
        assert final["metadata"] == {"number": str(number)}
        finals[number] = (own, final)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for number in range(32):
                group.start_soon(stream_one, number)
    assert len({final["id"] for _, final in finals.values()}) == 32
    for own, final in finals.values():
        assert (await own.get(f"/responses/{final['id']}")).json() == final


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_32_slow_responses_run_concurrently(client, control, name, model):
    # All of them wait at one gate at the same time; if fewer than 32 were admitted, it would never open.
    gate, runs = name(), [name() for _ in range(32)]

    async def stream_one(run, streamed):
        final = await client.complete(
            streamed, model=model, input=script({"run": run}, {"mark": "here"}, {"gate": gate}, run)
        )
        assert output_text(final) == run

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for number, run in enumerate(runs):
                group.start_soon(stream_one, run, number % 2 == 0)
            for run in runs:
                await control.wait_for(run, "here")
            await control.open_gate(gate)
