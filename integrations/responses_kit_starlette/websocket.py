"""WebSocket mode in ASGI: the upgrade is refused or accepted, and the session's frames go to and fro."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import anyio
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from responses_kit.errors import APIError, ClientGone, NotFound
from responses_kit.http import error_reply
from responses_kit.kit import ResponsesKit
from responses_kit.websocket import admit, serve

__all__ = ["converse", "is_socket_path"]


def is_socket_path(path: str) -> bool:
    """Whether sockets are served there; paths are below the prefix."""
    return path.strip("/") == "responses"


async def converse(
    kit: ResponsesKit,
    path: str,
    scope: Scope,
    receive: Receive,
    send: Send,
    refusal: Callable[[Exception], APIError | None],
) -> None:
    """Serves one WebSocket connection.

    Args:
        kit: Answers the requests.
        path: Below the prefix.
        scope: The connection's.
        receive: The connection's.
        send: The connection's.
        refusal: As in `http.Request`.
    """

    async def next_frame() -> str | bytes:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send_frame(text: str) -> None:
        try:
            await send({"type": "websocket.send", "text": text})
        except RuntimeError as error:  # what servers raise where they have closed the socket by themselves
            raise ClientGone from error

    if (await receive())["type"] != "websocket.connect":
        return
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    if sum(name.lower() == b"origin" for name, _ in scope["headers"]) > 1:
        headers["origin"] = "null"  # no browser sends two: somebody added one
    with suppress(OSError):  # the client may leave at any time
        try:
            if not is_socket_path(path):
                raise NotFound("There is no such path in this API.")
            owner = await admit(kit, HTTPConnection(scope), headers, refusal=refusal)
        except APIError as error:
            await _deny(scope, send, error)
            return
        await send({"type": "websocket.accept"})
        code = await serve(kit, owner, receive=next_frame, send=send_frame)
        if code is not None:
            with anyio.move_on_after(kit.patience):
                await send({"type": "websocket.close", "code": code})


async def _deny(scope: Scope, send: Send, error: APIError) -> None:
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        close: Message = {"type": "websocket.close"}  # which servers turn into a bare 403
        await send(close)
        return
    reply = error_reply(error)
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
    headers.append((b"content-length", b"%d" % len(reply.body)))
    await send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": reply.body})
