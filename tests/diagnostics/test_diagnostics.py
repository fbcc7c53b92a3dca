"""The check of a running server: correct servers pass, and each fault is found and named."""

from __future__ import annotations

import gzip
import json
import re
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from responses_kit import ResponsesKit, Turn, outputs
from responses_kit.cli import api_key_owner
from responses_kit.diagnostics import Finding, check, server
from responses_kit.errors import ConfigurationError, ModelError
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import Pause, ScriptedBackend
from responses_kit_starlette import ResponsesMiddleware

from ..support.memory import stored_records
from ..support.servers import free_port
from ..test_public_surface import run

KEY = "sk-wonderland-42"

PAGE = b"<!doctype html><h1>Oops</h1>"

STEPS = [
    "models",
    "key",
    "answer",
    "stream",
    "pace",
    "stored",
    "continued",
    "input items",
    "stream again",
    "deleted",
    "invalid request",
    "malformed body",
    "unknown path",
    "websocket",
]


# Correct servers.


@contextmanager
def served(app: ASGIApp, **settings: Any) -> Iterator[str]:
    """Run an app under uvicorn in a thread and yield the URL of its API."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = {"log_level": "critical", "ws": "websockets-sansio", "timeout_graceful_shutdown": 1, **settings}
        running = uvicorn.Server(uvicorn.Config(app, **settings))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()  # connections wait in the listener's queue until the server accepts them
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            running.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


async def website(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every path with an HTML page, as a single-page app does."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": PAGE})


def answers(turn: Turn) -> Iterable[Any]:
    yield from ("Hello", " there.")
    yield outputs.Usage(input_tokens=2, output_tokens=2)


def answer_slowly(turn: Turn) -> Iterable[Any]:
    """Delay the answer if the input asks for a story."""
    for word in ("Once ", "there ", "was ", "a ", "kit."):
        yield word
        if "story" in turn.text:
            yield Pause(0.3)


def fail_midway(turn: Turn) -> Iterable[Any]:
    yield "Hel"
    yield ModelError("The model is out of order.")


def stall_midway(turn: Turn) -> Iterable[Any]:
    yield "Hel"
    yield Pause(30)


def api(script: Callable[[Turn], Iterable[Any]] = answers, **settings: Any) -> ASGIApp:
    return ResponsesMiddleware(website, ResponsesKit(ScriptedBackend(script), **settings))


# Proxies before the server.


@dataclass
class Reply:
    """A reply that the proxy may change.

    Attributes:
        endpoint: Method and path of the request.
        sent: The body of the request.
        left_open: Whether the proxy leaves the reply unfinished.
    """

    endpoint: str
    sent: bytes
    status: int
    headers: dict[str, str]
    body: bytes
    left_open: bool = False

    @property
    def is_stream(self) -> bool:
        return "text/event-stream" in self.headers.get("content-type", "")

    def set_content(self, status: int, body: object) -> None:
        """Set the body: bytes as an HTML page, all other values as JSON."""
        self.status = status
        self.headers = {"content-type": "text/html" if isinstance(body, bytes) else "application/json"}
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


Change = Callable[[Reply], None]

Wrapper = Callable[[ASGIApp], ASGIApp]


class ChangingProxy:
    """A proxy that buffers each reply, changes it, and sends it at once."""

    def __init__(self, app: ASGIApp, change: Change) -> None:
        self.app, self.change = app, change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start: Message = {}
        sent, body = bytearray(), bytearray()

        async def note() -> Message:
            message = await receive()
            sent.extend(message.get("body", b""))
            return message

        async def collect(message: Message) -> None:
            start.update(message) if "status" in message else body.extend(message["body"])

        await self.app(scope, note, collect)
        path = re.sub("resp_[0-9a-f]+", "{id}", scope["path"].removeprefix("/v1"))
        endpoint = f"{scope['method']} {path}?{scope['query_string'].decode()}".rstrip("?")
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        reply = Reply(endpoint, bytes(sent), start["status"], headers, bytes(body))
        self.change(reply)
        reply.headers.pop("content-length", None)
        head = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": head})
        await send({"type": "http.response.body", "body": reply.body, "more_body": reply.left_open})
        while reply.left_open and (await receive())["type"] != "http.disconnect":
            pass


def proxy_for(endpoint: str, change: Change) -> Wrapper:
    """Return a proxy that changes the replies of one endpoint."""
    return lambda app: ChangingProxy(app, lambda reply: change(reply) if reply.endpoint == endpoint else None)


def replace_reply(endpoint: str, status: int, body: object, *, sent: bytes = b"") -> Wrapper:
    """Return a proxy that replaces the replies of one endpoint, or to requests with a given text."""
    return proxy_for(endpoint, lambda reply: reply.set_content(status, body) if sent in reply.sent else None)


def replace_members(endpoint: str, **members: Any) -> Wrapper:
    """Return a proxy that changes members of the JSON replies of one endpoint."""

    def change(reply: Reply) -> None:
        if reply.status == 200 and not reply.is_stream:
            reply.set_content(200, json.loads(reply.body) | members)

    return proxy_for(endpoint, change)


def change_streams(change: Change) -> Wrapper:
    return proxy_for(RESPONSES, lambda reply: change(reply) if reply.is_stream else None)


def replace_events(rewrite: Callable[[list[bytes]], Iterable[bytes]], endpoint: str = "POST /responses") -> Wrapper:
    """Return a proxy that replaces the events of a stream."""

    def change(reply: Reply) -> None:
        if reply.is_stream:
            reply.body = b"".join(rewrite([event + b"\n\n" for event in reply.body.split(b"\n\n")[:-1]]))

    return proxy_for(endpoint, change)


def packed(reply: Reply) -> None:
    reply.body, reply.headers["content-encoding"] = gzip.compress(reply.body), "gzip"


def left_open(reply: Reply) -> None:
    reply.left_open = True


def batching_proxy(app: ASGIApp) -> ASGIApp:
    """Return a proxy that sends events in batches of eight."""

    async def gathered(scope: Scope, receive: Receive, send: Send) -> None:
        held = bytearray()

        async def gather(message: Message) -> None:
            if message["type"] == "http.response.body":
                held.extend(message["body"])
                if message.get("more_body") and held.count(b"\n\n") < 8:
                    return
                message = {**message, "body": bytes(held)}
                held.clear()
            await send(message)

        await app(scope, receive, gather if scope["type"] == "http" else send)

    return gathered


def compressing_proxy(app: ASGIApp) -> ASGIApp:
    """Return a proxy that compresses the stream and flushes each event."""

    async def packed(scope: Scope, receive: Receive, send: Send) -> None:
        packer = zlib.compressobj(wbits=31)

        async def pack(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].lower() != b"content-length"]
                await send({**message, "headers": [*kept, (b"content-encoding", b"gzip")]})
            else:
                mode = zlib.Z_SYNC_FLUSH if message.get("more_body") else zlib.Z_FINISH
                await send({**message, "body": packer.compress(message["body"]) + packer.flush(mode)})

        await app(scope, receive, pack if scope["type"] == "http" else send)

    return packed


def replace_websocket(*frames: object, status: int = 101) -> Wrapper:
    """Return an app whose WebSocket sends the messages and closes, or rejects the connection."""

    def wrap(app: ASGIApp) -> ASGIApp:
        async def instead(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "websocket":
                await app(scope, receive, send)
                return
            await receive()
            if status != 101:
                head = [(b"content-type", b"text/html"), (b"content-length", b"%d" % len(PAGE))]
                await send({"type": "websocket.http.response.start", "status": status, "headers": head})
                await send({"type": "websocket.http.response.body", "body": PAGE})
                return
            await send({"type": "websocket.accept"})
            for frame in frames:
                await send({"type": "websocket.send", "text": json.dumps(frame)})
            await send({"type": "websocket.close"})

        return instead

    return wrap


def error(message: str) -> dict[str, Any]:
    return {"error": {"type": "not_found", "code": None, "message": message, "param": None}}


# The check.


def findings(url: str, *, backend: str = "asyncio", **options: Any) -> dict[str, Finding]:
    """Return all findings by name, after checks that apply to every finding."""

    async def collected() -> list[Finding]:
        with anyio.fail_after(50):
            async with aclosing(check(url, **options)) as found:
                return [finding async for finding in found]

    made = anyio.run(collected, backend=backend)
    assert [finding.name for finding in made] in (STEPS, ["models"])
    for finding in made:
        assert finding.detail.isprintable()
        assert finding.detail.endswith((".", "?")), finding.detail
        assert KEY not in finding.detail
    return {finding.name: finding for finding in made}


def failed(found: Mapping[str, Finding]) -> dict[str, str]:
    return {name: finding.detail for name, finding in found.items() if finding.ok is False}


def skipped(found: Mapping[str, Finding]) -> dict[str, str]:
    return {name: finding.detail for name, finding in found.items() if finding.ok is None}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_correct_server_passes_and_stores_nothing(backend: str) -> None:
    store = MemoryStore()
    with served(api(answer_slowly, store=store, owner=api_key_owner([KEY]))) as url:
        found = findings(url, backend=backend, key=KEY)
    assert {name: finding.detail for name, finding in found.items() if not finding.ok} == {}
    assert list(found) == STEPS
    assert stored_records(store) == []


def test_findings_are_reported_immediately() -> None:
    seen: list[str] = []

    async def first() -> Finding:
        async with aclosing(check(url)) as found:
            return await anext(found)

    with served(ChangingProxy(api(), lambda reply: seen.append(reply.endpoint))) as url:
        assert anyio.run(first).ok
    assert seen == ["GET /models"]


def test_named_model_is_used() -> None:
    backend = ScriptedBackend(answers, models=["small", "large"])
    with served(ResponsesMiddleware(website, ResponsesKit(backend))) as url:
        assert "small, large" in failed(findings(url, model="huge"))["models"]
        assert failed(findings(url, model="large")) == {}
    assert {turn.model for turn in backend.turns} == {"large"}


def test_truncated_answer_is_accepted() -> None:
    with served(api(lambda turn: ["Hel", outputs.Finish("max_output_tokens")])) as url:
        assert failed(findings(url)) == {}


def test_resumable_streams_are_resumed() -> None:
    with served(api(resumable=True)) as url:
        assert "Replayed" in findings(url)["stream again"].detail


def test_streams_without_resume_pass() -> None:
    with served(replace_reply(AGAIN, 400, error("Not stored."))(api())) as url:
        assert (again := findings(url)["stream again"]).ok
    assert "Refused" in again.detail


# Servers that cannot be checked.


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closed_port_is_reported(backend: str) -> None:
    found = findings(f"http://127.0.0.1:{free_port()}/v1", backend=backend)
    assert "that the server is running" in failed(found)["models"]
    assert list(found) == ["models"]


@pytest.mark.parametrize("path", ["", "/", "/v1/responses", "/v1/models", "/shop"])
def test_wrong_url_suggests_api_url(path: str) -> None:
    with served(api()) as url:
        found = findings(url.removesuffix("/v1") + path)
    assert f"The API is at {url}: use that" in failed(found)["models"]


def test_site_without_api_is_reported() -> None:
    with served(website) as url:
        detail = failed(findings(url))["models"]
    assert "200 and text/html" in detail
    assert "use the URL at which it is mounted" in detail


def test_server_without_models_stops_check() -> None:
    with served(replace_members(MODELS, data=[])(api())) as url:
        found = findings(url)
    assert "must name at least one" in failed(found)["models"]
    assert list(found) == ["models"]


@pytest.mark.parametrize("key", [None, "sk-looking-glass"])
def test_refused_key_is_explained_and_stops_check(key: str | None) -> None:
    with served(api(owner=api_key_owner([KEY]))) as url:
        found = findings(url, key=key)
    assert "that the owner hook (in Django the setting AUTH) accepts" in failed(found)["models"]
    assert list(found) == ["models"]


@pytest.mark.parametrize("status", [401, 403])
def test_refusing_page_is_distinguished_from_api(status: int) -> None:
    with served(replace_reply(MODELS, status, PAGE)(api())) as url:
        assert "Something in front of the API refuses" in failed(findings(url, key=KEY))["models"]


def test_key_may_be_sent_in_other_header() -> None:
    with served(api(owner=api_key_owner([KEY]))) as url:
        found = findings(url, headers={"authorization": f"Bearer {KEY}"})
    assert failed(found) == {}
    assert set(skipped(found)) == {"key", "pace"}


@pytest.mark.parametrize(
    "options", [{"key": KEY}, {"headers": {"X-Api-Key": KEY}}, {"headers": {"Cookie": f"a=b; session={KEY}; c=d"}}]
)
def test_echoed_key_is_not_shown(options: dict[str, Any]) -> None:
    body = error(f"No such key: {KEY} \x1b[31m{'filler ' * 20}{KEY}")
    with served(replace_reply(MODELS, 401, body)(api())) as url:
        assert "No such key: …" in failed(findings(url, **options))["models"]


@pytest.mark.parametrize("endpoint", ["GET /models", "POST /responses", "GET /responses/{id}"])
def test_redirect_is_reported_and_not_followed(endpoint: str) -> None:
    def redirect(reply: Reply) -> None:
        reply.set_content(308, {})
        reply.headers["location"] = f"https://alice:{KEY}@api.example.com:99/login?key={KEY}"

    with served(proxy_for(endpoint, redirect)(api())) as url:
        details = failed(findings(url))
    assert details
    for detail in details.values():
        assert f"{endpoint} is redirected (308) to https://api.example.com:99/login. Clients do not follow" in detail


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:80/v1",
        "ftp://host/v1",
        "http:///v1",
        "http://h:x/v1",
        "http://h:80000/v1",
        "http://h/?a=b",
        f"http://alice:{KEY}@h/v1",
    ],
)
def test_invalid_base_url_is_refused_without_echo(url: str) -> None:
    with pytest.raises(ConfigurationError, match="such as http") as refused:
        findings(url)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"key": "new\nline"}, {"key": "ключ"}, {"headers": {"X": "a\rline"}}, {"headers": {"a b": "line"}}]
)
def test_invalid_header_is_refused_without_echo(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        findings("http://127.0.0.1:1/v1", **options)
    assert "line" not in str(refused.value)
    assert "ключ" not in str(refused.value)


# Faults for each finding.

MODELS, RESPONSES, ONE, DELETE = "GET /models", "POST /responses", "GET /responses/{id}", "DELETE /responses/{id}"
ITEMS, AGAIN = "GET /responses/{id}/input_items", "GET /responses/{id}?stream=true"


@dataclass(frozen=True)
class Fault:
    """A fault of a server.

    Attributes:
        fails: The findings that fail; no other finding does.
        message_part: Text that the first of these findings contains.
        wrap: The proxy in front of the API.
        script: The script of the backend.
        options: The options of the check.
    """

    fails: Sequence[str]
    message_part: str
    wrap: Wrapper = lambda app: app
    script: Callable[[Turn], Iterable[Any]] = answers
    options: Mapping[str, Any] = field(default_factory=dict)


FAULTS = {
    "no list of models": Fault(["models"], "not a list of models", replace_reply(MODELS, 500, PAGE)),
    "any key accepted": Fault(["key"], "no owner hook", options={"key": KEY}),
    "HTML pages instead of responses": Fault(
        ["answer", "stream", "invalid request", "malformed body"],
        "page of the host",
        replace_reply(RESPONSES, 502, PAGE),
    ),
    "failing backend": Fault(["answer", "stream", "websocket"], "The model is out of order", script=fail_midway),
    "empty output": Fault(["answer", "stream", "continued", "websocket"], "has no text", script=lambda turn: []),
    "stalled backend": Fault(
        ["answer", "stream", "websocket"], "raise the timeout", script=stall_midway, options={"timeout": 2.0}
    ),
    "unfinished responses": Fault(["answer", "continued"], "is queued", replace_members(RESPONSES, status="queued")),
    "invalid responses": Fault(["answer"], "JSON that is not a response", replace_members(RESPONSES, id=None)),
    "response instead of stream": Fault(
        ["stream"], "not with text/event-stream", change_streams(lambda reply: reply.set_content(200, {}))
    ),
    "error instead of stream": Fault(
        ["stream"], "Busy. Try again under", change_streams(lambda reply: reply.set_content(429, error("Busy.")))
    ),
    "stream without events": Fault(["stream"], "No event arrived", replace_events(lambda events: [b": hm\n\n"])),
    "stream without [DONE]": Fault(["stream"], "[DONE] is missing", replace_events(lambda events: events[:-1])),
    "missing event": Fault(["stream"], "Event 3", replace_events(lambda events: events[:3] + events[4:])),
    "missing first event": Fault(
        ["stream"], "has the name response.in_progress", replace_events(lambda events: events[1:])
    ),
    "truncated stream": Fault(["stream"], "No terminal event", replace_events(lambda events: events[:4])),
    "[DONE] too early": Fault(
        ["stream"], "has the name [DONE]", replace_events(lambda events: [*events[:4], events[-1]])
    ),
    "two terminal events": Fault(
        ["stream"], "has the name response.completed", replace_events(lambda events: [*events[:-1], *events[-2:]])
    ),
    "events after [DONE]": Fault(
        ["stream"], "has the name [DONE]", replace_events(lambda events: [*events, events[-1]])
    ),
    "events with invalid JSON": Fault(
        ["stream"],
        "the type None",
        replace_events(lambda events: [event.replace(b'"completed"', b"NO") for event in events]),
    ),
    "events with wrong names": Fault(
        ["stream"],
        "the name Response.created, the type response.created",
        replace_events(lambda events: [event.replace(b"event: r", b"event: R") for event in events]),
    ),
    "stream left open": Fault(
        ["stream"], "does not end after [DONE]", change_streams(left_open), options={"timeout": 2.0}
    ),
    "proxy that buffers streams": Fault(["pace"], "are buffered", change_streams(lambda reply: None), answer_slowly),
    "proxy that batches events": Fault(["pace"], "are buffered", batching_proxy, answer_slowly),
    "proxy that compresses streams": Fault(["pace"], "It is compressed (gzip)", change_streams(packed), answer_slowly),
    "stored response with other output": Fault(["stored"], "a different output", replace_members(ONE, output=[])),
    "response missing from store": Fault(["stored"], "one shared store", replace_reply(ONE, 404, error("Gone."))),
    "response not continued": Fault(
        ["continued"], "page of the host", replace_reply(RESPONSES, 502, PAGE, sent=b'"previous_response_id"')
    ),
    "missing input items": Fault(["input items"], "does not list", replace_members(ITEMS, data=[])),
    "HTML page for input items": Fault(["input items"], "page of the host", replace_reply(ITEMS, 404, PAGE)),
    "response instead of resumed stream": Fault(["stream again"], "instead of 400", replace_reply(AGAIN, 200, {})),
    "resumed stream truncated": Fault(
        ["stream again"], "[DONE] is missing", replace_events(lambda events: events[:-1], AGAIN)
    ),
    "deleted response still served": Fault(
        ["deleted"],
        "200 and application/json instead of 404",
        proxy_for(ONE, lambda reply: reply.set_content(200, {}) if reply.status == 404 else None),
    ),
    "HTML page for deletion": Fault(["deleted"], "405 and text/html", replace_reply(DELETE, 405, PAGE)),
    "validation error of the host": Fault(
        ["invalid request"],
        "422 and application/json",
        replace_reply(RESPONSES, 422, {"detail": []}, sent=b'"input":5'),
    ),
    "HTML page for malformed body": Fault(
        ["malformed body"], "400 and text/html", replace_reply(RESPONSES, 400, PAGE, sent=b'{"input": ')
    ),
    "HTML page for unknown path": Fault(
        ["unknown path"], "404 and text/html", replace_reply("GET /no/such/path", 404, PAGE)
    ),
    "HTML page with status 200 for unknown path": Fault(
        ["unknown path"], "instead of 404", replace_reply("GET /no/such/path", 200, PAGE)
    ),
    "HTML page for WebSocket": Fault(["websocket"], "page of the host", replace_websocket(status=405)),
    "WebSocket rejected": Fault(["websocket"], "403 and text/html", replace_websocket(status=403)),
    "WebSocket closed early": Fault(
        ["websocket"], "No terminal event", replace_websocket({"type": "response.created", "sequence_number": 0})
    ),
    "WebSocket error event": Fault(["websocket"], "Not you", replace_websocket({"type": "error", **error("Not you.")})),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_fault_is_found_and_named(fault: Fault) -> None:
    with served(fault.wrap(api(fault.script))) as url:
        found = findings(url, **fault.options)
    assert list(failed(found)) == sorted(fault.fails, key=STEPS.index)
    assert fault.message_part in failed(found)[fault.fails[0]]


def test_every_finding_can_fail() -> None:
    assert {name for fault in FAULTS.values() for name in fault.fails} == set(STEPS)


def test_processes_without_shared_store_are_reported() -> None:
    processes = [api(), api()]

    async def balance(scope: Scope, receive: Receive, send: Send) -> None:
        processes.reverse()
        await processes[0](scope, receive, send)

    with served(balance, lifespan="off") as url:
        details = failed(findings(url))
    assert set(details) == {"stored", "input items", "deleted"}  # every second request
    assert all(
        "If several processes serve the API, give them one shared store" in detail for detail in details.values()
    )


def test_buffering_proxy_is_suspected() -> None:
    with served(change_streams(lambda reply: None)(api(stall_midway))) as url:
        assert "No event arrived; the stream may be buffered." in failed(findings(url, timeout=2.0))["stream"]


def test_compressed_prompt_stream_is_not_suspected() -> None:
    with served(compressing_proxy(api(answer_slowly))) as url:
        found = findings(url)
    assert failed(found) == {}
    assert "gzip" in found["pace"].detail
    assert found["pace"].ok


def test_short_stream_is_skipped() -> None:
    with served(compressing_proxy(api())) as url:
        found = findings(url)
    assert failed(found) == {}
    assert "too short to detect" in skipped(found)["pace"]
    assert "compressed (gzip)" in skipped(found)["pace"]


def test_missing_websockets_are_skipped() -> None:
    with served(api(), ws="none") as url:
        found = findings(url)
    assert failed(found) == {}
    assert "of WSGI servers only gunicorn" in skipped(found)["websocket"]


def test_websockets_are_skipped_without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(api()) as url:
        monkeypatch.setitem(sys.modules, "websockets.protocol", None)
        assert "not installed" in skipped(findings(url))["websocket"]


@pytest.mark.parametrize(("endpoint", "name"), [(MODELS, "models"), (RESPONSES, "stream")])
def test_oversize_answer_is_not_read(endpoint: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def enlarge(reply: Reply) -> None:
        if endpoint == MODELS or reply.is_stream:
            reply.body = b": padding\n\n" * 200_000

    monkeypatch.setattr(server, "MAX_RESPONSE_BYTES", 1_000_000)
    with served(proxy_for(endpoint, enlarge)(api())) as url:
        assert "more than 1000000 bytes" in failed(findings(url))[name]


def test_missing_httpx_names_extra() -> None:
    missing = run("import responses_kit.diagnostics", without=["httpx"])
    assert missing.stderr.splitlines()[-1].endswith('pip install "responses-kit[cli]"')
