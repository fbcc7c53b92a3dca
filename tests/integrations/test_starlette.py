"""The ASGI integration, called without a server; `tests/contract` uses real servers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.requests import Request as HostRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from responses_kit import Limits, ResponsesKit, Timeouts
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import Pause, ScriptedBackend
from responses_kit_starlette import ResponsesApp, ResponsesMiddleware, responses_routes
from tests.support.memory import stored_records

from ..protocol.test_sse import read_frames
from ..support.conformance import check_error, check_response, check_stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

TIMEOUT = 5.0


class Exchange:
    """One request as a server would send it, and the messages of the reply.

    Args:
        disconnects_after: Number of messages after which the client disconnects; None for never.
        raises_after_disconnect: Whether sending raises after the disconnect, as on some servers, or does nothing.
    """

    def __init__(
        self,
        method: str = "POST",
        path: str = "/v1/responses",
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        root_path: str = "",
        query: bytes = b"",
        disconnects_after: int | None = None,
        raises_after_disconnect: bool = False,
    ) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        half = len(data) // 2
        self.requests: list[Message] = [
            {"type": "http.request", "body": data[:half], "more_body": True},
            {"type": "http.request", "body": data[half:], "more_body": False},
        ]
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": root_path,
            "query_string": query,
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.sent: list[Message] = []
        self.disconnected = anyio.Event()
        self.disconnects_after = disconnects_after
        self.raises_after_disconnect = raises_after_disconnect

    async def receive(self) -> Message:
        await anyio.lowlevel.checkpoint()
        if self.requests:
            return self.requests.pop(0)
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if self.disconnects_after is not None and len(self.sent) >= self.disconnects_after:
            self.disconnected.set()
            if self.raises_after_disconnect:
                raise ConnectionResetError
            await anyio.lowlevel.checkpoint()
            return
        self.sent.append(message)

    async def run(self, app: ASGIApp) -> Exchange:
        with anyio.fail_after(TIMEOUT):
            await app(self.scope, self.receive, self.send)
        return self

    @property
    def is_unanswered(self) -> bool:
        """Whether nothing was sent, or only the empty 499 that outer middleware needs after a disconnect."""
        return not self.sent or (self.status == 499 and not self.body)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def host_app(scope: Scope, receive: Receive, send: Send) -> None:
    """An existing app."""
    await PlainTextResponse(f"host at {scope['path']}")(scope, receive, send)


def mounted_app(kit: ResponsesKit) -> ASGIApp:
    return Starlette(routes=[Mount("/v1", app=ResponsesApp(kit)), Route("/", host_app)])


def app_with_routes(kit: ResponsesKit) -> ASGIApp:
    return Starlette(routes=[*responses_routes(kit, "/v1"), Route("/", host_app)])


def mounted_in_fastapi(kit: ResponsesKit) -> ASGIApp:
    app = FastAPI()
    app.mount("/v1", ResponsesApp(kit))
    return app


def bare_app_with_middleware(kit: ResponsesKit) -> ASGIApp:
    return ResponsesMiddleware(host_app, kit, prefix="/v1")


def starlette_with_middleware(kit: ResponsesKit) -> ASGIApp:
    app = Starlette(routes=[Route("/", host_app)])
    app.add_middleware(ResponsesMiddleware, kit=kit, prefix="v1/")
    return app


HOSTS = [mounted_app, app_with_routes, mounted_in_fastapi, bare_app_with_middleware, starlette_with_middleware]


@pytest.fixture(params=HOSTS, ids=lambda host: host.__name__)
def host(request: pytest.FixtureRequest) -> Callable[[ResponsesKit], ASGIApp]:
    wrap: Callable[[ResponsesKit], ASGIApp] = request.param
    return wrap


def new_kit(*script: Any, **settings: Any) -> ResponsesKit:
    return ResponsesKit(ScriptedBackend(list(script) or ["Hi."], models=["scripted", "org/big"]), **settings)


def only_record(store: MemoryStore) -> dict[str, Any]:
    (record,) = stored_records(store)
    response: dict[str, Any] = json.loads(record.response)
    assert record.final, f"the record of a {response['status']} response is not final"
    check_response(response)
    return response


# Replies.


async def test_response_is_created_and_stored(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    app = host(new_kit())
    reply = await Exchange(body={"input": "Hi"}).run(app)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.headers["content-length"] == str(len(reply.body))
    check_response(reply.json)
    stored = await Exchange("GET", f"/v1/responses/{reply.json['id']}").run(app)
    assert stored.json == reply.json


async def test_stream_sends_whole_events_and_ends(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    reply = await Exchange(body={"input": "Hi", "stream": True}).run(host(new_kit("one ", "two ", "three")))
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers
    *writes, last = reply.sent[1:]
    assert all(message["more_body"] and message["body"].endswith(b"\n\n") for message in writes)
    assert not last.get("more_body", False)
    *events, done = read_frames(reply.body)
    assert done == ("", "[DONE]")
    check_stream([json.loads(data) for _, data in events])


@pytest.mark.parametrize(
    ("exchange", "status"),
    [
        (lambda: Exchange(body=b"{"), 400),
        (lambda: Exchange(body={"input": "Hi"}, headers={"content-type": "text/plain"}), 415),
        (lambda: Exchange(body=b"x", headers={"content-encoding": "br"}), 415),
        (lambda: Exchange(body=b"x" * 3000), 413),
        (lambda: Exchange(body=gzip.compress(b" " * 100_000), headers={"content-encoding": "gzip"}), 413),
        (lambda: Exchange(body=b"x", headers={"content-length": "99999999"}), 413),
        (lambda: Exchange(body=b"{}", headers={"content-length": "\u00b2"}), 400),
        (lambda: Exchange("GET", "/v1/responses"), 426),
        (lambda: Exchange("PUT", "/v1/responses"), 405),
        (lambda: Exchange("GET", "/v1/responses/resp_1"), 404),
        (lambda: Exchange("GET", "/v1/nothing"), 404),
        (lambda: Exchange("GET", "/v1/"), 404),
    ],
)
async def test_every_error_is_error_object(
    host: Callable[[ResponsesKit], ASGIApp], exchange: Callable[[], Exchange], status: int
) -> None:
    reply = await exchange().run(host(new_kit(limits=Limits(max_body_bytes=2000))))
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    check_error(reply.json)
    assert ("allow" in reply.headers) is (status == 405)


async def test_compressed_body_is_decompressed(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    body = gzip.compress(json.dumps({"input": "Hi"}).encode())
    assert (await Exchange(body=body, headers={"content-encoding": "gzip"}).run(host(new_kit()))).status == 200


@pytest.mark.parametrize("path", ["/v1/models/org/big", "/v1/models/org/big/", "/v1/models/scripted"])
async def test_model_names_may_contain_slashes(host: Callable[[ResponsesKit], ASGIApp], path: str) -> None:
    assert (await Exchange("GET", path).run(host(new_kit()))).status == 200


async def test_query_reaches_api(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    app = host(new_kit())
    reply = await Exchange(body={"input": "Hi"}).run(app)
    page = await Exchange("GET", f"/v1/responses/{reply.json['id']}/input_items", query=b"limit=0").run(app)
    assert (page.status, page.json["error"]["param"]) == (400, "limit")


async def test_owner_hook_receives_starlette_request(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    def owner(request: HostRequest) -> str | None:
        assert isinstance(request, HostRequest)
        return request.headers.get("authorization")

    app = host(new_kit(owner=owner))
    assert (await Exchange(body={"input": "Hi"}).run(app)).status == 401
    reply = await Exchange(body={"input": "Hi"}, headers={"Authorization": "Bearer ann"}).run(app)
    assert reply.status == 200
    path = f"/v1/responses/{reply.json['id']}"
    assert (await Exchange("GET", path, headers={"Authorization": "Bearer bob"}).run(app)).status == 404
    assert (await Exchange("GET", path, headers={"Authorization": "Bearer ann"}).run(app)).status == 200


# The rest of the host.


@pytest.mark.parametrize("path", ["/", "/v1x", "/v1x/responses", "/v", "/v2/responses", "/other/v1/responses"])
async def test_other_paths_pass_through(path: str) -> None:
    seen: list[tuple[Scope, Receive, Send]] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    exchange = Exchange("GET", path)
    before = dict(exchange.scope)
    receive, send = exchange.receive, exchange.send
    await ResponsesMiddleware(inner, new_kit(), prefix="/v1")(exchange.scope, receive, send)
    ((scope, got_receive, got_send),) = seen
    assert scope is exchange.scope
    assert scope == before
    assert (got_receive, got_send) == (receive, send)


@pytest.mark.parametrize("kind", ["lifespan", "websocket", "something.new"])
async def test_other_scope_types_pass_through_middleware(kind: str) -> None:
    seen: list[Scope] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    exchange = Exchange()
    scope = {"type": kind, "path": "/v1x/responses"}
    await ResponsesMiddleware(inner, new_kit())(scope, exchange.receive, exchange.send)
    assert seen == [scope]


@pytest.mark.parametrize("prefix", ["", "/", "/v1", "v1", "/v1/", "/api/v1"])
async def test_prefix_slashes_are_normalized(prefix: str) -> None:
    kit = new_kit()
    base = "/" + prefix.strip("/") if prefix.strip("/") else ""
    app = ResponsesMiddleware(host_app, kit, prefix=prefix)
    assert (await Exchange(path=f"{base}/responses", body={"input": "Hi"}).run(app)).status == 200
    if base:
        assert (await Exchange("GET", "/responses").run(app)).body == b"host at /responses"
        routes = Starlette(routes=responses_routes(kit, prefix))
        assert (await Exchange(path=f"{base}/responses", body={"input": "Hi"}).run(routes)).status == 200


@pytest.mark.parametrize("path", ["/proxy/v1/responses", "/v1/responses"])
async def test_root_path_is_stripped(path: str) -> None:
    reply = await Exchange(path=path, root_path="/proxy", body={"input": "Hi"}).run(bare_app_with_middleware(new_kit()))
    assert reply.status == 200


async def test_partial_root_path_is_kept() -> None:
    passed = await Exchange("GET", "/proxy/v1x", root_path="/proxy").run(bare_app_with_middleware(new_kit()))
    assert passed.body.startswith(b"host")
    passed = await Exchange("GET", "/proxyv1/models", root_path="/proxy").run(bare_app_with_middleware(new_kit()))
    assert passed.body.startswith(b"host")
    passed = await Exchange("GET", "/proxy/v1/models", root_path="/prox").run(bare_app_with_middleware(new_kit()))
    assert passed.body.startswith(b"host")


async def test_app_can_be_served_alone() -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    app = ResponsesApp(new_kit())
    with anyio.fail_after(TIMEOUT):
        await app({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert (await Exchange(path="/responses", body={"input": "Hi"}).run(app)).status == 200


# WebSockets.


class WebSocketExchange(Exchange):
    """A WebSocket as a server would open it; the client disconnects after one final frame per request.

    Args:
        frames: The frames that the client sends.
        denial: Whether the server supports denial responses.
    """

    def __init__(
        self,
        path: str = "/v1/responses",
        frames: Sequence[Any] = ({"type": "response.create", "input": "Hi"},),
        *,
        headers: dict[str, str] | None = None,
        root_path: str = "",
        denial: bool = True,
        **more: Any,
    ) -> None:
        super().__init__("GET", path, headers=headers, root_path=root_path, **more)
        del self.scope["method"]
        self.scope |= {"type": "websocket", "scheme": "ws", "subprotocols": []}
        self.scope["extensions"] = {"websocket.http.response": {}} if denial else {}
        self.requests = [{"type": "websocket.connect"}]
        for frame in frames:
            if isinstance(frame, bytes):
                self.requests.append({"type": "websocket.receive", "bytes": frame})
            else:
                self.requests.append({"type": "websocket.receive", "text": json.dumps(frame), "bytes": None})
        self.expected_count = len(frames)

    async def receive(self) -> Message:
        message = await super().receive()
        return {"type": "websocket.disconnect", "code": 1001} if message["type"] == "http.disconnect" else message

    async def send(self, message: Message) -> None:
        await super().send(message)
        if self.expected_count and sum(map(self.is_last, self.events)) == self.expected_count:
            self.disconnected.set()

    @staticmethod
    def is_last(event: dict[str, Any]) -> bool:
        return event["type"] in ("error", "response.completed", "response.failed")

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.sent]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(message["text"]) for message in self.sent if message["type"] == "websocket.send"]

    def error(self, status: int) -> dict[str, Any]:
        """Check that the upgrade was refused with this status, and return the error object."""
        assert self.kinds == ["websocket.http.response.start", "websocket.http.response.body"]
        assert self.status == status
        assert (self.headers["content-type"], int(self.headers["content-length"])) == (
            "application/json",
            len(self.body),
        )
        check_error(self.json)
        error: dict[str, Any] = self.json["error"]
        return error


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/"])
async def test_websocket_creates_responses(host: Callable[[ResponsesKit], ASGIApp], path: str) -> None:
    store = MemoryStore()
    reply = await WebSocketExchange(path).run(host(new_kit("one ", "two", store=store)))
    assert set(reply.kinds[1:]) == {"websocket.send"}
    assert reply.kinds[0] == "websocket.accept"
    assert check_stream(reply.events, error_events=False) == only_record(store)


async def test_every_frame_type_reaches_session(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    reply = await WebSocketExchange(frames=[b"", b"binary", {"type": "unknown"}]).run(host(new_kit()))
    assert reply.kinds == ["websocket.accept", *3 * ["websocket.send"]]
    assert [event["status"] for event in reply.events] == [400, 400, 400]


@pytest.mark.parametrize("path", ["/proxy/v1/responses", "/v1/responses"])
async def test_root_path_is_stripped_from_websocket_path(path: str) -> None:
    reply = await WebSocketExchange(path, root_path="/proxy").run(bare_app_with_middleware(new_kit()))
    assert reply.kinds[0] == "websocket.accept"


async def test_websocket_closes_with_session_code(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    reply = await WebSocketExchange(frames=[]).run(host(new_kit(timeouts=Timeouts(websocket=0.01))))
    assert reply.kinds == ["websocket.accept", "websocket.send", "websocket.close"]
    assert reply.events[0]["error"]["code"] == "websocket_connection_limit_reached"
    assert reply.sent[-1]["code"] == 1000


async def test_owner_hook_runs_before_upgrade(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    def owner(connection: HTTPConnection) -> str | None:
        assert isinstance(connection, HTTPConnection)
        match connection.headers.get("authorization"):
            case "Bearer stranger":
                raise HTTPException(403, "Not you.")
            case "Bearer broken":
                raise LookupError("hunter2")
            case key:
                return key

    app = host(new_kit(owner=owner))
    assert (await WebSocketExchange().run(app)).error(401)
    assert (await WebSocketExchange(headers={"Authorization": "Bearer stranger"}).run(app)).error(403)[
        "message"
    ] == "Not you."
    broken = (await WebSocketExchange(headers={"Authorization": "Bearer broken"}).run(app)).error(500)
    assert "hunter2" not in broken["message"]
    assert (await WebSocketExchange(headers={"Authorization": "Bearer ann"}).run(app)).events


async def test_owner_hook_can_read_session() -> None:
    async def with_session(scope: Scope, receive: Receive, send: Send) -> None:
        scope["session"], scope["user"] = {"name": "ann"}, "Ann"
        await app(scope, receive, send)

    app = bare_app_with_middleware(
        new_kit(owner=lambda connection: connection.session["name"] if connection.user else None)
    )
    assert (await WebSocketExchange().run(with_session)).events


async def test_foreign_origin_is_refused(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    app = host(new_kit(allowed_origins=["https://friend.example"]))
    reply = await WebSocketExchange(headers={"Host": "api.example", "Origin": "https://evil.example"}).run(app)
    assert reply.error(403)["code"] == "origin_not_allowed"
    for origin in ("https://api.example", "https://friend.example"):
        assert (await WebSocketExchange(headers={"Host": "api.example", "Origin": origin}).run(app)).events


async def test_websockets_beyond_limit_are_refused(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    app = host(new_kit(limits=Limits(max_websockets=0)))
    assert (await WebSocketExchange().run(app)).error(503)["code"] == "sockets_unavailable"


@pytest.mark.parametrize("headers", [{}, {"Host": "api.example", "Origin": "https://evil.example"}])
async def test_server_without_denial_response_closes_before_upgrade(
    host: Callable[[ResponsesKit], ASGIApp], headers: dict[str, str]
) -> None:
    reply = await WebSocketExchange(headers=headers, denial=False).run(host(new_kit(owner=lambda connection: None)))
    assert reply.kinds == ["websocket.close"]


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/models", "/v1/", "/v1/responsesx"])
async def test_app_has_websockets_at_one_path_only(path: str) -> None:
    assert (await WebSocketExchange(path).run(mounted_app(new_kit()))).error(404)
    passed = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope)

    upgrade = WebSocketExchange(path)
    await upgrade.run(ResponsesMiddleware(inner, new_kit()))
    assert passed == [upgrade.scope]


async def test_disconnect_before_upgrade_sends_nothing(
    host: Callable[[ResponsesKit], ASGIApp],
) -> None:
    upgrade = WebSocketExchange()
    upgrade.requests = [{"type": "websocket.disconnect", "code": 1006}]
    assert not (await upgrade.run(host(new_kit()))).sent


@pytest.mark.parametrize("raises_after_disconnect", [True, False])
@pytest.mark.parametrize("disconnects_after", range(5))
async def test_websocket_disconnect_at_any_time_is_handled(
    host: Callable[[ResponsesKit], ASGIApp], disconnects_after: int, raises_after_disconnect: bool
) -> None:
    store = MemoryStore()
    upgrade = WebSocketExchange(disconnects_after=disconnects_after, raises_after_disconnect=raises_after_disconnect)
    await upgrade.run(host(new_kit("one ", "two ", Pause(60), store=store)))
    assert len(upgrade.sent) == disconnects_after
    if disconnects_after > 1:
        assert only_record(store)["status"] == "cancelled"


# Disconnects.


async def test_disconnect_during_upload_sends_nothing(
    host: Callable[[ResponsesKit], ASGIApp],
) -> None:
    exchange = Exchange(body={"input": "Hi"})
    exchange.requests = [exchange.requests[0], {"type": "http.disconnect"}]
    await exchange.run(host(new_kit()))
    assert exchange.is_unanswered


async def test_disconnect_before_answer_cancels_response(
    host: Callable[[ResponsesKit], ASGIApp],
) -> None:
    store = MemoryStore()
    exchange = Exchange(body={"input": "Hi"})
    app = host(new_kit("half ", Pause(60), store=store))
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.run, app)
        while not len(store):
            await anyio.lowlevel.checkpoint()
        exchange.disconnected.set()
    assert only_record(store)["status"] == "cancelled"
    assert exchange.is_unanswered


@pytest.mark.parametrize("raises_after_disconnect", [True, False])
@pytest.mark.parametrize("disconnects_after", range(4))
async def test_stream_disconnect_at_any_time_is_handled(
    host: Callable[[ResponsesKit], ASGIApp], disconnects_after: int, raises_after_disconnect: bool
) -> None:
    store = MemoryStore()
    exchange = Exchange(
        body={"input": "Hi", "stream": True},
        disconnects_after=disconnects_after,
        raises_after_disconnect=raises_after_disconnect,
    )
    app = host(new_kit("one ", "two ", Pause(60), store=store))
    await exchange.run(app)
    assert len(exchange.sent) == disconnects_after
    assert only_record(store)["status"] == "cancelled"


async def test_disconnect_from_idle_stream_cancels_response(host: Callable[[ResponsesKit], ASGIApp]) -> None:
    store = MemoryStore()
    exchange = Exchange(body={"input": "Hi", "stream": True})
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.run, host(new_kit("one ", Pause(60), store=store)))
        while len(exchange.sent) < 3:
            await anyio.lowlevel.checkpoint()
        exchange.disconnected.set()
    assert only_record(store)["status"] == "cancelled"


async def test_disconnect_after_end_keeps_response(
    host: Callable[[ResponsesKit], ASGIApp],
) -> None:
    store = MemoryStore()
    exchange = Exchange(body={"input": "Hi", "stream": True}, disconnects_after=5)
    await exchange.run(host(new_kit("one", store=store)))
    assert only_record(store)["status"] == "completed"
