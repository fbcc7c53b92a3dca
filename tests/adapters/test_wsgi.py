"""The kit under WSGI: what becomes of an environment, and what real servers make of the answers."""

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


def asked(kit: ResponsesKit, body: bytes = b'{"input": "Hi"}', path: str = "/responses", **environ: Any) -> WSGIReply:
    found: dict[str, Any] = {
        "REQUEST_METHOD": "POST",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        "test.user": "ann",
        **environ,
    }
    found = {name: value for name, value in found.items() if value is not None}
    return handle_request(OpenResponses(kit), found, path=path, host=found)


def error(answer: WSGIReply) -> tuple[int, str | None]:
    body = json.loads(answer.body)
    check_error(body)
    return answer.status, body["error"]["code"]


@pytest.mark.skipif(not hasattr(socket, "SO_SNDTIMEO"), reason="the system cannot bound how long sending takes")
def test_a_client_that_reads_nothing_does_not_hold_the_thread_that_sends_to_it_for_ever() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]), timeouts=Timeouts(send=0.2))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert asked(kit, **{"gunicorn.socket": ours}).status == 200
        with pytest.raises(OSError, match=r"temporarily unavailable|timed out"):
            ours.sendall(b"x" * 100_000_000)
    loop_thread.stop_kit(kit)


def test_an_answer_is_whole_or_in_pieces(kit: ResponsesKit) -> None:
    answer = asked(kit)
    assert (answer.status, answer.headers["Content-Type"], answer.pieces) == (200, "application/json", None)
    check_response(json.loads(answer.body))
    answer = asked(kit, b'{"input": "Hi", "stream": true}')
    assert (answer.status, answer.headers["Content-Type"], answer.body) == (
        200,
        "text/event-stream; charset=utf-8",
        b"",
    )
    assert answer.pieces is not None
    told = b"".join(answer.pieces).removesuffix(b"data: [DONE]\n\n")
    answer.pieces.close()
    assert check_stream(decode_events(told))["status"] == "completed"


def test_methods_paths_and_queries_are_the_requests(kit: ResponsesKit) -> None:
    response_id = json.loads(asked(kit).body)["id"]
    path = f"/responses/{response_id}"
    assert json.loads(asked(kit, b"", path, REQUEST_METHOD="get").body)["id"] == response_id
    answer = asked(kit, b"", f"{path}/input_items", REQUEST_METHOD="GET", QUERY_STRING="limit=0")
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "limit")
    assert asked(kit, b"", path, REQUEST_METHOD="DELETE").status == 200
    assert asked(kit, b"", path, REQUEST_METHOD="GET", QUERY_STRING=None).status == 404
    assert asked(kit, path="/nothing").status == 404
    assert asked(kit, b"", REQUEST_METHOD="PUT").headers["Allow"] == "POST, GET"


def test_headers_are_read_from_the_environment(kit: ResponsesKit) -> None:
    assert error(asked(kit, CONTENT_TYPE="text/plain"))[0] == 415
    assert error(asked(kit, HTTP_CONTENT_ENCODING="br"))[0] == 415
    first, second = (asked(kit, HTTP_IDEMPOTENCY_KEY="a key") for _ in range(2))
    assert json.loads(first.body)["id"] == json.loads(second.body)["id"]
    assert asked(kit, CONTENT_TYPE="").status == 200
    assert asked(kit, CONTENT_TYPE=None).status == 200


