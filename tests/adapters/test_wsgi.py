"""Tests of the code shared by WSGI hosts, with environments and on real servers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from responses_kit import Limits, ResponsesKit, Timeouts, errors
from responses_kit._concurrency import loop_thread
from responses_kit.adapters.wsgi import WSGIReply, handle_request
from responses_kit.http.open_responses import OpenResponses
from responses_kit.protocol.sse import decode_events
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_error, check_response, check_stream
from ..support.wsgi_server import GUNICORNS, SERVERS, Notes

pytestmark = pytest.mark.timeout(120)

BOUND = 15.0
ROOT = Path(__file__).resolve().parents[2]


# Environments.


@pytest.fixture
def kit() -> Iterator[ResponsesKit]:
    kit = ResponsesKit(
        ScriptedBackend(["Hi"]), owner=lambda environ: environ["test.user"], limits=Limits(max_body_bytes=1000)
    )
    yield kit
    loop_thread.stop_kit(kit)


def handle(kit: ResponsesKit, body: bytes = b'{"input": "Hi"}', path: str = "/responses", **environ: Any) -> WSGIReply:
    environment: dict[str, Any] = {
        "REQUEST_METHOD": "POST",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        "test.user": "ann",
        **environ,
    }
    environment = {name: value for name, value in environment.items() if value is not None}
    return handle_request(OpenResponses(kit), environment, path=path, host_request=environment)


def error(answer: WSGIReply) -> tuple[int, str | None]:
    body = json.loads(answer.body)
    check_error(body)
    return answer.status, body["error"]["code"]


@pytest.mark.skipif(not hasattr(socket, "SO_SNDTIMEO"), reason="the system has no send timeouts for sockets")
def test_unread_connection_does_not_block_thread() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]), timeouts=Timeouts(send=0.2))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert handle(kit, **{"gunicorn.socket": ours}).status == 200
        with pytest.raises(OSError, match=r"temporarily unavailable|timed out"):
            ours.sendall(b"x" * 100_000_000)
    loop_thread.stop_kit(kit)


def test_reply_is_whole_or_streamed(kit: ResponsesKit) -> None:
    answer = handle(kit)
    assert (answer.status, answer.headers["Content-Type"], answer.stream) == (200, "application/json", None)
    check_response(json.loads(answer.body))
    answer = handle(kit, b'{"input": "Hi", "stream": true}')
    assert (answer.status, answer.headers["Content-Type"], answer.body) == (
        200,
        "text/event-stream; charset=utf-8",
        b"",
    )
    assert answer.stream is not None
    streamed = b"".join(answer.stream).removesuffix(b"data: [DONE]\n\n")
    answer.stream.close()
    assert check_stream(decode_events(streamed))["status"] == "completed"


def test_method_path_and_query_are_read_from_the_environment(kit: ResponsesKit) -> None:
    response_id = json.loads(handle(kit).body)["id"]
    path = f"/responses/{response_id}"
    assert json.loads(handle(kit, b"", path, REQUEST_METHOD="get").body)["id"] == response_id
    answer = handle(kit, b"", f"{path}/input_items", REQUEST_METHOD="GET", QUERY_STRING="limit=0")
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "limit")
    assert handle(kit, b"", path, REQUEST_METHOD="DELETE").status == 200
    assert handle(kit, b"", path, REQUEST_METHOD="GET", QUERY_STRING=None).status == 404
    assert handle(kit, path="/nothing").status == 404
    assert handle(kit, b"", REQUEST_METHOD="PUT").headers["Allow"] == "POST, GET"


def test_headers_are_read_from_the_environment(kit: ResponsesKit) -> None:
    assert error(handle(kit, CONTENT_TYPE="text/plain"))[0] == 415
    assert error(handle(kit, HTTP_CONTENT_ENCODING="br"))[0] == 415
    first, second = (handle(kit, HTTP_IDEMPOTENCY_KEY="a key") for _ in range(2))
    assert json.loads(first.body)["id"] == json.loads(second.body)["id"]
    assert handle(kit, CONTENT_TYPE="").status == 200
    assert handle(kit, CONTENT_TYPE=None).status == 200


@pytest.mark.parametrize("length", [None, "", "many", "-1", "²", "0"])
def test_body_without_length_is_not_read_unless_terminated(kit: ResponsesKit, length: Any) -> None:
    class EndlessBody(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size == 0, "reading would block"
            return b""

    answer = handle(kit, CONTENT_LENGTH=length, **{"wsgi.input": EndlessBody()})
    assert error(answer)[0] == 400


def test_terminated_body_without_length_is_read(kit: ResponsesKit) -> None:
    pieces = [b'{"inp', b'ut": "Hi"', b"}", b""]

    class Chunks:
        def read(self, size: int) -> bytes:
            assert size > 0
            return pieces.pop(0)

    more = {"wsgi.input": Chunks(), "wsgi.input_terminated": True}
    assert handle(kit, CONTENT_LENGTH=None, **more).status == 200
    assert pieces == []


def test_body_is_read_up_to_content_length(kit: ResponsesKit) -> None:
    body = io.BytesIO(b'{"input": "Hi"}' + b"GET / HTTP/1.1")
    assert handle(kit, CONTENT_LENGTH="15", **{"wsgi.input": body}).status == 200
    assert body.read() == b"GET / HTTP/1.1"


def test_oversize_body_is_refused(kit: ResponsesKit) -> None:
    unread = io.BytesIO(b"x" * 1001)
    assert error(handle(kit, CONTENT_LENGTH="1001", **{"wsgi.input": unread}))[0] == 413
    assert unread.tell() == 0
    more = {"wsgi.input": io.BytesIO(b"x" * 10_000_000), "wsgi.input_terminated": True}
    assert error(handle(kit, CONTENT_LENGTH=None, **more))[0] == 413
    assert error(handle(kit, CONTENT_LENGTH="9" * 5000))[0] == 413


@pytest.mark.parametrize("fails", [False, True])
def test_truncated_body_creates_no_response(fails: bool) -> None:
    class TruncatedBody(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            if fails and not data:
                raise ConnectionResetError
            return data

    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store)
    try:
        answer = handle(kit, CONTENT_LENGTH="100", **{"wsgi.input": TruncatedBody(b'{"input": "Hi"}')})
    finally:
        loop_thread.stop_kit(kit)
    if fails:
        assert (answer.status, answer.body, answer.stream) == (499, b"", None)
    else:
        assert error(answer) == (400, "invalid_body")
    assert len(store) == 0


def test_body_is_read_in_host_thread_after_authentication(kit: ResponsesKit) -> None:
    threads: list[int] = []

    class RecordingBody(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            threads.append(threading.get_ident())
            return super().read(size)

    assert error(handle(kit, **{"wsgi.input": RecordingBody(b'{"input": "Hi"}'), "test.user": ""}))[0] == 401
    assert threads == []
    assert handle(kit, **{"wsgi.input": RecordingBody(b'{"input": "Hi"}')}).status == 200
    assert set(threads) == {threading.get_ident()}


def test_framework_may_read_body(kit: ResponsesKit) -> None:
    sizes: list[int] = []
    body = io.BytesIO(b'{"input": "Hi"}')

    def read(size: int) -> bytes:
        sizes.append(size)
        return body.read(size)

    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "15", "test.user": "ann"}
    assert handle_request(OpenResponses(kit), environ, path="/responses", host_request=environ, read=read).status == 200
    assert min(sizes) > 0


def test_missing_store_setup_is_raised() -> None:
    class UnreadyStore(MemoryStore):
        ready = False

        async def get(self, owner: str, response_id: str) -> Any:
            if not self.ready:
                raise errors.ConfigurationError("run the setup first")
            return await super().get(owner, response_id)

    store = UnreadyStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, secrets=["a-secret-of-sufficient-length"])
    for _ in range(2):
        with pytest.raises(errors.ConfigurationError, match="setup"):
            handle(kit)
    store.ready = True
    try:
        assert handle(kit).status == 200
    finally:
        loop_thread.stop_kit(kit)


# Disconnects.


@pytest.fixture
def silent_kit() -> Iterator[tuple[ResponsesKit, threading.Event]]:
    """Yield a kit that never answers, and an event that is set when its backend is called."""
    started = threading.Event()

    class SilentBackend(ScriptedBackend):
        async def generate(self, turn: Any) -> Any:
            started.set()
            await blocking_sleep()
            yield "Hi"

    kit = ResponsesKit(SilentBackend(), owner=lambda environ: "ann")
    loop_thread.start_kit(kit, grace=0.0)
    yield kit, started
    loop_thread.stop_kit(kit)


async def blocking_sleep() -> None:
    import asyncio

    await asyncio.sleep(3600)


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


@pytest.mark.parametrize("how", ["closes", "resets", "half-closes"])
@pytest.mark.parametrize("timeout", [None, 20.0, 0.0], ids=["blocking", "with a timeout", "not blocking"])
@pytest.mark.parametrize("name", ["gunicorn.socket", "werkzeug.socket"])
def test_disconnect_is_detected_on_connection(
    name: str, timeout: float | None, how: str, silent_kit: tuple[ResponsesKit, threading.Event]
) -> None:
    kit, started = silent_kit
    with connection() as (client, server), ThreadPoolExecutor(1) as pool:
        server.settimeout(timeout)
        answer = pool.submit(handle, kit, **{name: server})
        assert started.wait(BOUND)
        if how == "half-closes":
            client.shutdown(socket.SHUT_WR)
        else:
            if how == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
        assert answer.result(BOUND).status == 499


@pytest.mark.parametrize("timeout", [None, 0.7, 0.0], ids=["blocking", "with a timeout", "not blocking"])
@pytest.mark.parametrize("sends", [b"", b"GET / HTTP/1.1\r\n"], ids=["silent", "pipelining"])
def test_connected_client_is_not_taken_for_disconnected(sends: bytes, timeout: float | None) -> None:
    proceed = threading.Event()

    class SlowBackend(ScriptedBackend):
        def generate(self, turn: Any) -> Any:
            assert proceed.wait(BOUND)
            yield "Hi"

    kit = ResponsesKit(SlowBackend(), owner=lambda environ: "ann")
    try:
        with connection() as (client, server), ThreadPoolExecutor(1) as pool:
            server.settimeout(timeout)
            client.sendall(sends)
            answer = pool.submit(handle, kit, **{"gunicorn.socket": server})
            with pytest.raises(TimeoutError):
                answer.result(2.0)  # several checks for a disconnect
            proceed.set()
            assert answer.result(BOUND).status == 200
            server.settimeout(BOUND)
            assert not sends or server.recv(100) == sends
    finally:
        proceed.set()
        loop_thread.stop_kit(kit)


def test_unreadable_connection_counts_as_connected() -> None:
    class UnreadableSocket(socket.socket):
        def recv(self, *args: Any) -> bytes:
            raise ValueError(f"non-zero flags not allowed in calls to recv() on {ssl.SSLSocket}")

    proceed = threading.Event()

    class SlowBackend(ScriptedBackend):
        def generate(self, turn: Any) -> Any:
            assert proceed.wait(BOUND)
            yield "Hi"

    kit = ResponsesKit(SlowBackend(), owner=lambda environ: "ann")
    try:
        with (
            connection() as (_, server),
            UnreadableSocket(fileno=server.detach()) as unreadable,
            ThreadPoolExecutor(1) as pool,
        ):
            answer = pool.submit(handle, kit, **{"gunicorn.socket": unreadable})
            with pytest.raises(TimeoutError):
                answer.result(1.2)
            proceed.set()
            assert answer.result(BOUND).status == 200
    finally:
        proceed.set()
        loop_thread.stop_kit(kit)


def test_waitress_reports_the_disconnect(silent_kit: tuple[ResponsesKit, threading.Event]) -> None:
    kit, started = silent_kit
    assert handle(kit, **{"waitress.client_disconnected": started.is_set}).status == 499


# Real servers.

THREADED = ["wsgiref", "werkzeug", "waitress", "waitress looking ahead", "gunicorn gthread"]
ALL_SERVERS = [*THREADED, "gunicorn sync", "gunicorn gthread, preloaded"]
DETECT_DISCONNECT = ["werkzeug", "waitress looking ahead", "gunicorn gthread", "gunicorn sync"]
ACCEPT_CHUNKS = [name for name in ALL_SERVERS if name != "wsgiref"]


@dataclass
class Server:
    """A server in a process of its own."""

    port: int
    notes: Notes
    process: subprocess.Popen[str]
    log: Path

    def wait_for_notes(self, run: str, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Return the server's notes of a kind, once there are enough."""
        until = time.monotonic() + BOUND
        while len(notes := self.notes.found(run, kind)) < count:
            assert time.monotonic() < until, f"{len(notes)} of {count} {kind}: {self.log.read_text()[-2000:]}"
            time.sleep(0.01)
        return notes

    def statuses(self, run: str, count: int = 1) -> list[str]:
        return [ended["status"] for ended in self.wait_for_notes(run, "ended", count)]

    def check_works(self) -> None:
        """Check that a worker or thread is free."""
        with Client(self.port) as client:
            client.ask("next")
            assert client.reply()[0] == 200


