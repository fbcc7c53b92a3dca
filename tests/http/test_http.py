"""Tests of the HTTP API, from requests to replies."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import pairwise, repeat
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio
import trio.testing
from flask import Flask
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import Backend, ResponsesKit, Timeouts, Turn, errors, outputs
from responses_kit.http import open_responses
from responses_kit.http.messages import Body, Reply, Request
from responses_kit.http.open_responses import OpenResponses
from responses_kit.http.router import WireProtocol
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import Pause, ScriptedBackend
from responses_kit_flask import Responses
from responses_kit_starlette import ResponsesApp, ResponsesMiddleware, responses_routes
from tests.support.memory import stored_records

from ..protocol.test_sse import FRAME, read_frames
from ..support.conformance import check_error, check_response, check_stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0
LIMIT = 10_000


def new_kit(*script: Any, **settings: Any) -> ResponsesKit:
    return ResponsesKit(ScriptedBackend(list(script) or ["Hi."], models=["scripted", "org/big/model"]), **settings)


async def call(kit: ResponsesKit, method: str, path: str, body: Any = None, **more: Any) -> Reply:
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    with anyio.fail_after(BOUND):
        reply = await OpenResponses(kit).handle(Request(method, path, read=body_reader(body or b""), **more))
    assert reply.stream is not None or reply.status == 204 or json.loads(reply.body) is not None
    return reply


def body_reader(body: bytes) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        return body

    return read


def decode(reply: Reply) -> Any:
    return json.loads(reply.body)


def decode_error(reply: Reply) -> dict[str, Any]:
    check_error(decode(reply))
    assert reply.headers["Content-Type"] == "application/json"
    error: dict[str, Any] = decode(reply)["error"]
    return error


# Bodies.


def read(chunks: Iterable[bytes], headers: dict[str, str], *, limit: int) -> bytes:
    """Return the body that a host reads from chunks."""
    body = Body(headers, limit=limit)
    for chunk in chunks:
        body.feed(chunk)
    return body.finish()


@given(
    body=st.binary(max_size=200),
    chunk_sizes=st.lists(st.integers(0, 200), max_size=5),
    encoding_name=st.sampled_from(["", "identity", "gzip", "x-gzip", "deflate", "GZIP "]),
)
def test_body_is_read_for_any_chunking_and_compression(body: bytes, chunk_sizes: list[int], encoding_name: str) -> None:
    name = encoding_name.strip().lower()
    compressed_body = (
        gzip.compress(body) if name.endswith("gzip") else zlib.compress(body) if name == "deflate" else body
    )
    edges = [0, *sorted(chunk_sizes), len(compressed_body)]
    chunks = [compressed_body[start:end] for start, end in pairwise(edges)]
    assert read(chunks, {"content-encoding": encoding_name}, limit=LIMIT) == body


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zlib.compress])
def test_body_limit_is_inclusive(pack: Any) -> None:
    headers = {} if pack is bytes else {"content-encoding": "gzip"}
    boundary = b"x" * LIMIT
    assert read([pack(boundary)], headers, limit=LIMIT) == boundary
    with pytest.raises(errors.PayloadTooLarge) as caught:
        read([pack(boundary + b"x")], headers, limit=LIMIT)
    assert caught.value.status == 413
    assert str(LIMIT) in caught.value.message


def test_endless_body_is_refused_at_limit() -> None:
    with pytest.raises(errors.PayloadTooLarge):
        read(repeat(b"x" * 1000), {}, limit=LIMIT)


@pytest.mark.parametrize("length", [f"{LIMIT + 1}", "9" * 5000])
def test_announced_oversize_body_is_refused_unread(length: str) -> None:
    with pytest.raises(errors.PayloadTooLarge):
        Body({"content-length": length}, limit=LIMIT)


@pytest.mark.parametrize("length", ["", "x", "-1", "1e9", "\u00b2", "\u0663", " 5", "5, 5"])
def test_invalid_content_length_is_ignored(length: str) -> None:
    assert read([b"{}"], {"content-length": length}, limit=LIMIT) == b"{}"


def test_decompression_bomb_is_refused() -> None:
    compressed = gzip.compress(b"\0" * 50_000_000)
    assert len(compressed) < 100_000
    with pytest.raises(errors.PayloadTooLarge):
        read([compressed], {"content-encoding": "gzip"}, limit=100_000)


@pytest.mark.parametrize(
    "compressed_body",
    [
        b"",
        b"{}",
        gzip.compress(b"{}", mtime=0)[:-4],
        gzip.compress(b"{}", mtime=0)[:5],
        gzip.compress(b"{}", mtime=0)[:-8] + b"\0" * 8,
        gzip.compress(b"x" * 1000, mtime=0)[:-20] + b"y" * 20,
    ],
)
def test_corrupt_compression_is_refused(compressed_body: bytes) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        read([compressed_body], {"content-encoding": "gzip"}, limit=LIMIT)
    assert caught.value.code == "invalid_encoding"


def test_multi_member_gzip_is_read_or_refused() -> None:
    compressed_body = gzip.compress(b'{"input": "a') + gzip.compress(b'b"}')
    try:
        body = read([compressed_body], {"content-encoding": "gzip"}, limit=LIMIT)
    except errors.InvalidRequest:
        return
    assert body == b'{"input": "ab"}'


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "x"])
def test_unknown_encoding_is_refused_with_alternatives(encoding: str) -> None:
    with pytest.raises(errors.UnsupportedMediaType, match="gzip"):
        read([b"{}"], {"content-encoding": encoding}, limit=LIMIT)


# Paths and methods.


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/responses", 200),
        ("POST", "/responses/", 200),
        ("POST", "responses", 200),
        ("GET", "/responses/resp_1", 404),
        ("GET", "/models", 200),
        ("GET", "/models/", 200),
        ("GET", "/models/scripted", 200),
        ("GET", "/models/scripted/", 200),
        ("GET", "/models/org/big/model", 200),
        ("GET", "/models/org/big", 404),
        ("GET", "/models/other", 404),
        ("GET", "/", 404),
        ("GET", "", 404),
        ("POST", "/", 404),
        ("GET", "/response", 404),
        ("POST", "/chat/completions", 404),
        ("GET", "/responses/a/b", 404),
        ("GET", "/responses/a/input_items/b", 404),
        ("GET", "/responses//input_items", 404),
        ("GET", "/*", 404),
        ("GET", "/responses/../models", 404),
        ("GET", "/responses", 426),
        ("DELETE", "/responses", 405),
        ("PUT", "/responses/resp_1", 405),
        ("POST", "/models", 405),
        ("POST", "/responses/resp_1/input_items", 405),
        ("OPTIONS", "/nothing", 404),
        ("HEAD", "/models", 405),
        ("post", "/responses", 405),
    ],
)
async def test_paths_and_methods_have_the_specified_statuses(method: str, path: str, status: int) -> None:
    reply = await call(new_kit(), method, path, {"input": "Hi"})
    assert reply.status == status
    if status >= 400:
        error = decode_error(reply)
        assert error["type"] == {404: "not_found", 405: "invalid_request", 426: "invalid_request"}[status]
    assert ("Allow" in reply.headers) is (status == 405)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/responses", {"GET", "POST"}),
        ("/responses/compact", {"POST"}),
        ("/responses/x/cancel", {"POST"}),
        ("/responses/x", {"GET", "DELETE"}),
        ("/responses/x/input_items", {"GET"}),
        ("/models", {"GET"}),
        ("/models/a/b", {"GET"}),
    ],
)
async def test_wrong_method_lists_allowed_methods(path: str, allowed: set[str]) -> None:
    reply = await call(new_kit(), "PATCH", path)
    assert set(reply.headers["Allow"].split(", ")) == allowed


async def test_options_is_answered_without_authentication() -> None:
    reply = await call(new_kit(owner=lambda request: None), "OPTIONS", "/responses")
    assert (reply.status, reply.body, reply.headers["Allow"]) == (204, b"", "POST, GET")


@given(path=st.text(max_size=30), method=st.sampled_from(["GET", "POST", "DELETE", "", "X"]))
async def test_any_unknown_path_returns_error_object(path: str, method: str) -> None:
    reply = await call(new_kit(), method, "/x" + path)
    assert reply.status == 404
    check_error(decode(reply))


async def test_response_lifecycle_over_http() -> None:
    kit = new_kit("Hi.", owner=lambda host: host)
    created = decode(await call(kit, "POST", "/responses", {"input": "Hi"}, host_request="ann"))
    check_response(created)
    path = f"/responses/{created['id']}"
    assert decode(await call(kit, "GET", path, host_request="ann")) == created
    assert decode(await call(kit, "GET", path + "/", host_request="ann")) == created
    page = decode(await call(kit, "GET", path + "/input_items", host_request="ann"))
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "Hi"}]
    for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        assert decode_error(await call(kit, method, path + suffix, host_request="bob"))["code"] == "response_not_found"
        assert (await call(kit, method, path + suffix, host_request=None)).status == 401
    assert decode(await call(kit, "DELETE", path, host_request="ann")) == {
        "id": created["id"],
        "object": "response",
        "deleted": True,
    }
    assert (await call(kit, "DELETE", path, host_request="ann")).status == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=ten", "limit"),
        ("limit=\u0665", "limit"),
        ("limit=1e2", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("order=up", "order"),
        ("after=msg_x", "after"),
        ("after=%FF%00", "after"),
    ],
)
async def test_invalid_page_is_refused(query: str, param: str) -> None:
    kit = new_kit()
    created = decode(await call(kit, "POST", "/responses", {"input": "Hi"}))
    reply = await call(kit, "GET", f"/responses/{created['id']}/input_items", query=query)
    assert (reply.status, decode_error(reply)["param"]) == (400, param)


async def test_query_selects_a_page() -> None:
    kit = new_kit()
    given_items = [{"role": "user", "content": f"{n}"} for n in range(3)]
    created = decode(await call(kit, "POST", "/responses", {"input": given_items}))
    path = f"/responses/{created['id']}/input_items"
    page = decode(await call(kit, "GET", path, query="limit=2&order=asc&include[]=x&unknown=1&limit="))
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"]
    rest = decode(await call(kit, "GET", path, query=f"order=asc&after={page['last_id']}"))
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2"]


# Requests.


@pytest.mark.parametrize(
    "media",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON;charset=UTF-8",
        "application/vnd.api+json",
        None,
    ],
)
async def test_json_is_accepted_with_or_without_charset(media: str | None) -> None:
    headers = {} if media is None else {"content-type": media}
    assert (await call(new_kit(), "POST", "/responses", {"input": "Hi"}, headers=headers)).status == 200


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", ";", "json"]
)
async def test_other_media_types_are_refused(media: str) -> None:
    reply = await call(new_kit(), "POST", "/responses", {"input": "Hi"}, headers={"content-type": media})
    assert (reply.status, decode_error(reply)["type"]) == (415, "invalid_request")


@pytest.mark.parametrize("accept", ["application/json", "text/html", "text/event-stream", "*/*"])
async def test_accept_header_is_ignored(accept: str) -> None:
    for stream in (True, False):
        reply = await call(
            new_kit(), "POST", "/responses", {"input": "Hi", "stream": stream}, headers={"accept": accept}
        )
        assert (reply.stream is not None) is stream


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"Hi"',
        b"\xff",
        b'{"input": "\\ud83d"}',
        b"[" * 10_000,
        b'{"input":[{"role":"user","content":[{"type":[]}]}]}',
    ],
)
async def test_invalid_body_returns_short_400(body: bytes) -> None:
    reply = await call(new_kit(), "POST", "/responses", body)
    assert reply.status == 400
    decode_error(reply)


@given(body=st.binary(max_size=80))
async def test_any_bytes_return_response_or_error_object(body: bytes) -> None:
    reply = await call(new_kit(), "POST", "/responses", body)
    assert reply.status == 400
    decode_error(reply)


async def test_unstreamed_failure_returns_error_status() -> None:
    reply = await call(new_kit("half ", LookupError("secret-host")), "POST", "/responses", {"input": "Hi"})
    assert (reply.status, decode_error(reply)["type"]) == (500, "model_error")
    assert b"secret" not in reply.body
    full = errors.TooManyRequests("All slots are taken.", retry_after=7)
    reply = await call(new_kit(full), "POST", "/responses", {"input": "Hi"})
    assert (reply.status, reply.headers["Retry-After"]) == (429, "7")


async def test_unreachable_store_returns_store_error() -> None:
    class UnreachableStore(MemoryStore):
        async def chain(self, owner: str, response_id: str) -> Any:
            raise ConnectionError("secret-host refused")

    reply = await call(
        new_kit(store=UnreachableStore()), "POST", "/responses", {"input": "Hi", "previous_response_id": "resp_1"}
    )
    assert (reply.status, decode_error(reply)["code"]) == (500, "store_error")
    assert b"secret" not in reply.body


async def test_failing_owner_hook_returns_server_error_without_details(caplog: pytest.LogCaptureFixture) -> None:
    def broken(host: Any) -> str:
        raise KeyError("secret-key")

    reply = await call(new_kit(owner=broken), "GET", "/models")
    assert (reply.status, decode_error(reply)["type"]) == (500, "server_error")
    assert b"secret" not in reply.body
    assert "secret-key" in caplog.text


async def test_unauthorized_request_is_refused_first() -> None:
    kit = new_kit(owner=lambda host: None)
    for method, path in (("POST", "/responses"), ("GET", "/models"), ("GET", "/responses/x")):
        reply = await call(kit, method, path, b"{")
        assert (reply.status, decode_error(reply)["code"]) == (401, "invalid_api_key")


def _all_errors(root: type[errors.APIError]) -> list[type[errors.APIError]]:
    ours = (child for child in root.__subclasses__() if child.__module__ == errors.__name__)
    return [root, *(error for child in ours for error in _all_errors(child))]


@pytest.mark.parametrize("kind", _all_errors(errors.APIError), ids=lambda kind: kind.__name__)
async def test_errors_have_four_members_a_status_and_a_known_type(kind: type[errors.APIError]) -> None:
    error = kind("Mend it.")
    reply = OpenResponses.render_error(error)
    assert reply.status == error.status
    assert set(decode_error(reply)) == {"type", "code", "message", "param"}
    assert str(error) == error.message
    assert 400 <= reply.status < 600
    assert (reply.status == 409) is (kind is errors.IdempotencyKeyReused), "SDKs retry server errors"


def test_error_tree_docstring_is_complete() -> None:
    names = {kind.__name__ for kind in _all_errors(errors.APIError)} | {"ConfigurationError", "IllegalOutput"}
    assert all(name in (errors.__doc__ or "") for name in names)


async def test_error_headers_are_sent() -> None:
    reply = OpenResponses.render_error(
        errors.Unauthorized("No.", param="x", code="y", headers={"WWW-Authenticate": "Bearer"})
    )
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert decode_error(reply) == {"type": "invalid_request", "code": "y", "message": "No.", "param": "x"}


# Streams.


class Client:
    """A client that collects the bytes sent, and leaves after a number of sends."""

    def __init__(self, *, leave_after: int | None = None) -> None:
        self.sent: list[bytes] = []
        self.leave_after = leave_after
        self.got = anyio.Event()

    async def send(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self.leave_after is not None and len(self.sent) >= self.leave_after:
            raise ConnectionResetError
        self.sent.append(data)
        self.got.set()


async def receive_stream(kit: ResponsesKit, client: Client) -> None:
    reply = await call(kit, "POST", "/responses", {"input": "Hi", "stream": True})
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert reply.stream is not None
    with anyio.fail_after(BOUND):
        await reply.stream(client.send)


async def test_stream_consists_of_whole_events_and_done() -> None:
    client = Client()
    await receive_stream(new_kit(outputs.Reasoning("Hm."), "\u2028\r\n data: [DONE]\n\n", "\ud83d"), client)
    assert all(data.endswith(b"\n\n") for data in client.sent), "every write consists of whole events"
    *events, last = read_frames(b"".join(client.sent))
    assert last == ("", "[DONE]")
    check_stream([json.loads(data) for _, data in events])
    assert client.sent[-1].endswith(b"data: [DONE]\n\n")


async def test_each_delta_is_sent_at_once() -> None:
    client = Client()
    await receive_stream(new_kit("one", "two", "three"), client)
    deltas = [data for data in client.sent if b"output_text.delta" in data]
    assert len(deltas) == 3
    assert FRAME.fullmatch(deltas[1])


async def test_failure_after_first_byte_is_event() -> None:
    client = Client()
    await receive_stream(new_kit("half ", LookupError("secret-host")), client)
    *events, last = read_frames(b"".join(client.sent))
    assert [kind for kind, _ in events][-2:] == ["error", "response.failed"]
    assert last == ("", "[DONE]")
    assert b"secret" not in b"".join(client.sent)


async def test_invalid_stream_request_returns_error() -> None:
    for body in ({"input": 1, "stream": True}, {"input": "Hi", "model": "other", "stream": True}):
        reply = await call(new_kit(), "POST", "/responses", body)
        assert (reply.status, reply.stream) == (400, None)
        decode_error(reply)


async def test_comments_are_sent_only_while_idle() -> None:
    client = Client()
    kit = new_kit("one", Pause(0.3), "two", timeouts=Timeouts(keep_alive=0.05))
    await receive_stream(kit, client)
    comments = [data for data in client.sent if data.startswith(b":")]
    assert 1 <= len(comments) <= 6
    read = [json.loads(data) for _, data in read_frames(b"".join(client.sent))[:-1]]
    check_stream(read)
    active = Client()
    await receive_stream(
        new_kit(*[step for _ in range(20) for step in ("word ", Pause(0.02))], timeouts=Timeouts(keep_alive=0.2)),
        active,
    )
    assert not any(data.startswith(b":") for data in active.sent)


@pytest.mark.parametrize("leave_after", range(5))
async def test_disconnect_ends_stream_with_final_record(leave_after: int) -> None:
    store = MemoryStore()
    client = Client(leave_after=leave_after)
    await receive_stream(new_kit("one", "two", "three", store=store), client)
    assert len(client.sent) == leave_after
    (record,) = stored_records(store)
    assert record.final
    assert json.loads(record.response)["status"] == "cancelled"


async def test_disconnect_during_silence_is_detected_by_comment() -> None:
    store = MemoryStore()
    client = Client(leave_after=2)
    with anyio.fail_after(BOUND):
        await receive_stream(new_kit("one", Pause(60), store=store, timeouts=Timeouts(keep_alive=0.02)), client)
    (record,) = stored_records(store)
    assert json.loads(record.response)["status"] == "cancelled"


@pytest.mark.parametrize("keep_alive", [0.02, 1e9])
async def test_unread_stream_is_aborted_after_send_timeout(keep_alive: float) -> None:
    store = MemoryStore()
    kit = new_kit("one", "two", store=store, timeouts=Timeouts(keep_alive=keep_alive, send=0.1))

    async def never_done(data: bytes) -> None:
        await anyio.sleep_forever()

    reply = await call(kit, "POST", "/responses", {"input": "Hi", "stream": True})
    assert reply.stream is not None
    with anyio.fail_after(BOUND):
        await reply.stream(never_done)
    (record,) = stored_records(store)
    assert json.loads(record.response)["status"] == "cancelled"


def test_silence_before_slow_send_does_not_count_towards_send_timeout() -> None:
    received: list[bytes] = []

    async def send(data: bytes) -> None:
        await anyio.sleep(30 if b"late" in data else 0)
        received.append(data)

    async def stream() -> None:
        kit = ResponsesKit(ScriptedBackend([Pause(59), "late"]), timeouts=Timeouts(keep_alive=60, send=60))
        reply = await call(kit, "POST", "/responses", {"input": "Hi", "stream": True})
        assert reply.stream is not None
        await reply.stream(send)

    trio.run(stream, clock=trio.testing.MockClock(autojump_threshold=0))
    assert b"response.completed" in b"".join(received)


async def test_unread_stream_frees_thread_despite_shielded_send() -> None:
    closed = threading.Event()

    class Endless(Backend):
        models = ("endless",)

        def generate(self, turn: Turn) -> Iterator[str]:
            try:
                while True:
                    yield "word "
            finally:
                closed.set()

    store = MemoryStore()
    kit = ResponsesKit(Endless(), store=store, timeouts=Timeouts(keep_alive=0.02, send=0.1))
    completed = anyio.Event()

    async def shielded(data: bytes) -> None:
        if b"delta" in data:
            with anyio.CancelScope(shield=True):
                await completed.wait()

    reply = await call(kit, "POST", "/responses", {"input": "Hi", "stream": True})
    assert reply.stream is not None
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(reply.stream, shielded)
            await anyio.to_thread.run_sync(closed.wait, BOUND)
            completed.set()
    (record,) = stored_records(store)
    assert json.loads(record.response)["status"] == "cancelled"


async def test_cancelled_stream_has_final_record() -> None:
    store = MemoryStore()
    client = Client()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(receive_stream, new_kit("one", Pause(60), store=store), client)
            await client.got.wait()
            group.cancel_scope.cancel()
    (record,) = stored_records(store)
    assert json.loads(record.response)["status"] == "cancelled"


def test_routes_docstring_is_complete() -> None:
    for path in OpenResponses.routes:
        shown = "/" + path.replace("**", "*").replace("*", "{id}")
        assert shown in (open_responses.__doc__ or ""), shown


async def test_untyped_body_is_json_unless_origin_is_sent() -> None:
    """Browsers send such a body across origins without a CORS preflight."""
    kit = new_kit("Hi")
    for headers, status in (({}, 200), ({"origin": "https://elsewhere.example"}, 415)):
        assert (await call(kit, "POST", "/responses", {"input": "x"}, headers=headers)).status == status


async def test_replies_are_not_cacheable() -> None:
    reply = await call(new_kit("Hi"), "POST", "/responses", {"input": "x"})
    assert reply.headers["Cache-Control"] == "private, no-store"


@pytest.mark.parametrize("dialect", ["lmsp", int, None, WireProtocol])
def test_invalid_dialect_is_refused(dialect: Any) -> None:
    kit, app = new_kit("Hi"), Flask("app")
    for streamed in (
        lambda: ResponsesApp(kit, dialect=dialect),
        lambda: responses_routes(kit, dialect=dialect),
        lambda: ResponsesMiddleware(app, kit, dialect=dialect),
        lambda: Responses(app, kit, dialect=dialect),
    ):
        with pytest.raises(errors.ConfigurationError, match="must be a WireProtocol class"):
            streamed()
