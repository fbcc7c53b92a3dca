"""What the views answer with."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from threading import get_ident
from typing import Any, Final, NoReturn

from flask import Response, request
from flask.globals import app_ctx, request_ctx
from werkzeug.exceptions import HTTPException

from responses_kit.adapters import wsgi
from responses_kit.adapters.wsgi_bridge import WSGIBridge
from responses_kit.errors import APIError, error_for_status
from responses_kit.http.messages import Reply
from responses_kit.http.router import WireProtocol
from responses_kit.kit import ResponsesKit

__all__ = ["Answered", "answer", "converse", "end_unsent", "refused", "shown"]


_STREAM: Final = "responses_kit.stream"
"""Where a request's environment has, weakly, the stream that is its answer."""


_KEPT: Final = ("Allow", "Retry-After", "WWW-Authenticate")
"""Headers of a refusal that clients go by."""


class Answered(Response):
    """An answer of the API's own."""


class _Pieces:
    """A stream's pieces, and the contexts of the request, which are held from its sending to its end."""

    def __init__(self, pieces: WSGIBridge) -> None:
        self._pieces = pieces
        self._held = ExitStack()
        self._thread = get_ident()

    def __del__(self) -> None:
        # The app has answered something else, or what it has wrapped it in does not close it.
        if self._thread == get_ident():
            self.close()
        else:
            self._pieces.drop()

    def hold(self) -> None:
        contexts: Any = (app_ctx, request_ctx)  # proxies, whose types don't say so
        for context in contexts:
            self._held.enter_context(context._get_current_object())

    def __iter__(self) -> _Pieces:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._pieces)
        except StopIteration:
            self.close()
            raise

    def close(self) -> None:
        with self._held.pop_all():
            self._pieces.close()


class _EventStream(Answered):
    def __init__(self, pieces: _Pieces, *args: Any) -> None:
        super().__init__(pieces, *args)
        self._pieces = weakref.ref(pieces)

    def __call__(self, environ: Any, start_response: Any) -> Any:
        # Nobody answers anything else any more; and Flask has not left the contexts, so that nothing is torn down.
        if (pieces := self._pieces()) is None:  # the app has read them
            return super().__call__(environ, start_response)
        try:
            pieces.hold()
            return super().__call__(environ, start_response)
        except BaseException:
            pieces.close()
            raise


def end_unsent(error: BaseException | None) -> None:
    """Ends the stream of a request that has failed after its view; to be called when it is torn down."""
    unsent = request.environ.get(_STREAM, lambda: None)()
    if error is not None and unsent is not None:
        unsent.close()


class _UsedUp(Answered):
    """The end of a request whose connection has become something else."""

    def __call__(self, environ: Any, start_response: Any) -> NoReturn:
        raise wsgi.connection_taken_over()


def answer(dialect: WireProtocol, path: str) -> Response:
    """Answers the request, as one for this path below the prefix."""
    asked: Any = request._get_current_object()  # type: ignore[attr-defined]  # of a proxy
    found = wsgi.handle_request(
        dialect,
        asked.environ,
        path=path,
        host=asked,
        refusal=refused,
        read=lambda size: asked.stream.read(size),  # which may raise, so that it is looked at there
        kept=asked.get_data,
    )
    if found.pieces is None:
        return _plain(found)
    pieces = _Pieces(found.pieces)
    asked.environ[_STREAM] = weakref.ref(pieces)
    return _EventStream(pieces, found.status, dict(found.headers))


def converse(kit: ResponsesKit) -> Response:
    """Has a kit serve a WebSocket, as long as it lasts."""
    asked: Any = request._get_current_object()  # type: ignore[attr-defined]  # of a proxy
    found = wsgi.serve_websocket(kit, asked.environ, host=asked, refusal=refused)
    return _UsedUp() if found is None else _plain(found)


def shown(error: APIError, dialect: type[WireProtocol]) -> Response:
    """An error in the dialect's shape."""
    return _plain(dialect.render_error(error))


def _plain(reply: Reply | wsgi.WSGIReply) -> Response:
    return Answered(reply.body, reply.status, dict(reply.headers))


def refused(error: Exception) -> APIError | None:
    """What an exception of Flask's means on the wire; None if it is none of those."""
    if not isinstance(error, HTTPException):
        return None
    response = error.get_response()
    message = error.description or f"The request was refused: {response.status}"
    found = error_for_status(response.status_code if response.status_code >= 400 else 401, message)
    kept = {name: value for name, value in response.headers.items() if name in _KEPT}
    found.headers = {**found.headers, **kept}
    return found