@pytest.mark.parametrize("length", [None, "", "many", "-1", "²", "0"])
def test_a_body_without_a_length_is_not_read_where_nothing_says_that_it_ends(kit: ResponsesKit, length: Any) -> None:
    class Endless(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size == 0, "this would wait for ever"
            return b""

    answer = asked(kit, CONTENT_LENGTH=length, **{"wsgi.input": Endless()})
    assert error(answer)[0] == 400


def test_a_body_without_a_length_is_read_to_its_end_where_the_server_sees_to_it(kit: ResponsesKit) -> None:
    pieces = [b'{"inp', b'ut": "Hi"', b"}", b""]

    class PullStream:
        def read(self, size: int) -> bytes:
            assert size > 0
            return pieces.pop(0)

    more = {"wsgi.input": PullStream(), "wsgi.input_terminated": True}
    assert asked(kit, CONTENT_LENGTH=None, **more).status == 200
    assert pieces == []


def test_no_more_is_read_than_the_length_says(kit: ResponsesKit) -> None:
    body = io.BytesIO(b'{"input": "Hi"}' + b"GET / HTTP/1.1")
    assert asked(kit, CONTENT_LENGTH="15", **{"wsgi.input": body}).status == 200
    assert body.read() == b"GET / HTTP/1.1"


def test_a_body_that_is_too_large_is_refused_before_and_while_it_is_read(kit: ResponsesKit) -> None:
    unread = io.BytesIO(b"x" * 1001)
    assert error(asked(kit, CONTENT_LENGTH="1001", **{"wsgi.input": unread}))[0] == 413
    assert unread.tell() == 0
    more = {"wsgi.input": io.BytesIO(b"x" * 10_000_000), "wsgi.input_terminated": True}
    assert error(asked(kit, CONTENT_LENGTH=None, **more))[0] == 413
    assert error(asked(kit, CONTENT_LENGTH="9" * 5000))[0] == 413


@pytest.mark.parametrize("fails", [False, True])
def test_a_body_that_ends_too_early_makes_no_response(fails: bool) -> None:
    class Cut(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            if fails and not data:
                raise ConnectionResetError
            return data

    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store)
    try:
        answer = asked(kit, CONTENT_LENGTH="100", **{"wsgi.input": Cut(b'{"input": "Hi"}')})
    finally:
        loop_thread.stop_kit(kit)
    if fails:
        assert (answer.status, answer.body, answer.pieces) == (499, b"", None)
    else:
        assert error(answer) == (400, "invalid_body")
    assert len(store) == 0


def test_the_body_is_read_in_the_hosts_thread_and_only_once_it_is_known_who_asks(kit: ResponsesKit) -> None:
    threads: list[int] = []

    class Noted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            threads.append(threading.get_ident())
            return super().read(size)

    assert error(asked(kit, **{"wsgi.input": Noted(b'{"input": "Hi"}'), "test.user": ""}))[0] == 401
    assert threads == []
    assert asked(kit, **{"wsgi.input": Noted(b'{"input": "Hi"}')}).status == 200
    assert set(threads) == {threading.get_ident()}


def test_a_framework_may_read_the_body_in_its_own_way(kit: ResponsesKit) -> None:
    sizes: list[int] = []
    body = io.BytesIO(b'{"input": "Hi"}')

    def read(size: int) -> bytes:
        sizes.append(size)
        return body.read(size)

    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "15", "test.user": "ann"}
    assert handle_request(OpenResponses(kit), environ, path="/responses", host=environ, read=read).status == 200
    assert min(sizes) > 0


def test_a_store_that_was_not_set_up_is_raised_and_not_answered() -> None:
    class Bare(MemoryStore):
        ready = False

        async def get(self, owner: str, response_id: str) -> Any:
            if not self.ready:
                raise errors.ConfigurationError("run the setup first")
            return await super().get(owner, response_id)

    store = Bare()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, secrets=["a secret that is long enough to be one"])
    for _ in range(2):
        with pytest.raises(errors.ConfigurationError, match="setup"):
            asked(kit)
    store.ready = True
    try:
        assert asked(kit).status == 200
    finally:
        loop_thread.stop_kit(kit)


# Whether the client has left.


@pytest.fixture
def waiting() -> Iterator[tuple[ResponsesKit, threading.Event]]:
    """A kit whose answers take for ever, and what says that one has begun."""
    begun = threading.Event()

    class Silent(ScriptedBackend):
        async def generate(self, turn: Any) -> Any:
            begun.set()
            await blocking_sleep()
            yield "Hi"

    kit = ResponsesKit(Silent(), owner=lambda environ: "ann")
    loop_thread.start_kit(kit, grace=0.0)
    yield kit, begun
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
def test_a_client_that_goes_is_seen_on_its_connection(
    name: str, timeout: float | None, how: str, waiting: tuple[ResponsesKit, threading.Event]
) -> None:
    kit, begun = waiting
    with connection() as (client, server), ThreadPoolExecutor(1) as pool:
        server.settimeout(timeout)
        answer = pool.submit(asked, kit, **{name: server})
        assert begun.wait(BOUND)
        if how == "half-closes":
            client.shutdown(socket.SHUT_WR)
        else:
            if how == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
        assert answer.result(BOUND).status == 499


