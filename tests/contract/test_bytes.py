"""The contract's rules "Bytes" for replies. The client checks the framing of every stream."""

from __future__ import annotations

import time

import pytest

from . import hosts
from .client import output_text, script

pytestmark = pytest.mark.anyio

SERVED_BY = [*hosts.DEFAULT_HOSTS, hosts.FLASK_VIEW]

UNUSUAL_TEXTS = {
    "multi-byte characters": "h\u00e9llo \u4f60\u597d \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "end marker": "data: [DONE]\n\n[DONE]",
    "event syntax": 'event: response.completed\ndata: {"type": "response.completed"}\n\n',
    "all line separators": "a\nb\rc\r\nd\u2028e\u2029f\u0085g\u000bh\u000ci",
    "control characters": "".join(map(chr, range(32))) + "\u007f",
    "quotes and backslashes": "\"'\\ \\n \\u0041 </script>",
    "byte order mark": "\ufeffafter",
    "noncharacters": "\ufffe\uffff\U0010ffff",
    "surrounding spaces": "  a  ",
}


@pytest.mark.parametrize("text", UNUSUAL_TEXTS.values(), ids=UNUSUAL_TEXTS)
@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_output_text_arrives_unchanged(client, model, text):
    pieces = [*text] if len(text) < 60 else [text]
    assert output_text(await client.create(model=model, input=script(*pieces))) == text
    async with client.stream(model=model, input=script(*pieces)) as stream:
        final = await stream.rest()
    assert stream.text() == output_text(final) == text
    raw = b"".join(stream.chunks)
    assert raw.isascii()
    assert raw.count(b"data: [DONE]\n\n") == 1
    assert output_text((await client.get(f"/responses/{final['id']}")).json()) == text


async def test_input_text_reaches_model_unchanged(client, stream):
    for text in UNUSUAL_TEXTS.values():
        turn = await client.describe_turn(stream, input=[{"role": "user", "content": "x" + text}])
        assert turn["messages"][0]["content"] == "x" + text


@pytest.mark.parametrize("text", ["\ud83d", "a\ude00b", "\ud83d\ud83d"])
async def test_lone_surrogate_from_model_is_replaced(client, stream, text):
    final = await client.complete(stream, input=script(text, " and on"))
    assert output_text(final).endswith(" and on")


@pytest.mark.parametrize("field", ["input", "instructions", "metadata"])
async def test_lone_surrogate_from_client_is_handled(client, stream, field):
    value = {"metadata": b'{"a": "\\ud83d"}'}.get(field, b'"\\ud83d"')
    body = b'{"model": "scripted", "input": "hi", "stream": %s, "%s": %s}' % (
        b"true" if stream else b"false", field.encode(), value,
    )  # fmt: skip
    body = body.replace(b'"input": "hi", ', b"") if field == "input" else body
    reply = await client.request("POST", "/responses", body)
    if reply.status != 200:
        reply.error(400)


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_multibyte_character_split_over_outputs_is_not_split_on_wire(client, model):
    # The halves of a surrogate pair are not valid text on their own.
    async with client.stream(model=model, input=script("a", "\ud83d", "\ude00", "b")) as stream:
        final = await stream.rest()
    assert output_text(final)[0] == "a"
    assert output_text(final)[-1] == "b"
    assert output_text(final).encode()


async def test_stream_has_sse_headers_and_no_content_length(client):
    async with client.stream(input=script("hi")) as stream:
        assert stream.headers["content-type"].split(";")[0] == "text/event-stream"
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.headers["x-accel-buffering"] == "no"
        assert "content-length" not in stream.headers
        assert "content-encoding" not in stream.headers
        await stream.rest()


async def test_whole_response_is_json_with_content_length(client):
    reply = await client.request("POST", "/responses", json={"model": "scripted", "input": script("h\u00e9")})
    assert reply.headers["content-type"].split(";")[0] == "application/json"
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert reply.body.isascii()


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json", "*/*", "text/html", "", "image/png"])
async def test_accept_header_is_ignored(client, accept):
    headers = {"Accept": accept}
    async with client.stream(headers, input=script("hi")) as stream:
        assert stream.headers["content-type"].split(";")[0] == "text/event-stream"
        await stream.rest()
    body = {"model": "scripted", "input": script("hi")}
    assert (await client.request("POST", "/responses", json=body, headers=headers)).json()["status"] == "completed"


@pytest.mark.parametrize("coding", ["gzip", "gzip, deflate, br, zstd", "identity"])
async def test_compression_does_not_delay_events(client, control, name, coding):
    gate = name()
    headers = {"Accept-Encoding": coding}
    async with client.stream(headers, input=script("x" * 2000, {"gate": gate}, "rest")) as stream:
        await stream.until("response.output_text.delta", within=3)
        await control.open_gate(gate)
        final = await stream.rest()
    assert output_text(final) == "x" * 2000 + "rest"
    reply = await client.request(
        "POST", "/responses", json={"model": "scripted", "input": script("y" * 2000)}, headers=headers
    )
    assert output_text(reply.json()) == "y" * 2000


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_idle_stream_gets_comments_without_sequence_number(client, server, control, name, model):
    if server.host.is_view and model == "scripted-sync":
        return  # a blocked plain view occupies the thread that would send comments
    gate = name()
    async with client.stream(model=model, input=script("a", {"gate": gate}, "b")) as stream:
        await stream.until("response.output_text.delta")
        for _ in range(3):
            started = time.monotonic()
            frame = await stream.frame(within=3)
            assert frame.is_comment
            assert time.monotonic() - started < 1.5
        await control.open_gate(gate)
        assert output_text(await stream.rest()) == "ab"


async def test_idle_stream_gets_comments_before_first_output(client, control, name):
    gate = name()
    async with client.stream(input=script({"gate": gate}, "late")) as stream:
        await stream.until("response.in_progress")
        assert (await stream.frame(within=3)).is_comment
        await control.open_gate(gate)
        await stream.rest()


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_long_delta_is_one_event_and_10000_short_deltas_all_arrive(client, model):
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


async def test_body_ends_after_done_and_connection_is_reused(client, server):
    async with client.connect() as connection:
        for number in range(1 if server.host.closes_after_stream else 3):
            body = b'{"model": "scripted", "stream": true, "input": "[\\"%d\\"]"}' % number
            await connection.send_bytes(client.request_bytes(connection, "POST", "/v1/responses", body, {}))
            status, _ = await connection.head()
            raw = await connection.body()
            assert status == 200
            assert raw.endswith(b"\n\ndata: [DONE]\n\n")
            if not server.host.closes_after_stream:
                connection.next_cycle()
