"""Request handling of the API's views, with replies as Flask responses."""

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

__all__ = [
    "APIResponse",
    "close_unsent_stream",
    "error_response",
    "handle_request",
    "serve_websocket",
    "translate_error",
]


_STREAM_KEY: Final = "responses_kit.stream"
"""The WSGI environment's key for a weak reference to the streamed body of the request's response."""

_FORWARDED_HEADERS: Final = ("Allow", "Retry-After", "WWW-Authenticate")
"""Headers of an HTTP error that clients act on."""


class APIResponse(Response):
    """A response that the API itself produced, so that no error handler rewrites it."""


class _StreamBody:
    """A streamed body that holds the request's contexts from the first byte to the last."""

    def __init__(self, pieces: WSGIBridge) -> None:
        self._pieces = pieces
        self._contexts = ExitStack()
        self._thread = get_ident()

    def __del__(self) -> None:
        # Reached if the app replaced the response, or if a wrapper around it does not call close() (PEP 3333).
        if self._thread == get_ident():
            self.close()
        else:
            self._pieces.cancel()

    def push_contexts(self) -> None:
        contexts: Any = (app_ctx, request_ctx)  # proxies, although their types do not show it
        for context in contexts:
            self._contexts.enter_context(context._get_current_object())

    def __iter__(self) -> _StreamBody:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._pieces)
        except StopIteration:
            self.close()
            raise

    def close(self) -> None:
        with self._contexts.pop_all():
            self._pieces.close()


class _StreamResponse(APIResponse):
    """A streamed response; sending it pushes the request's contexts again."""

    def __init__(self, pieces: _StreamBody, *args: Any) -> None:
        super().__init__(pieces, *args)
        self._body = weakref.ref(pieces)

    def __call__(self, environ: Any, start_response: Any) -> Any:
        # Flask calls the response after all hooks but before it pops the contexts: pushing them here delays teardown.
        if (pieces := self._body()) is None:  # the app has consumed the body
            return super().__call__(environ, start_response)
        try:
            pieces.push_contexts()
            return super().__call__(environ, start_response)
        except BaseException:
            pieces.close()
            raise


def close_unsent_stream(error: BaseException | None) -> None:
    """Close the stream of a request that failed after its view (teardown hook)."""
    unsent = request.environ.get(_STREAM_KEY, lambda: None)()
    if error is not None and unsent is not None:
        unsent.close()


class _ConnectionTakenOver(APIResponse):
    """The response to a request whose connection has served a WebSocket and is closed."""

    def __call__(self, environ: Any, start_response: Any) -> NoReturn:
        raise wsgi.connection_taken_over()


def handle_request(protocol: WireProtocol, path: str) -> Response:
    """Answer the current request.

    Args:
        protocol: Handles the request.
        path: The path below the prefix.
    """
    flask_request: Any = request._get_current_object()  # type: ignore[attr-defined]  # a proxy method
    reply = wsgi.handle_request(
        protocol,
        flask_request.environ,
        path=path,
        host_request=flask_request,
        translate_error=translate_error,
        read=lambda size: flask_request.stream.read(size),  # `stream` raises if the body is too large
        read_buffered=flask_request.get_data,
    )
    if reply.stream is None:
        return _build_response(reply)
    pieces = _StreamBody(reply.stream)
    flask_request.environ[_STREAM_KEY] = weakref.ref(pieces)
    return _StreamResponse(pieces, reply.status, dict(reply.headers))


def serve_websocket(kit: ResponsesKit) -> Response:
    """Serve a WebSocket on the current request's connection until it is closed."""
    flask_request: Any = request._get_current_object()  # type: ignore[attr-defined]  # a proxy method
    reply = wsgi.serve_websocket(
        kit, flask_request.environ, host_request=flask_request, translate_error=translate_error
    )
    return _ConnectionTakenOver() if reply is None else _build_response(reply)


def error_response(error: APIError, protocol: type[WireProtocol]) -> Response:
    """Return an error in the format of the wire protocol."""
    return _build_response(protocol.render_error(error))


def _build_response(reply: Reply | wsgi.WSGIReply) -> Response:
    return APIResponse(reply.body, reply.status, dict(reply.headers))


def translate_error(error: Exception) -> APIError | None:
    """Return an HTTP exception of Flask as an API error, any other as None."""
    if not isinstance(error, HTTPException):
        return None
    response = error.get_response()
    message = error.description or f"The request was refused: {response.status}"
    api_error = error_for_status(response.status_code if response.status_code >= 400 else 401, message)
    headers = {name: value for name, value in response.headers.items() if name in _FORWARDED_HEADERS}
    api_error.headers = {**api_error.headers, **headers}
    return api_error