@dataclass
class Client:
    """A client connection with timeouts."""

    port: int
    sock: socket.socket = field(init=False)
    data: bytearray = field(default_factory=bytearray)
    chunked: bool = False
    length: int | None = None
    closes: bool = False

    def __post_init__(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self.port), BOUND)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, body: bytes, *headers: str) -> None:
        given = "".join(f"{header}\r\n" for header in headers)
        if "transfer-encoding" not in given.lower() and "content-length" not in given.lower():
            given += f"Content-Length: {len(body)}\r\n"
        if "x-user" not in given.lower():
            given += "X-User: ann\r\n"
        head = f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{given}\r\n"
        self.sock.sendall(head.encode() + body)

    def ask(self, run: str, *headers: str, **fields: Any) -> None:
        body = {"input": "Hi", "model": "brief", "metadata": {"run": run}, **fields}
        self.send(json.dumps(body).encode(), f"X-Run: {run}", *headers)

    def more(self) -> bool:
        data = self.sock.recv(65536)
        self.data += data
        return bool(data)

    def drain(self) -> None:
        """Receive until the connection is closed or reset."""
        with contextlib.suppress(OSError):
            while self.more():
                pass

    def until(self, mark: bytes) -> bytes:
        while (end := self.data.find(mark)) < 0:
            assert self.more(), f"the connection ended: {bytes(self.data[-500:])!r}"
        environment = bytes(self.data[: end + len(mark)])
        del self.data[: end + len(mark)]
        return environment

    def head(self) -> tuple[int, dict[str, str]]:
        lines = self.until(b"\r\n\r\n").decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        self.chunked = headers.get("transfer-encoding") == "chunked"
        self.length = int(headers["content-length"]) if "content-length" in headers else None
        self.closes = headers.get("connection", "").lower() == "close" or lines[0].startswith("HTTP/1.0")
        return int(lines[0].split()[1]), headers

    def pieces(self) -> Iterator[bytes]:
        """Yield the pieces of the body as they arrive."""
        if self.length is not None:
            while len(self.data) < self.length:
                assert self.more()
            yield bytes(self.data[: self.length])
            del self.data[: self.length]
        elif self.chunked:
            while size := int(self.until(b"\r\n"), 16):
                while len(self.data) < size + 2:
                    assert self.more()
                yield bytes(self.data[:size])
                del self.data[: size + 2]
            self.until(b"\r\n")
        else:
            while self.data or self.more():
                yield bytes(self.data)
                self.data.clear()

    def reply(self) -> tuple[int, Any]:
        status, _ = self.head()
        return status, json.loads(b"".join(self.pieces()))

    def final(self, streamed: bytes = b"", pieces: Iterator[bytes] | None = None) -> dict[str, Any]:
        """Return the final response object of a stream, after checking its events."""
        return check_reply(streamed + b"".join(pieces or self.pieces()))