@pytest.mark.parametrize("timeout", [None, 0.7, 0.0], ids=["blocking", "with a timeout", "not blocking"])
@pytest.mark.parametrize("sends", [b"", b"GET / HTTP/1.1\r\n"], ids=["silent", "with more to ask"])
def test_a_client_that_stays_is_not_taken_for_gone_and_loses_nothing(sends: bytes, timeout: float | None) -> None:
    go_on = threading.Event()

    class Slow(ScriptedBackend):
        def generate(self, turn: Any) -> Any:
            assert go_on.wait(BOUND)
            yield "Hi"

    kit = ResponsesKit(Slow(), owner=lambda environ: "ann")
    try:
        with connection() as (client, server), ThreadPoolExecutor(1) as pool:
            server.settimeout(timeout)
            client.sendall(sends)
            answer = pool.submit(asked, kit, **{"gunicorn.socket": server})
            with pytest.raises(TimeoutError):
                answer.result(2.0)  # it is looked several times
            go_on.set()
            assert answer.result(BOUND).status == 200
            server.settimeout(BOUND)
            assert not sends or server.recv(100) == sends
    finally:
        go_on.set()
        loop_thread.stop_kit(kit)


def test_of_a_connection_that_cannot_be_looked_into_nothing_is_believed() -> None:
    class Sealed(socket.socket):
        def recv(self, *args: Any) -> bytes:
            raise ValueError(f"non-zero flags not allowed in calls to recv() on {ssl.SSLSocket}")

    go_on = threading.Event()

    class Slow(ScriptedBackend):
        def generate(self, turn: Any) -> Any:
            assert go_on.wait(BOUND)
            yield "Hi"

    kit = ResponsesKit(Slow(), owner=lambda environ: "ann")
    try:
        with connection() as (_, server), Sealed(fileno=server.detach()) as sealed, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(asked, kit, **{"gunicorn.socket": sealed})
            with pytest.raises(TimeoutError):
                answer.result(1.2)
            go_on.set()
            assert answer.result(BOUND).status == 200
    finally:
        go_on.set()
        loop_thread.stop_kit(kit)


def test_waitress_is_asked_where_it_tells(waiting: tuple[ResponsesKit, threading.Event]) -> None:
    kit, begun = waiting
    assert asked(kit, **{"waitress.client_disconnected": begun.is_set}).status == 499


# Real servers.

THREADED = ["wsgiref", "werkzeug", "waitress", "waitress looking ahead", "gunicorn gthread"]
EVERY = [*THREADED, "gunicorn sync", "gunicorn gthread, preloaded"]
KNOW_WHO_LEFT = ["werkzeug", "waitress looking ahead", "gunicorn gthread", "gunicorn sync"]
TAKE_CHUNKS = [name for name in EVERY if name != "wsgiref"]


