"""The contract's rules "Bytes" for requests: errors have the API's format, never a framework's."""

from __future__ import annotations

import gzip
import json
import zlib

import anyio
import pytest

from .client import Client, output_text, script
from .hosts import MAX_BODY_BYTES

pytestmark = pytest.mark.anyio

PLAIN_BODY = json.dumps({"model": "scripted", "input": script("understood")}).encode()


async def check_understood(client: Client, body: bytes = PLAIN_BODY, path: str = "/responses", **more) -> None:
    reply = await client.request("POST", path, body, **more)
    assert reply.status == 200, reply.body[:300]
    assert output_text(reply.json()) == "understood"


@pytest.mark.parametrize(
    "media",
    [
        "application/json",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        'application/json; charset="utf-8"',
        "Application/JSON",
        "application/json ; profile=x",
        "application/vnd.api+json",
    ],
)
async def test_json_content_type_accepts_any_parameters(client, media):
    await check_understood(client, headers={"Content-Type": media})


async def test_body_without_content_type_is_json(client):
    await check_understood(client, headers={"Content-Type": ""})


@pytest.mark.parametrize(
    "media",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/xml",
        "json",
        ";",
    ],
)
async def test_other_content_type_returns_415(client, media):
    (await client.request("POST", "/responses", PLAIN_BODY, headers={"Content-Type": media})).error(
        415, "unsupported_media_type"
    )


async def test_chunked_body_is_accepted(client):
    await check_understood(client, chunked=True)


async def test_expect_100_continue_is_answered(client):
    async with client.connect() as connection:
        data = client.request_bytes(connection, "POST", "/v1/responses", PLAIN_BODY, {"Expect": "100-continue"})
        await connection.send_bytes(data)
        with anyio.fail_after(5):
            assert (await connection.head())[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"model": "scripted", "input": "x"',
        b'{"model": "scripted", "input": "x"}}',
        b'{"model": "scripted" "input": "x"}',
        b"{'model': 'scripted'}",
        b'{"input": "x", "temperature": NaN}',
        b'{"input": "x", "temperature": Infinity}',
        b'{"input": "x", "temperature": -Infinity}',
        b'{"input": "\x01"}',
        b'{"input": "\\x"}',
        b'{"input": "\xff\xfe"}',
        b'{"input": "\xed\xa0\x80"}',
        b"\x00",
        b"input=hello",
        '{"input": "x"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"input": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    ],
    ids=lambda body: repr(body[:20])[2:-1] + (f" … {len(body)}" if len(body) > 20 else ""),
)
async def test_invalid_json_returns_400(client, body):
    error = (await client.request("POST", "/responses", body)).error(400)
    assert error["type"] == "invalid_request"


@pytest.mark.parametrize("body", [b"null", b"[]", b'"text"', b"5", b"true"])
async def test_json_other_than_object_returns_400(client, body):
    (await client.request("POST", "/responses", body)).error(400, "invalid_request")


@pytest.mark.parametrize("field", ["input", "tools", "metadata", "text", "reasoning"])
async def test_deep_nesting_is_handled(client, field):
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * 150 + b"1" + closing * 150
        body = b'{"model": "scripted", "input": "hi", "%s": %s}' % (field.encode(), deep)
        reply = await client.request("POST", "/responses", body)
        if reply.status != 200:  # an unknown member is ignored, however deep
            reply.error(400)


async def test_syntax_error_names_position_without_echo(client):
    reply = await client.request("POST", "/responses", b'{"input": "my secret words", oops}')
    error = reply.error(400)
    assert "secret" not in error["message"]
    assert "oops" not in error["message"]


async def test_announced_oversize_body_returns_413_before_it_is_sent(client, server):
    async with client.connect() as connection:
        length = str(MAX_BODY_BYTES + 1)
        head = client.request_bytes(connection, "GET", "/v1/responses", None, {})
        head = head.replace(b"GET ", b"POST ")[:-2] + b"Content-Length: " + length.encode() + b"\r\n\r\n"
        await connection.send_bytes(head)
        if server.host.buffers_bodies:
            await connection.send_bytes(b" " * int(length))
        with anyio.fail_after(5):
            status, headers = await connection.head()
            body = await connection.body()
    assert status == 413
    assert headers["content-type"].split(";")[0] == "application/json"
    assert json.loads(body)["error"]["code"] == "payload_too_large"