def check_reply(streamed: bytes) -> dict[str, Any]:
    assert streamed.endswith(b"data: [DONE]\n\n"), streamed[-500:]
    streamed = re.sub(rb"^:[^\n]*\n\n", b"", streamed.removesuffix(b"data: [DONE]\n\n"), flags=re.MULTILINE)
    return check_stream(decode_events(streamed))


def text(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


Start = Callable[..., Server]


@contextlib.contextmanager
def starter(place: Path) -> Iterator[Start]:
    """Start servers; check that each stops when asked to, and logs no errors."""
    running: list[Server] = []

    def begin(name: str, *more: str) -> Server:
        if "waitress" in name:
            pytest.importorskip("waitress")
        folder, log = place / f"notes {len(running)}", place / f"log {len(running)}"
        folder.mkdir()
        with log.open("wb") as stderr:
            command = [sys.executable, "-W", "default", "-m", "tests.support.wsgi_server", name, str(folder), *more]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        running.append(Server(json.loads(line)["port"], Notes(folder), process, log))
        return running[-1]

    yield begin
    for server in running:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
    for server in running:
        try:
            server.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.communicate()
            pytest.fail(f"the server does not end:\n{server.log.read_text()[-3000:]}")
        complaints = re.search(
            r"never retrieved|was destroyed but it is pending|was never awaited|unraisable|Exception in callback",
            server.log.read_text(),
        )
        assert not complaints, server.log.read_text()[-3000:]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers for one test."""
    with starter(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a started server, shared by tests."""
    environment: dict[str, Server] = {}
    with starter(tmp_path_factory.mktemp("servers")) as begin:

        def find(name: str) -> Server:
            if name not in environment:
                environment[name] = begin(name)
            return environment[name]

        yield find


@pytest.fixture(params=ALL_SERVERS)
def server(request: pytest.FixtureRequest, serving: Start) -> Server:
    return serving(request.param)


@pytest.fixture
def run() -> str:
    """Return a name that no other test uses."""
    return uuid.uuid4().hex


@pytest.mark.parametrize("kind", ["", "-plain"], ids=["async", "plain"])
def test_reply_arrives_whole(server: Server, kind: str, run: str) -> None:
    for _ in range(3):
        with Client(server.port) as client:
            client.ask(run, model=f"brief{kind}", input="Hello")
            status, response = client.reply()
        assert status == 200
        check_response(response)
        assert text(response) == "Hello"
    assert server.statuses(run, 3) == ["completed"] * 3


@pytest.mark.parametrize("kind", ["", "-plain"], ids=["async", "plain"])
def test_stream_sends_first_byte_immediately_and_each_delta(server: Server, kind: str, run: str) -> None:
    with Client(server.port) as client:
        client.ask(run, model=f"paced{kind}", input="one two three", stream=True)
        status, headers = client.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        streamed = b""
        pieces = client.pieces()
        for number, word in enumerate([b'"one"', b'"two"', b'"three"'], 1):
            while b'"delta":' + word not in streamed:
                streamed += next(pieces)
            assert b"response.completed" not in streamed
            server.notes.open(run, str(number))  # the backend yields the next word only then
        assert text(client.final(streamed, pieces)) == "onetwothree"
    assert server.statuses(run) == ["completed"]


def test_idle_stream_gets_comments(server: Server, run: str) -> None:
    with Client(server.port) as client:
        client.ask(run, model="silent", stream=True)
        client.head()
        streamed = b""
        pieces = client.pieces()
        while len(re.findall(rb"^:", streamed, re.MULTILINE)) < 3:
            streamed += next(pieces)
        server.notes.open(run, "end")
        assert client.final(streamed, pieces)["status"] == "completed"


@pytest.mark.parametrize("model", ["talking", "talking-plain", "silent", "silent-plain"])
@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
def test_disconnect_from_stream_cancels_response(server: Server, model: str, reset: bool, run: str) -> None:
    with Client(server.port) as client:
        client.ask(run, model=model, stream=True)
        client.head()
        client.until(b"delta")
        if reset:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    server.wait_for_notes(run, "stopped")
    assert server.statuses(run) == ["cancelled"]
    server.check_works()


@pytest.mark.parametrize("name", DETECT_DISCONNECT)
@pytest.mark.parametrize("model", ["silent", "talking-plain"])
def test_disconnect_before_reply_cancels_response(serving: Start, name: str, model: str, run: str) -> None:
    server = serving(name)
    with Client(server.port) as client:
        client.ask(run, model=model)
        server.wait_for_notes(run, "started")
    server.wait_for_notes(run, "stopped")
    assert server.statuses(run) == ["cancelled"]
    server.check_works()


@pytest.mark.parametrize("name", ACCEPT_CHUNKS)
def test_chunked_body_is_accepted(serving: Start, name: str) -> None:
    server = serving(name)
    with Client(server.port) as client:
        client.send(b"", "Transfer-Encoding: chunked")
        for chunk in (b'{"input": "Hel', b'lo", "model": "brief", ', b'"metadata": {"run": "chunks"}}', b""):
            client.sock.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            time.sleep(0.02)  # so that the chunks arrive separately
        status, response = client.reply()
    assert (status, text(response)) == (200, "Hello")
    with Client(server.port) as client:
        client.send(b"", "Transfer-Encoding: chunked")
        with contextlib.suppress(OSError):  # the server stops reading
            for _ in range(30):
                client.sock.sendall(b"2710\r\n%s\r\n" % (b"x" * 10_000))
            client.sock.sendall(b"0\r\n\r\n")
        with contextlib.suppress(OSError):
            assert client.head()[0] == 413
    server.check_works()


@pytest.mark.parametrize("name", ACCEPT_CHUNKS)
def test_malformed_chunks_are_refused(serving: Start, name: str) -> None:
    server = serving(name)
    with Client(server.port) as client:
        client.send(b"zz\r\n{}\r\n", "Transfer-Encoding: chunked")
        assert client.head()[0] in (400, 499)  # some servers report a disconnect
    server.check_works()


def test_oversize_body_is_refused_by_server(server: Server) -> None:
    with Client(server.port) as client:
        client.send(b"x" * 100_001)
        status, body = client.reply()
        check_error(body)
        assert status == 413
    server.check_works()


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_disconnect_during_upload_creates_no_response(server: Server, framing: str, run: str) -> None:
    with Client(server.port) as client:
        whole = json.dumps({"input": "Hi", "model": "brief", "metadata": {"run": run}}).encode()
        client.send(b"%x\r\n%s\r\n" % (len(whole), whole) if "chunked" in framing else whole, framing)
    server.check_works()
    assert server.notes.found(run, "started") == []


def test_owner_hook_runs_in_request_thread(server: Server, run: str) -> None:
    for user, status in [("ann", 200), ("", 401), ("forbidden", 403), ("busy", 429), ("crash", 500)]:
        with Client(server.port) as client:
            client.ask(run, f"X-User: {user}")
            environment, headers = client.head()
            body = b"".join(client.pieces())
        assert environment == status
        assert b"hunter2" not in body
        if status != 200:
            check_error(json.loads(body))
        assert ("retry-after" in headers) == (status == 429)
    assert [note["own"] for note in server.wait_for_notes(run, "hook", 5)] == [True] * 5


def test_hook_raising_system_exit_ends_its_request_only(serving: Start, run: str) -> None:
    server = serving("werkzeug")
    with Client(server.port) as client:
        client.ask(run, "X-User: exit")
        client.drain()
    server.check_works()


def test_async_hook_runs_on_loop_and_cannot_end_it(start: Start, run: str) -> None:
    server = start("wsgiref", "asynchronous")
    for user, status in [("ann", 200), ("", 401), ("forbidden", 403), ("busy", 429), ("crash", 500)]:
        with Client(server.port) as client:
            client.ask(run, f"X-User: {user}")
            assert client.reply()[0] == status
    assert [note["own"] for note in server.wait_for_notes(run, "hook", 5)] == [False] * 5
    with Client(server.port) as client:
        client.ask(run, "X-User: exit")
        client.drain()
    server.check_works()


@pytest.mark.parametrize("name", THREADED)
def test_concurrent_streams_do_not_mix(serving: Start, name: str, run: str) -> None:
    server = serving(name)

    def ask(number: int) -> str:
        with Client(server.port) as client:
            model = "brief-plain" if number % 2 else "brief"
            client.ask(run, f"X-User: user {number}", model=model, input=f"word {number}", stream=True)
            client.head()
            return text(client.final())

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, range(72))) == [f"word {number}" for number in range(72)]
    assert all(note["owner"] == f"user {note['text'].split()[1]}" for note in server.wait_for_notes(run, "started", 72))


