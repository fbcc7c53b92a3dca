"""The rules of "Bytes" that concern what is sent. The client's own reader checks the framing of every stream."""

from __future__ import annotations

import time

import pytest

from . import hosts
from .client import output_text, script

pytestmark = pytest.mark.anyio

SERVED_BY = [*hosts.EVERYDAY, hosts.FLASK_VIEW]

NASTY = {
    "multi-byte characters": "h\u00e9llo \u4f60\u597d \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "the end marker": "data: [DONE]\n\n[DONE]",
    "something like an event": 'event: response.completed\ndata: {"type": "response.completed"}\n\n',
    "line ends of all kinds": "a\nb\rc\r\nd\u2028e\u2029f\u0085g\u000bh\u000ci",
    "control characters": "".join(map(chr, range(32))) + "\u007f",
    "quotes and backslashes": "\"'\\ \\n \\u0041 </script>",
    "a byte order mark": "\ufeffafter",
    "noncharacters": "\ufffe\uffff\U0010ffff",
    "spaces around": "  a  ",
}


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_any_text_arrives_as_it_was_said(client, model, text):
    pieces = [*text] if len(text) < 60 else [text]
    assert output_text(await client.create(model=model, input=script(*pieces))) == text
    async with client.stream(model=model, input=script(*pieces)) as stream:
        final = await stream.rest()
    assert stream.text() == output_text(final) == text
    raw = b"".join(stream.writes)
    assert raw.isascii()
    assert raw.count(b"data: [DONE]\n\n") == 1
    assert output_text((await client.get(f"/responses/{final['id']}")).json()) == text


async def test_any_text_is_heard_as_it_was_written(client, stream):
    for text in NASTY.values():
        told = await client.told(stream, input=[{"role": "user", "content": "x" + text}])
        assert told["messages"][0]["content"] == "x" + text


@pytest.mark.parametrize("text", ["\ud83d", "a\ude00b", "\ud83d\ud83d"])
async def test_a_lone_surrogate_from_the_model_crashes_nothing(client, stream, text):
    final = await client.made(stream, input=script(text, " and on"))
    assert output_text(final).endswith(" and on")


@pytest.mark.parametrize("field", ["input", "instructions", "metadata"])
async def test_a_lone_surrogate_from_the_client_crashes_nothing(client, stream, field):
    value = {"metadata": b'{"a": "\\ud83d"}'}.get(field, b'"\\ud83d"')
    body = b'{"model": "puppet", "input": "hi", "stream": %s, "%s": %s}' % (
        b"true" if stream else b"false", field.encode(), value,
    )  # fmt: skip
    body = body.replace(b'"input": "hi", ', b"") if field == "input" else body
    reply = await client.request("POST", "/responses", body)
    if reply.status != 200:
        reply.error(400)


@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_a_character_that_is_torn_over_two_outputs_is_not_torn_on_the_wire(client, model):
    # Halves of a surrogate pair: no text at all by themselves.
    async with client.stream(model=model, input=script("a", "\ud83d", "\ude00", "b")) as stream:
        final = await stream.rest()
    assert output_text(final)[0] == "a"
    assert output_text(final)[-1] == "b"
    assert output_text(final).encode()


async def test_a_stream_has_these_headers_and_no_length(client):
    async with client.stream(input=script("hi")) as stream:
        assert stream.headers["content-type"].split(";")[0] == "text/event-stream"
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.headers["x-accel-buffering"] == "no"
        assert "content-length" not in stream.headers
        assert "content-encoding" not in stream.headers
        await stream.rest()


async def test_a_whole_answer_is_json_with_its_length(client):
    reply = await client.request("POST", "/responses", json={"model": "puppet", "input": script("h\u00e9")})
    assert reply.headers["content-type"].split(";")[0] == "application/json"
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert reply.body.isascii()


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json", "*/*", "text/html", "", "image/png"])
async def test_what_is_accepted_is_never_negotiated(client, accept):
    headers = {"Accept": accept}
    async with client.stream(headers, input=script("hi")) as stream:
        assert stream.headers["content-type"].split(";")[0] == "text/event-stream"
        await stream.rest()
    body = {"model": "puppet", "input": script("hi")}
    assert (await client.request("POST", "/responses", json=body, headers=headers)).json()["status"] == "completed"


@pytest.mark.parametrize("coding", ["gzip", "gzip, deflate, br, zstd", "identity"])
async def test_compression_holds_no_event_back(client, hand, name, coding):
    gate = name()
    headers = {"Accept-Encoding": coding}
    async with client.stream(headers, input=script("x" * 2000, {"gate": gate}, "rest")) as stream:
        await stream.until("response.output_text.delta", within=3)
        await hand.open(gate)
        final = await stream.rest()
    assert output_text(final) == "x" * 2000 + "rest"
    whole = await client.request(
        "POST", "/responses", json={"model": "puppet", "input": script("y" * 2000)}, headers=headers
    )
    assert output_text(whole.json()) == "y" * 2000


@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_silence_is_filled_with_comments_that_have_no_number(client, server, hand, name, model):
    if server.host.bound and model == "puppet-sync":
        return  # a plain view that is silent has the thread that would send them
    gate = name()
    async with client.stream(model=model, input=script("a", {"gate": gate}, "b")) as stream:
        await stream.until("response.output_text.delta")
        for _ in range(3):
            begun = time.monotonic()
            frame = await stream.frame(within=3)
            assert frame.comment
            assert time.monotonic() - begun < 1.5
        await hand.open(gate)
        assert output_text(await stream.rest()) == "ab"


async def test_comments_come_before_the_first_output_too(client, hand, name):
    gate = name()
    async with client.stream(input=script({"gate": gate}, "late")) as stream:
        await stream.until("response.in_progress")
        assert (await stream.frame(within=3)).comment
        await hand.open(gate)
        await stream.rest()


@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_a_long_piece_is_one_event_and_ten_thousand_short_ones_are_all_there(client, model):
    async with client.stream(model=model, input=script("x" * 1_000_000), store=False) as stream:
        await stream.rest()
        assert [len(event["delta"]) for event in stream.events if "delta" in event] == [1_000_000]
    words = [f"{number} " for number in range(3_000)]
    async with client.stream(model=model, input=script(*words), store=False) as stream:
        events = 0
        while event := await stream.next():
            events += event["type"] == "response.output_text.delta"
        assert events == 3_000
        assert stream.text() == "".join(words)


async def test_the_body_ends_after_done_and_the_connection_serves_on(client, server):
    async with client.connect() as connection:
        for number in range(1 if server.host.closes else 3):
            body = b'{"model": "puppet", "stream": true, "input": "[\\"%d\\"]"}' % number
            await connection.send_bytes(client.request_bytes(connection, "POST", "/v1/responses", body, {}))
            status, _ = await connection.head()
            raw = await connection.body()
            assert status == 200
            assert raw.endswith(b"\n\ndata: [DONE]\n\n")
            if not server.host.closes:
                connection.next_cycle()
