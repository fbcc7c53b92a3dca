"""WebSockets over the sockets of synchronous servers, on this process's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Final

from ..errors import ClientDisconnected, InvalidRequest

try:
    from websockets.asyncio.connection import Connection
    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Request
    from websockets.server import ServerProtocol
except ModuleNotFoundError as missing:
    raise ImportError('WebSockets under WSGI need websockets: pip install "responses-kit[flask]"') from missing

__all__ = ["WebSocket", "upgrade"]

_HANDSHAKE_HEADERS: Final = ("connection", "upgrade", "sec-websocket-key", "sec-websocket-version")
"""Headers of the opening handshake (RFC 6455, 4.2.1)."""

_MAX_UNREAD_BYTES: Final = 1024 * 1024
"""Bytes that may wait in the write buffer; beyond them the connection is aborted."""

_CLOSE_TIMEOUT: Final = 2.0
"""Seconds that the client has to reply to a close frame; the server's shutdown waits for it."""


class WebSocket:
    """An open WebSocket, with the functions that `serve_session` needs.

    Args:
        connection: The connection after its opening handshake.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def receive(self) -> str | bytes:
        """Return the next frame.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        try:
            return await self._connection.recv()
        except ConnectionClosed:
            raise ClientDisconnected from None

    async def send(self, text: str) -> None:
        """Send a text frame.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        try:
            await self._connection.send(text)
        except ConnectionClosed:
            raise ClientDisconnected from None

    async def close(self, code: int | None) -> None:
        """Close the connection, with this code if the client is still connected, and wait for it."""
        await self._connection.close(code or 1000)


class _UpgradedConnection(Connection):
    """A connection after its opening handshake, except that the server's response is yet to be sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.writelines(self.protocol.data_to_send())
        self.start_keepalive()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.transport.abort()  # pongs are buffered even if the client does not read
        elif self.protocol.close_rcvd is not None:
            self.transport.close()  # after the buffered data; RFC 6455, 7.1.1: the server closes


async def upgrade(connection: socket.socket, headers: Mapping[str, str], *, limit: int) -> WebSocket:
    """Accept the upgrade to a WebSocket.

    Args:
        connection: The client's socket. It is duplicated, so that the server can close its own.
        headers: The request's headers, with names in lower case.
        limit: Maximum size of a message in bytes.

    Raises:
        InvalidRequest: The request is not a valid opening handshake.
    """
    protocol = ServerProtocol(max_size=limit)
    # The server has already consumed the request, so that the protocol needs a reconstruction of it.
    handshake = "".join(f"{name}: {headers[name]}\r\n" for name in _HANDSHAKE_HEADERS if name in headers)
    protocol.receive_data(f"GET / HTTP/1.1\r\nhost: here\r\n{handshake}\r\n".encode("latin-1", "replace"))
    request = next(iter(protocol.events_received()), None)
    response = protocol.accept(request) if isinstance(request, Request) else None
    if response is None or response.status_code != 101:
        raise InvalidRequest("The WebSocket handshake is not valid.", code="invalid_upgrade")
    protocol.send_response(response)
    _, opened = await asyncio.get_running_loop().create_connection(
        lambda: _UpgradedConnection(protocol, close_timeout=_CLOSE_TIMEOUT), sock=connection.dup()
    )
    return WebSocket(opened)