@dataclass
class Server:
    """A server in a process of its own."""

    port: int
    notes: Notes
    process: subprocess.Popen[str]
    log: Path

    def noted(self, run: str, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """What was noted of this kind, once it is so much."""
        until = time.monotonic() + BOUND
        while len(found := self.notes.found(run, kind)) < count:
            assert time.monotonic() < until, f"{len(found)} {kind} instead of {count}: {self.log.read_text()[-2000:]}"
            time.sleep(0.01)
        return found

    def statuses(self, run: str, count: int = 1) -> list[str]:
        return [ended["status"] for ended in self.noted(run, "ended", count)]

    def works(self) -> None:
        """The worker, or thread, is free again."""
        with Wire(self.port) as wire:
            wire.ask("the next")
            assert wire.reply()[0] == 200


@dataclass
class Wire:
    """One connection, on which everything has its time."""

    port: int
    sock: socket.socket = field(init=False)
    data: bytearray = field(default_factory=bytearray)
    chunked: bool = False
    length: int | None = None
    closes: bool = False

    def __post_init__(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self.port), BOUND)

    def __enter__(self) -> Wire:
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
        """Takes in what comes until the connection ends, however it does."""
        with contextlib.suppress(OSError):
            while self.more():
                pass

    def until(self, mark: bytes) -> bytes:
        while (end := self.data.find(mark)) < 0:
            assert self.more(), f"the connection ended: {bytes(self.data[-500:])!r}"
        found = bytes(self.data[: end + len(mark)])
        del self.data[: end + len(mark)]
        return found

    def head(self) -> tuple[int, dict[str, str]]:
        lines = self.until(b"\r\n\r\n").decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        self.chunked = headers.get("transfer-encoding") == "chunked"
        self.length = int(headers["content-length"]) if "content-length" in headers else None
        self.closes = headers.get("connection", "").lower() == "close" or lines[0].startswith("HTTP/1.0")
        return int(lines[0].split()[1]), headers

    def pieces(self) -> Iterator[bytes]:
        """The body, as it comes."""
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

    def final(self, told: bytes = b"", pieces: Iterator[bytes] | None = None) -> dict[str, Any]:
        """The final object of a stream that has begun, which is judged."""
        return judged(told + b"".join(pieces or self.pieces()))


def judged(told: bytes) -> dict[str, Any]:
    assert told.endswith(b"data: [DONE]\n\n"), told[-500:]
    told = re.sub(rb"^:[^\n]*\n\n", b"", told.removesuffix(b"data: [DONE]\n\n"), flags=re.MULTILINE)
    return check_stream(decode_events(told))