@pytest.mark.parametrize("name", ["waitress", "gunicorn gthread"])
def test_connection_is_reused(serving: Start, name: str, run: str) -> None:
    with Client(serving(name).port) as client:
        for _ in range(2):
            client.ask(run)
            assert client.reply()[0] == 200
            client.ask(run, "X-User: ")
            assert client.reply()[0] == 401  # its body was not read
            client.ask(run)
            assert client.reply()[0] == 200
            client.ask(run, stream=True)
            client.head()
            assert client.final()["status"] == "completed"
            if client.closes:  # waitress closes it after a stream
                return


# Shutdown of servers.


@pytest.mark.parametrize("name", ["gunicorn gthread", "gunicorn sync"])
@pytest.mark.parametrize("model", ["silent", "talking-plain"])
def test_terminated_server_ends_streams_in_order(start: Start, name: str, model: str, run: str) -> None:
    server = start(name)
    with Client(server.port) as client:
        client.ask(run, model=model, stream=True)
        client.head()
        pieces = client.pieces()
        streamed = next(pieces)
        while b"delta" not in streamed:
            streamed += next(pieces)
        server.process.terminate()
        final = client.final(streamed, pieces)
    assert "shutting down" in final["error"]["message"]
    assert server.process.wait(BOUND) == 0
    assert server.statuses(run) == ["failed"]


