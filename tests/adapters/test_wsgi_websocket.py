"""WebSockets over connections that servers give away."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator

import anyio
import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.uri import parse_uri

from responses_kit import errors
from responses_kit._concurrency import loop_thread
from responses_kit.adapters import wsgi_websocket
from responses_kit.adapters.wsgi_websocket import Socket, upgrade

pytestmark = pytest.mark.timeout(30)

ASKED = {
    "connection": "keep-alive, Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(5)
        yield ours, theirs


class Peer:
    """A client of whom the server has read the request."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.protocol = ClientProtocol(parse_uri("ws://here/v1/responses"))
        self.request = self.protocol.connect()
        self.protocol.send_request(self.request)
        self.protocol.data_to_send()  # which the server has

    @property
    def headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.request.headers.raw_items()}

    def send(self) -> None:
        for data in self.protocol.data_to_send():
            self.connection.sendall(data)

    def next(self) -> object:
        while not (events := self.protocol.events_received()):
            data = self.connection.recv(65536)
            if not data:
                return None
            self.protocol.receive_data(data)
        (event,) = events
        return event


async def echo(connection: socket.socket, headers: dict[str, str]) -> list[str | bytes]:
    """Says twice what it hears, until the client leaves or says "end"."""
    there: Socket = await upgrade(connection, headers, limit=1000)
    heard: list[str | bytes] = []
    try:
        with anyio.fail_after(10):
            while (frame := await there.receive()) != "end":
                heard.append(frame)
                await there.send(f"{frame!r}, {frame!r}")
        await there.close(1001)
    except errors.ClientDisconnected:
        await there.close(None)
    return heard


def test_frames_go_to_and_fro_and_the_socket_is_closed_with_a_code(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    peer = Peer(theirs)
    done = loop_thread.submit(echo(ours, peer.headers))
    peer.next()  # the upgrade
    assert peer.protocol.handshake_exc is None
    for send in (lambda: peer.protocol.send_text(b"hi"), lambda: peer.protocol.send_binary(b"\0")):
        send()
        peer.send()
        event = peer.next()
        assert isinstance(event, Frame)
    assert bytes(event.data) == rb"b'\x00', b'\x00'"
    peer.protocol.send_text(b"end")
    peer.send()
    peer.next()
    peer.send()
    assert peer.protocol.close_rcvd is not None
    assert peer.protocol.close_rcvd.code == 1001
    assert done.result(10) == ["hi", b"\0"]


def test_a_client_that_says_good_bye_and_keeps_the_connection_has_left(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    peer = Peer(theirs)
    done = loop_thread.submit(echo(ours, peer.headers))
    peer.next()
    peer.protocol.send_close(1000)
    peer.send()
    assert done.result(5) == []


def test_a_client_that_breaks_off_has_left(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    peer = Peer(theirs)
    done = loop_thread.submit(echo(ours, peer.headers))
    peer.next()
    theirs.close()
    assert done.result(5) == []


def test_a_message_that_is_too_large_closes_the_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    peer = Peer(theirs)
    done = loop_thread.submit(echo(ours, peer.headers))
    peer.next()
    peer.protocol.send_text(b"x" * 1001)
    peer.send()
    peer.next()
    theirs.close()
    assert peer.protocol.close_rcvd is not None
    assert peer.protocol.close_rcvd.code == 1009
    assert done.result(10) == []


def test_a_client_that_pings_and_never_reads_is_left_before_it_fills_the_memory(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wsgi_websocket, "_MOST_UNREAD", 100_000)
    ours, theirs = pair
    peer = Peer(theirs)
    done = loop_thread.submit(echo(ours, peer.headers))
    peer.next()
    peer.protocol.send_ping(b"x" * 125)
    (ping,) = peer.protocol.data_to_send()
    theirs.settimeout(0.5)
    with pytest.raises(TimeoutError):  # nobody reads any more; the server has not closed its own end yet
        theirs.sendall(ping * 1_000_000)
    assert done.result(10) == []


def test_what_a_server_has_of_the_connection_is_left_open(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    done = loop_thread.submit(echo(ours, Peer(theirs).headers))
    theirs.close()
    done.result(10)
    assert ours.fileno() >= 0


@pytest.mark.parametrize(
    "changes",
    [
        {"upgrade": "h2c"},
        {"upgrade": None},
        {"connection": "close"},
        {"sec-websocket-version": "8"},
        {"sec-websocket-key": None},
        {"sec-websocket-key": "short"},
        {"sec-websocket-key": "x" * 100_000},
        {"sec-websocket-key": "\N{SNOWMAN}"},
    ],
    ids=lambda changes: "-".join(f"{name} {(value or '')[:10]!a}" for name, value in changes.items()),
)
def test_what_is_no_request_for_a_socket_is_refused_and_the_connection_left_alone(
    pair: tuple[socket.socket, socket.socket], changes: dict[str, str | None]
) -> None:
    ours, theirs = pair
    headers = {name: value for name, value in {**ASKED, **changes}.items() if value is not None}
    with pytest.raises(errors.InvalidRequest):
        loop_thread.call(echo, ours, headers)
    ours.sendall(b"HTTP/1.1 400 Bad Request")
    assert theirs.recv(100) == b"HTTP/1.1 400 Bad Request"