def text(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


Start = Callable[..., Server]


@contextlib.contextmanager
def starter(place: Path) -> Iterator[Start]:
    """Starts servers; all of them have to end when they are told to, and have nothing to complain of."""
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
    """Starts servers for the test alone."""
    with starter(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers, or finds them started."""
    found: dict[str, Server] = {}
    with starter(tmp_path_factory.mktemp("servers")) as begin:

        def find(name: str) -> Server:
            if name not in found:
                found[name] = begin(name)
            return found[name]

        yield find


@pytest.fixture(params=EVERY)
def server(request: pytest.FixtureRequest, serving: Start) -> Server:
    return serving(request.param)


@pytest.fixture
def run() -> str:
    """A name that no other test uses."""
    return uuid.uuid4().hex


@pytest.mark.parametrize("kind", ["", "-plain"], ids=["async", "plain"])
def test_an_answer_arrives_whole(server: Server, kind: str, run: str) -> None:
    for _ in range(3):
        with Wire(server.port) as wire:
            wire.ask(run, model=f"brief{kind}", input="Hello")
            status, response = wire.reply()
        assert status == 200
        check_response(response)
        assert text(response) == "Hello"
    assert server.statuses(run, 3) == ["completed"] * 3


@pytest.mark.parametrize("kind", ["", "-plain"], ids=["async", "plain"])
def test_the_first_byte_comes_at_once_and_every_word_by_itself(server: Server, kind: str, run: str) -> None:
    with Wire(server.port) as wire:
        wire.ask(run, model=f"paced{kind}", input="one two three", stream=True)
        status, headers = wire.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        told = b""
        pieces = wire.pieces()
        for number, word in enumerate([b'"one"', b'"two"', b'"three"'], 1):
            while b'"delta":' + word not in told:
                told += next(pieces)
            assert b"response.completed" not in told
            server.notes.open(run, str(number))  # and not before does the next one come
        assert text(wire.final(told, pieces)) == "onetwothree"
    assert server.statuses(run) == ["completed"]


def test_silence_is_filled_with_comments(server: Server, run: str) -> None:
    with Wire(server.port) as wire:
        wire.ask(run, model="silent", stream=True)
        wire.head()
        told = b""
        pieces = wire.pieces()
        while len(re.findall(rb"^:", told, re.MULTILINE)) < 3:
            told += next(pieces)
        server.notes.open(run, "end")
        assert wire.final(told, pieces)["status"] == "completed"


@pytest.mark.parametrize("model", ["talking", "talking-plain", "silent", "silent-plain"])
@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
def test_a_client_that_leaves_a_stream_has_its_response_cancelled(
    server: Server, model: str, reset: bool, run: str
) -> None:
    with Wire(server.port) as wire:
        wire.ask(run, model=model, stream=True)
        wire.head()
        wire.until(b"delta")
        if reset:
            wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    server.noted(run, "stopped")
    assert server.statuses(run) == ["cancelled"]
    server.works()


@pytest.mark.parametrize("name", KNOW_WHO_LEFT)
@pytest.mark.parametrize("model", ["silent", "talking-plain"])
def test_a_client_that_leaves_before_its_answer_has_its_response_cancelled(
    serving: Start, name: str, model: str, run: str
) -> None:
    server = serving(name)
    with Wire(server.port) as wire:
        wire.ask(run, model=model)
        server.noted(run, "started")
    server.noted(run, "stopped")
    assert server.statuses(run) == ["cancelled"]
    server.works()


@pytest.mark.parametrize("name", TAKE_CHUNKS)
def test_a_body_may_come_in_chunks(serving: Start, name: str) -> None:
    server = serving(name)
    with Wire(server.port) as wire:
        wire.send(b"", "Transfer-Encoding: chunked")
        for chunk in (b'{"input": "Hel', b'lo", "model": "brief", ', b'"metadata": {"run": "chunks"}}', b""):
            wire.sock.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            time.sleep(0.02)  # so that they come one by one; nothing depends on it
        status, response = wire.reply()
    assert (status, text(response)) == (200, "Hello")
    with Wire(server.port) as wire:
        wire.send(b"", "Transfer-Encoding: chunked")
        with contextlib.suppress(OSError):  # it is not read to its end
            for _ in range(30):
                wire.sock.sendall(b"2710\r\n%s\r\n" % (b"x" * 10_000))
            wire.sock.sendall(b"0\r\n\r\n")
        with contextlib.suppress(OSError):
            assert wire.head()[0] == 413
    server.works()


@pytest.mark.parametrize("name", TAKE_CHUNKS)
def test_chunks_that_are_none_are_refused_and_the_server_goes_on(serving: Start, name: str) -> None:
    server = serving(name)
    with Wire(server.port) as wire:
        wire.send(b"zz\r\n{}\r\n", "Transfer-Encoding: chunked")
        assert wire.head()[0] in (400, 499)  # some servers say what they say when a client has left
    server.works()


def test_a_body_that_is_too_large_is_refused_and_the_server_goes_on(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(b"x" * 100_001)
        status, body = wire.reply()
        check_error(body)
        assert status == 413
    server.works()


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_client_that_leaves_in_the_middle_of_its_body_makes_no_response(
    server: Server, framing: str, run: str
) -> None:
    with Wire(server.port) as wire:
        whole = json.dumps({"input": "Hi", "model": "brief", "metadata": {"run": run}}).encode()
        wire.send(b"%x\r\n%s\r\n" % (len(whole), whole) if "chunked" in framing else whole, framing)
    server.works()
    assert server.notes.found(run, "started") == []


def test_the_owner_hook_is_called_in_the_requests_own_thread_whatever_it_does(server: Server, run: str) -> None:
    for user, status in [("ann", 200), ("", 401), ("forbidden", 403), ("busy", 429), ("crash", 500)]:
        with Wire(server.port) as wire:
            wire.ask(run, f"X-User: {user}")
            found, headers = wire.head()
            body = b"".join(wire.pieces())
        assert found == status
        assert b"hunter2" not in body
        if status != 200:
            check_error(json.loads(body))
        assert ("retry-after" in headers) == (status == 429)
    assert [note["own"] for note in server.noted(run, "hook", 5)] == [True] * 5


def test_a_hook_that_wants_to_end_the_process_ends_its_own_request_at_most(serving: Start, run: str) -> None:
    server = serving("werkzeug")
    with Wire(server.port) as wire:
        wire.ask(run, "X-User: exit")
        wire.drain()
    server.works()


def test_an_async_hook_is_called_on_the_loop_and_cannot_end_it(start: Start, run: str) -> None:
    server = start("wsgiref", "asynchronous")
    for user, status in [("ann", 200), ("", 401), ("forbidden", 403), ("busy", 429), ("crash", 500)]:
        with Wire(server.port) as wire:
            wire.ask(run, f"X-User: {user}")
            assert wire.reply()[0] == status
    assert [note["own"] for note in server.noted(run, "hook", 5)] == [False] * 5
    with Wire(server.port) as wire:
        wire.ask(run, "X-User: exit")
        wire.drain()
    server.works()


@pytest.mark.parametrize("name", THREADED)
def test_many_streams_at_once_do_not_mix(serving: Start, name: str, run: str) -> None:
    server = serving(name)

    def ask(number: int) -> str:
        with Wire(server.port) as wire:
            model = "brief-plain" if number % 2 else "brief"
            wire.ask(run, f"X-User: user {number}", model=model, input=f"word {number}", stream=True)
            wire.head()
            return text(wire.final())

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, range(72))) == [f"word {number}" for number in range(72)]
    assert all(note["owner"] == f"user {note['text'].split()[1]}" for note in server.noted(run, "started", 72))


@pytest.mark.parametrize("name", ["waitress", "gunicorn gthread"])
def test_a_connection_is_kept_for_the_next_request(serving: Start, name: str, run: str) -> None:
    with Wire(serving(name).port) as wire:
        for _ in range(2):
            wire.ask(run)
            assert wire.reply()[0] == 200
            wire.ask(run, "X-User: ")
            assert wire.reply()[0] == 401  # whose body nobody has read
            wire.ask(run)
            assert wire.reply()[0] == 200
            wire.ask(run, stream=True)
            wire.head()
            assert wire.final()["status"] == "completed"
            if wire.closes:  # as waitress does after a stream
                return


# The end of servers.


@pytest.mark.parametrize("name", ["gunicorn gthread", "gunicorn sync"])
@pytest.mark.parametrize("model", ["silent", "talking-plain"])
def test_a_server_that_is_told_to_end_ends_its_streams_in_order(start: Start, name: str, model: str, run: str) -> None:
    server = start(name)
    with Wire(server.port) as wire:
        wire.ask(run, model=model, stream=True)
        wire.head()
        pieces = wire.pieces()
        told = next(pieces)
        while b"delta" not in told:
            told += next(pieces)
        server.process.terminate()
        final = wire.final(told, pieces)
    assert "shutting down" in final["error"]["message"]
    assert server.process.wait(BOUND) == 0
    assert server.statuses(run) == ["failed"]


@pytest.mark.parametrize("name", ["wsgiref", "werkzeug", "waitress"])
def test_a_server_that_is_interrupted_has_its_responses_ended(start: Start, name: str, run: str) -> None:
    server = start(name)
    with Wire(server.port) as wire:
        wire.ask(run, model="talking-plain", stream=True)
        wire.head()
        wire.until(b"delta")
        server.process.send_signal(signal.SIGINT)
        wire.drain()
    server.process.wait(2 * BOUND)
    assert server.statuses(run) in (["failed"], ["cancelled"])  # some close their connections first


def test_a_worker_that_takes_too_long_is_ended_by_its_server_and_its_response_with_it(start: Start, run: str) -> None:
    server = start("gunicorn sync, impatient")
    with Wire(server.port) as wire:
        wire.ask(run, model="silent", stream=True)
        wire.head()
        wire.drain()
    assert server.statuses(run) == ["cancelled"]
    server.works()  # the next one


def test_a_worker_that_is_replaced_has_its_stream_ended_in_order(start: Start, run: str) -> None:
    server = start("gunicorn gthread, once")
    with Wire(server.port) as wire:
        wire.ask(run, model="silent", stream=True)
        wire.head()
        assert "shutting down" in wire.final()["error"]["message"]
    assert server.statuses(run) == ["failed"]


def test_every_server_is_tried() -> None:
    assert {*SERVERS, *GUNICORNS} >= {*EVERY}
