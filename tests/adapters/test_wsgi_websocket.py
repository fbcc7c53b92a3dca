"""Tests of WebSockets over the sockets of WSGI servers."""

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
from responses_kit.adapters.wsgi_websocket import WebSocket, upgrade

pytestmark = pytest.mark.timeout(30)

HANDSHAKE = {
    "connection": "keep-alive, Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
}


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    server_socket, client_socket = socket.socketpair()
    with server_socket, client_socket:
        client_socket.settimeout(5)
        yield server_socket, client_socket


class Peer:
    """A client; its upgrade request is already read by the server."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.protocol = ClientProtocol(parse_uri("ws://here/v1/responses"))
        self.request = self.protocol.connect()
        self.protocol.send_request(self.request)
        self.protocol.data_to_send()  # already read by the server

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
    """Send each frame back twice, until the client leaves or sends "end"."""
    websocket: WebSocket = await upgrade(connection, headers, limit=1000)
    received: list[str | bytes] = []
    try:
        with anyio.fail_after(10):
            while (frame := await websocket.receive()) != "end":
                received.append(frame)
                await websocket.send(f"{frame!r}, {frame!r}")
        await websocket.close(1001)
    except errors.ClientDisconnected:
        await websocket.close(None)
    return received


def test_websocket_exchanges_frames_and_closes_with_a_code(sockets: tuple[socket.socket, socket.socket]) -> None:
    server_socket, client_socket = sockets
    peer = Peer(client_socket)
    done = loop_thread.submit(echo(server_socket, peer.headers))
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


def test_close_frame_is_disconnect(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    server_socket, client_socket = sockets
    peer = Peer(client_socket)
    done = loop_thread.submit(echo(server_socket, peer.headers))
    peer.next()
    peer.protocol.send_close(1000)
    peer.send()
    assert done.result(5) == []


def test_broken_connection_is_disconnect(sockets: tuple[socket.socket, socket.socket]) -> None:
    server_socket, client_socket = sockets
    peer = Peer(client_socket)
    done = loop_thread.submit(echo(server_socket, peer.headers))
    peer.next()
    client_socket.close()
    assert done.result(5) == []


def test_oversize_message_closes_websocket(sockets: tuple[socket.socket, socket.socket]) -> None:
    server_socket, client_socket = sockets
    peer = Peer(client_socket)
    done = loop_thread.submit(echo(server_socket, peer.headers))
    peer.next()
    peer.protocol.send_text(b"x" * 1001)
    peer.send()
    peer.next()
    client_socket.close()
    assert peer.protocol.close_rcvd is not None
    assert peer.protocol.close_rcvd.code == 1009
    assert done.result(10) == []


def test_unread_pongs_are_bounded(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wsgi_websocket, "_MAX_UNREAD_BYTES", 100_000)
    server_socket, client_socket = sockets
    peer = Peer(client_socket)
    done = loop_thread.submit(echo(server_socket, peer.headers))
    peer.next()
    peer.protocol.send_ping(b"x" * 125)
    (ping,) = peer.protocol.data_to_send()
    client_socket.settimeout(0.5)
    with pytest.raises(TimeoutError):  # the server does not read any more, but its socket is open
        client_socket.sendall(ping * 1_000_000)
    assert done.result(10) == []


def test_server_socket_is_left_open(sockets: tuple[socket.socket, socket.socket]) -> None:
    server_socket, client_socket = sockets
    done = loop_thread.submit(echo(server_socket, Peer(client_socket).headers))
    client_socket.close()
    done.result(10)
    assert server_socket.fileno() >= 0


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
def test_invalid_upgrade_is_refused(
    sockets: tuple[socket.socket, socket.socket], changes: dict[str, str | None]
) -> None:
    server_socket, client_socket = sockets
    headers = {name: value for name, value in {**HANDSHAKE, **changes}.items() if value is not None}
    with pytest.raises(errors.InvalidRequest):
        loop_thread.call(echo, server_socket, headers)
    server_socket.sendall(b"HTTP/1.1 400 Bad Request")
    assert client_socket.recv(100) == b"HTTP/1.1 400 Bad Request"