async def test_growing_oversize_body_returns_413(client):
    async with client.connect() as connection:
        head = client.request_bytes(
            connection, "POST", "/v1/responses", b"", {"Content-Type": "application/json"}, chunked=True
        )
        chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        status = None

        async def send():
            try:
                await connection.send_bytes(head.removesuffix(b"0\r\n\r\n"))
                for _ in range(MAX_BODY_BYTES // 65_536 + 2):
                    await connection.send_bytes(chunk)
                await connection.send_bytes(b"0\r\n\r\n")
            except anyio.BrokenResourceError:
                pass  # the server has replied and closed the connection

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(send)
                status, _ = await connection.head()
                body = await connection.body()
                group.cancel_scope.cancel()
    assert status == 413
    assert json.loads(body)["error"]["code"] == "payload_too_large"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity", "GZIP"])
async def test_compressed_body_is_accepted(client, coding):
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[coding.lower()](PLAIN_BODY)
    await check_understood(client, packed, headers={"Content-Encoding": coding})


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 400_000_000])
async def test_decompression_bomb_returns_413(client, control, size):
    memory_before = await control.peak_memory()
    packer = zlib.compressobj(9, wbits=31)
    piece = b" " * 1_000_000
    bomb = (
        b"".join(packer.compress(piece) for _ in range(size // len(piece)))
        + packer.compress(b" " * 1_000_000)
        + packer.flush()
    )
    reply = await client.request("POST", "/responses", bomb, headers={"Content-Encoding": "gzip"})
    reply.error(413, "payload_too_large")
    assert await control.peak_memory() - memory_before < 100


@pytest.mark.parametrize(
    "body",
    [
        PLAIN_BODY,
        b"",
        gzip.compress(PLAIN_BODY, mtime=0)[:-9],
        gzip.compress(PLAIN_BODY, mtime=0)[:5],
        b"\x1f\x8b" + b"\xff" * 50,
    ],
    ids=["not compressed", "empty", "truncated", "header only", "random bytes"],
)
async def test_corrupt_compressed_body_returns_400(client, body):
    (await client.request("POST", "/responses", body, headers={"Content-Encoding": "gzip"})).error(400)


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "x"])
async def test_unknown_encoding_returns_415(client, coding):
    (await client.request("POST", "/responses", PLAIN_BODY, headers={"Content-Encoding": coding})).error(415)


METHODS = {
    "/responses": {"POST"},
    "/responses/resp_x": {"GET", "DELETE"},
    "/responses/resp_x/input_items": {"GET"},
    "/models": {"GET"},
    "/models/scripted": {"GET"},
}


@pytest.mark.parametrize("path", METHODS)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "TRACE"])
async def test_wrong_method_returns_405_with_allow(client, path, method):
    right = METHODS[path]
    if method in right or (path, method) == ("/responses", "GET"):
        return  # GET /responses opens a WebSocket; without an upgrade it returns 426
    reply = await client.request(method, path, PLAIN_BODY if method in ("POST", "PUT", "PATCH") else None)
    reply.error(405, "method_not_allowed")
    allowed = {name.strip() for name in reply.headers["allow"].split(",")}
    assert right <= allowed <= right | {"HEAD", "OPTIONS", "GET"}


async def test_get_without_upgrade_returns_426(client):
    reply = await client.get("/responses")
    assert reply.status in (405, 426)
    reply.error(reply.status)


@pytest.mark.parametrize("path", METHODS)
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
async def test_head_and_options_are_answered(client, path, method):
    reply = await client.request(method, path)
    assert reply.status in (200, 204, 404, 405, 426), reply.status
    if reply.status == 405:
        assert reply.headers["allow"]
    if method == "HEAD":
        assert reply.body == b""


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/responsesx",
        "/response",
        "/responses/resp_x/nothing",
        "/responses/resp_x/input_items/more",
        "/v1/responses",
        "/Responses",
        "/responses/resp_x/input_items%00",
    ],
)
async def test_unknown_path_returns_404(client, path):
    for method in ("GET", "POST"):
        (await client.request(method, path, b"{}" if method == "POST" else None)).error(404, "not_found")


@pytest.mark.parametrize(
    "name", ["resp_x", "%00", "..%2F..", "%F0%9F%92%A9", "%FF%FE", "a" * 4000, "%2e%2e", "resp_'--", "null", "%0dX-A:b"]
)
async def test_unknown_id_of_any_shape_returns_404(client, name):
    reply = await client.get(f"/responses/{name}")
    reply.error(404)
    assert "x-a" not in reply.headers


async def test_trailing_slash_is_accepted(client):
    await check_understood(client, path="/responses/")
    final = (await client.request("POST", "/responses/", PLAIN_BODY)).json()
    for path in (f"/responses/{final['id']}", f"/responses/{final['id']}/input_items", "/models", "/models/scripted"):
        plain, slashed = await client.get(path), await client.get(f"{path}/")
        assert plain.status == slashed.status == 200
        assert plain.json() == slashed.json()
    assert (await client.delete(f"/responses/{final['id']}/")).status == 200


async def test_query_on_create_is_ignored(client):
    await check_understood(client, path="/responses?api-version=1&stream=true")


async def test_invalid_stream_request_returns_http_error(client):
    for fields in ({"temperature": 9}, {"model": "none"}, {"previous_response_id": "resp_x"}, {"input": []}):
        reply = await client.post(**{"input": "hi", "stream": True, **fields})
        reply.error(400)


async def test_connection_survives_errors(client):
    async with client.connect() as connection:
        for body, expected in (
            (b"{", 400),
            (PLAIN_BODY, 200),
            (b'{"model": "none", "input": "x"}', 400),
            (PLAIN_BODY, 200),
        ):
            await connection.send_bytes(client.request_bytes(connection, "POST", "/v1/responses", body, {}))
            status, _ = await connection.head()
            await connection.body()
            assert status == expected
            connection.next_cycle()
