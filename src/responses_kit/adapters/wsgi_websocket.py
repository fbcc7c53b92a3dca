"""A WebSocket over a connection that a synchronous server gives away, on this process's event loop."""

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

__all__ = ["Socket", "upgrade"]

_LOOKED_AT: Final = ("connection", "upgrade", "sec-websocket-key", "sec-websocket-version")
"""Headers that say what is asked for."""

_MOST_UNREAD: Final = 1024 * 1024
"""Bytes that may wait for a client, beside what is sent only when it reads."""

_CLOSING_SECONDS: Final = 2.0
"""How long a client has to answer that it is closed. A server that ends waits for it."""


class Socket:
    """An open WebSocket, as `websocket.serve` needs it.

    Args:
        connection: Does the protocol.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def receive(self) -> str | bytes:
        """The next frame.

        Raises:
            ClientGone: There will be none.
        """
        try:
            return await self._connection.recv()
        except ConnectionClosed:
            raise ClientDisconnected from None

    async def send(self, text: str) -> None:
        """Sends a text frame.

        Raises:
            ClientGone: The client has left.
        """
        try:
            await self._connection.send(text)
        except ConnectionClosed:
            raise ClientDisconnected from None

    async def close(self, code: int | None) -> None:
        """Closes it, with this code where the client is still there. Returns when that is done."""
        await self._connection.close(code or 1000)


class _Upgraded(Connection):
    """A connection whose opening handshake is over but for the server's answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.writelines(self.protocol.data_to_send())
        self.start_keepalive()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_write_buffer_size() > _MOST_UNREAD:
            self.transport.abort()  # pings are answered whether or not the answers are read
        elif self.protocol.close_rcvd is not None:
            self.transport.close()  # after what was answered; a client need not do it by itself


async def upgrade(connection: socket.socket, headers: Mapping[str, str], *, limit: int) -> Socket:
    """Accepts the upgrade to a WebSocket.

    Args:
        connection: The client's. The server may close it, once the WebSocket is closed, as it does with any other.
        headers: The request's, names in lower case.
        limit: Most bytes of a message.

    Raises:
        InvalidRequest: The request does not ask for it as the protocol wants.
    """
    protocol = ServerProtocol(max_size=limit)
    # The server has read the request, so that the protocol is told of it.
    asked = "".join(f"{name}: {headers[name]}\r\n" for name in _LOOKED_AT if name in headers)
    protocol.receive_data(f"GET / HTTP/1.1\r\nhost: here\r\n{asked}\r\n".encode("latin-1", "replace"))
    request = next(iter(protocol.events_received()), None)
    answer = protocol.accept(request) if isinstance(request, Request) else None
    if answer is None or answer.status_code != 101:
        raise InvalidRequest("No WebSocket can be made of this request.", code="invalid_upgrade")
    protocol.send_response(answer)
    _, opened = await asyncio.get_running_loop().create_connection(
        lambda: _Upgraded(protocol, close_timeout=_CLOSING_SECONDS), sock=connection.dup()
    )
    return Socket(opened)
