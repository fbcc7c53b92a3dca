"""Two server processes on one store: each can read, continue, cancel and resume responses of the other."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import anyio
import httpx
import pytest

from tests.support.conformance import check_stream

from .conftest import Fleet, Member
from .kit import LEASE

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

BOUND = 30
KILLS = int(os.environ.get("RESPONSES_KIT_TEST_KILLS", "3"))


def asking(words: int, pause: float, **more: Any) -> dict[str, Any]:
    return {"input": json.dumps({"words": words, "pause": pause}), **more}


async def post(member: Member, path: str, body: Any = None) -> dict[str, Any]:
    reply = await member.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def get(member: Member, path: str) -> dict[str, Any]:
    reply = await member.client.get(path)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def read(frames: str) -> list[dict[str, Any]]:
    """Return the events in the bytes of a stream."""
    data = [frame.partition("\ndata: ")[2] for frame in frames.split("\n\n") if frame.startswith("event: ")]
    return [json.loads(event) for event in data]


async def follow(member: Member, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    query = "stream=true" if after is None else f"stream=true&starting_after={after}"
    reply = await member.client.get(f"/responses/{response_id}?{query}")
    assert reply.status_code == 200, reply.text
    assert reply.text.endswith("data: [DONE]\n\n")
    return read(reply.text)


async def ended(member: Member, response_id: str) -> dict[str, Any]:
    """Poll a response until it is final and return it."""
    with anyio.fail_after(BOUND):
        while (response := await get(member, f"/responses/{response_id}"))["status"] in ("queued", "in_progress"):
            await anyio.sleep(0.05)
    return response


async def test_response_is_read_continued_and_deleted_by_other_process(fleet: Fleet) -> None:
    async with fleet.members(2) as (a, b):
        first = await post(a, "/responses", asking(2, 0))
        assert await get(b, f"/responses/{first['id']}") == first
        second = await post(b, "/responses", asking(1, 0, previous_response_id=first["id"]))
        assert second["usage"]["input_tokens"] == 3
        items = await get(a, f"/responses/{second['id']}/input_items")
        assert len(items["data"]) == 1
        assert (await b.client.delete(f"/responses/{first['id']}")).status_code == 200
        assert (await a.client.get(f"/responses/{first['id']}")).status_code == 404


async def test_background_response_is_followed_from_other_process(fleet: Fleet) -> None:
    async with fleet.members(2) as (a, b):
        queued = await post(a, "/responses", asking(20, 0.02, background=True))
        assert queued["status"] == "queued"
        with anyio.fail_after(BOUND):
            whole = await follow(b, queued["id"])
        assert check_stream(whole) == await get(a, f"/responses/{queued['id']}")
        for after in (0, 7, len(whole) - 1):
            assert await follow(b, queued["id"], after) == whole[after + 1 :]


@pytest.mark.parametrize("background", [True, False])
async def test_response_is_cancelled_from_other_process_within_one_second(fleet: Fleet, background: bool) -> None:
    async with fleet.members(2) as (a, b):
        received_events: list[dict[str, Any]] = []
        identified = anyio.Event()
        cancelled_at = 0.0

        async def watch() -> None:
            body = asking(1000, 0.05, background=background, stream=True)
            async with a.client.stream("POST", "/responses", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        received_events.append(json.loads(line.removeprefix("data: ")))
                        if len(received_events) == 8:
                            identified.set()

        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                await identified.wait()
                response_id = received_events[0]["response"]["id"]
                cancelled_at = anyio.current_time()
                cancelled = await post(b, f"/responses/{response_id}/cancel")
        assert anyio.current_time() - cancelled_at < 3  # the stream at A has finished too
        assert cancelled["status"] == "cancelled"
        assert check_stream(received_events) == cancelled == await get(a, f"/responses/{response_id}")
        assert await post(b, f"/responses/{response_id}/cancel") == cancelled


async def test_terminated_process_ends_its_streams_in_time(fleet: Fleet) -> None:
    async with fleet.members(2) as (a, b):
        running = await post(a, "/responses", asking(1000, 0.05, background=True))
        final_responses: list[dict[str, Any]] = []

        async def watch(words: int) -> None:
            async with a.client.stream("POST", "/responses", json=asking(words, 0.05, stream=True)) as reply:
                text = "".join([piece async for piece in reply.aiter_text()])
            final_responses.append(check_stream(read(text)))
            assert text.endswith("data: [DONE]\n\n")

        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(watch, 20)
                group.start_soon(watch, 1000)
                while (await get(a, f"/responses/{running['id']}"))["status"] == "queued":
                    pass
                await anyio.sleep(0.3)
                a.terminate()
            assert await a.wait() in (0, -15)
        assert sorted(response["status"] for response in final_responses) == ["completed", "failed"]
        for response in final_responses:
            assert await get(b, f"/responses/{response['id']}") == response
        assert (await get(b, f"/responses/{running['id']}"))["status"] == "failed"


async def test_killed_process_leaves_nothing_in_progress_and_loses_no_event(fleet: Fleet) -> None:
    """Kill processes at random times during background runs and foreground streams."""
    chance = random.Random(4)
    figures = {
        "kills": 0,
        "recovered": 0,
        "finished before kill": 0,
        "events received": 0,
        "events logged": 0,
        "late": 0.0,
    }
    async with fleet.member() as b:
        conversation = await post(b, "/responses", asking(1, 0))
        for _ in range(KILLS):
            async with fleet.member() as a:
                streams: list[list[dict[str, Any]]] = [[], [], []]

                async def watch(received_events: list[dict[str, Any]], body: dict[str, Any], a: Member = a) -> None:
                    try:
                        async with a.client.stream("POST", "/responses", json=body) as reply:
                            async for line in reply.aiter_lines():
                                if line.startswith("data: {"):
                                    received_events.append(json.loads(line.removeprefix("data: ")))
                    except httpx.HTTPError:
                        pass

                with anyio.fail_after(BOUND):
                    async with anyio.create_task_group() as group:
                        more = {"stream": True, "previous_response_id": conversation["id"]}
                        for received_events, kind in zip(streams, ({}, {"background": True}, {}), strict=True):
                            group.start_soon(watch, received_events, asking(60, 0.02, **kind, **more))
                        while not all(streams):
                            await anyio.sleep(0.01)
                        await anyio.sleep(chance.random() * 1.5)
                        a.kill()
                killed = anyio.current_time()
                figures["kills"] += 1
                for received_events in streams:
                    response = await ended(b, received_events[0]["response"]["id"])
                    figures["late"] = max(figures["late"], anyio.current_time() - killed)
                    log = await follow(b, response["id"])
                    assert check_stream(log) == response
                    assert received_events == log[: len(received_events)], "every received event is in the log"
                    recovered = response["status"] == "failed"
                    assert recovered or response["status"] == "completed"
                    figures["recovered" if recovered else "finished before kill"] += 1
                    figures["events received"] += len(received_events)
                    figures["events logged"] += len(log)
                    continued = await post(b, "/responses", asking(1, 0, previous_response_id=response["id"]))
                    assert continued["status"] == "completed"
            assert figures["late"] < LEASE + 1.5
            conversation = await post(b, "/responses", asking(1, 0, previous_response_id=conversation["id"]))
    print(f"\n{figures}")