@pytest.mark.parametrize("name", ["wsgiref", "werkzeug", "waitress"])
def test_interrupted_server_ends_responses(start: Start, name: str, run: str) -> None:
    server = start(name)
    with Client(server.port) as client:
        client.ask(run, model="talking-plain", stream=True)
        client.head()
        client.until(b"delta")
        server.process.send_signal(signal.SIGINT)
        client.drain()
    server.process.wait(2 * BOUND)
    assert server.statuses(run) in (["failed"], ["cancelled"])  # some servers close their connections first


def test_timed_out_worker_ends_its_response(start: Start, run: str) -> None:
    server = start("gunicorn sync, impatient")
    with Client(server.port) as client:
        client.ask(run, model="silent", stream=True)
        client.head()
        client.drain()
    assert server.statuses(run) == ["cancelled"]
    server.check_works()  # the replacement worker


def test_replaced_worker_ends_stream_in_order(start: Start, run: str) -> None:
    server = start("gunicorn gthread, once")
    with Client(server.port) as client:
        client.ask(run, model="silent", stream=True)
        client.head()
        assert "shutting down" in client.final()["error"]["message"]
    assert server.statuses(run) == ["failed"]


def test_all_servers_are_tested() -> None:
    assert {*SERVERS, *GUNICORNS} >= {*ALL_SERVERS}
