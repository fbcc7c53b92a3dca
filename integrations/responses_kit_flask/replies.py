"""What the views answer with."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

from flask import Response, request
from flask.globals import app_ctx, request_ctx
from werkzeug.exceptions import HTTPException

from responses_kit import wsgi
from responses_kit.errors import APIError, refusal
from responses_kit.exchange import Exchange
from responses_kit.http import error_reply
from responses_kit.kit import ResponsesKit

__all__ = ["Answered", "answer", "converse", "refused", "shown"]


class Answered(Response):
    """An answer of the API's own."""


class EventStream(Answered):
    """Server-sent events, made in the contexts of the request, which are popped when they end.

    Args:
        pieces: What is sent, piece by piece.
        status: The reply's.
        headers: The reply's.
    """

    def __init__(self, pieces: Exchange, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, status, dict(headers))
        weakref.finalize(self, pieces.drop).atexit = False  # the app may answer something else

    def __call__(self, environ: Any, start_response: Any) -> _Held:
        """Begins to send (WSGI). Only here it is sure to be sent, so only here the contexts are held."""
        with ExitStack() as contexts:
            contexts.enter_context(app_ctx._get_current_object())  # type: ignore[attr-defined]  # of a proxy
            contexts.enter_context(request_ctx._get_current_object())  # type: ignore[attr-defined]
            return _Held(super().__call__(environ, start_response), contexts.pop_all())


class _Held:
    """The body of a stream, and the contexts that it is made in."""

    def __init__(self, body: Any, contexts: ExitStack) -> None:
        self._body, self._contexts = body, contexts
        self._pieces: Iterator[bytes] = iter(body)

    def __iter__(self) -> _Held:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._pieces)
        except StopIteration:
            self.close()
            raise

    def close(self) -> None:
        with self._contexts.pop_all():
            self._body.close()


class _UsedUp(Answered):
    """The end of a request whose connection has become something else."""

    def __call__(self, environ: Any, start_response: Any) -> NoReturn:
        raise wsgi.used_up()


def answer(kit: ResponsesKit, path: str) -> Response:
    """Has a kit answer the request, as one for this path below the prefix."""
    asked: Any = request._get_current_object()  # type: ignore[attr-defined]  # of a proxy
    found = wsgi.respond(
        kit,
        asked.environ,
        path=path,
        host=asked,
        refusal=refused,
        read=lambda size: asked.stream.read(size),  # which may raise, so that it is looked at there
        kept=asked.get_data,
    )
    if found.pieces is None:
        return Answered(found.body, found.status, dict(found.headers))
    return EventStream(found.pieces, found.status, found.headers)


def converse(kit: ResponsesKit) -> Response:
    """Has a kit serve a WebSocket, as long as it lasts."""
    asked: Any = request._get_current_object()  # type: ignore[attr-defined]  # of a proxy
    found = wsgi.converse(kit, asked.environ, host=asked, refusal=refused)
    return _UsedUp() if found is None else Answered(found.body, found.status, dict(found.headers))


def shown(error: APIError) -> Response:
    """An error in the specification's shape."""
    reply = error_reply(error)
    return Answered(reply.body, reply.status, dict(reply.headers))


def refused(error: Exception) -> APIError | None:
    """What an exception of Flask's means on the wire; None if it is none of those."""
    return refusal(error.code or 500, error.description or error.name) if isinstance(error, HTTPException) else None
