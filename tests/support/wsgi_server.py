"""A WSGI app that contains only the kit, on common servers.

Usage: `python -m tests.support.wsgi_server waitress FOLDER`.

Prints its address on one line. The states of responses are written to files in FOLDER, because workers may be
replaced. The metadata of a response name its run.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import anyio

from responses_kit import Backend, Limits, ResponsesKit, Timeouts, Turn, errors
from responses_kit._concurrency import loop_thread
from responses_kit.adapters.wsgi import handle_request
from responses_kit.http.open_responses import OpenResponses

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

THREADS = 32
WAIT = 30.0


class Notes:
    """The server's notes for the tests, and the gates that tests open, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def take(self, run: str, kind: str, **fields: Any) -> None:
        with self._lock, (self.folder / f"{run} {kind}").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def found(self, run: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / f"{run} {kind}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def open(self, run: str, gate: str) -> None:
        (self.folder / f"{run} gate {gate}").touch()

    def is_open(self, run: str, gate: str) -> bool:
        return (self.folder / f"{run} gate {gate}").exists()


class Voices(Backend):
    """A backend whose models define its behaviour, each on the event loop and in a thread.

    `brief` yields its text; `paced` yields it word by word and waits for the gates "1", "2", … after each; `silent`
    yields nothing after its first word until the gate "end" opens; `talking` yields words until then.
    """

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        names = ("brief", "paced", "silent", "talking")
        self.models = [*names, *(f"{name}-plain" for name in names)]

    def generate(self, turn: Turn) -> Any:
        return self._plain(turn) if turn.model.endswith("-plain") else self._on_loop(turn)

    async def _on_loop(self, turn: Turn) -> AsyncIterator[str]:
        try:
            for step in self._steps(turn):
                if isinstance(step, str):
                    yield step
                else:
                    await anyio.sleep(0.005)
        finally:
            self.notes.take(turn.metadata["run"], "stopped")

    def _plain(self, turn: Turn) -> Iterator[str]:
        try:
            for step in self._steps(turn):
                if turn.cancelled:
                    return
                if isinstance(step, str):
                    yield step
                else:
                    time.sleep(0.005)
        finally:
            self.notes.take(turn.metadata["run"], "stopped")

    def _steps(self, turn: Turn) -> Iterator[str | None]:
        voice = turn.model.removesuffix("-plain")
        run = turn.metadata["run"]
        self.notes.take(run, "started", text=turn.text, owner=turn.owner)
        if voice == "brief":
            yield turn.text
        for number, word in enumerate(turn.text.split() if voice == "paced" else (), 1):
            yield word
            yield from self._until(run, str(number))
        if voice in ("silent", "talking"):
            yield "on "
            for _ in self._until(run, "end"):
                yield "and on " if voice == "talking" else None
                yield None

    def _until(self, run: str, gate: str) -> Iterator[None]:
        until = time.monotonic() + WAIT
        while not self.notes.is_open(run, gate) and time.monotonic() < until:
            yield None


class HostError(Exception):
    """An exception of the host."""


def make(folder: Path, *, asynchronous: bool = False, **settings: Any) -> tuple[App, ResponsesKit]:
    """The app and its kit; the header `X-User` names the owner, and `X-Run` names the run for the owner hook."""
    notes = Notes(folder)

    def owner(environ: Mapping[str, Any]) -> str | None:
        user = environ.get("HTTP_X_USER")
        notes.take(environ.get("HTTP_X_RUN", ""), "hook", own=threading.get_ident() == environ["test.thread"])
        if user == "crash":
            raise LookupError("the password is hunter2")
        if user == "forbidden":
            raise HostError
        if user == "busy":
            raise errors.TooManyRequests("Later.", retry_after=7)
        if user == "exit":
            raise SystemExit(3)
        return user or None

    async def async_owner(environ: Mapping[str, Any]) -> str | None:
        await anyio.lowlevel.checkpoint()
        return owner(environ)

    def ended(owner: str, response: dict[str, Any]) -> None:
        notes.take(response["metadata"]["run"], "ended", owner=owner, status=response["status"])

    def refusal(error: Exception) -> errors.APIError | None:
        return errors.Forbidden("The host denies access.") if isinstance(error, HostError) else None

    kit = ResponsesKit(
        Voices(notes),
        owner=async_owner if asynchronous else owner,
        on_response_end=ended,
        **{"timeouts": Timeouts(keep_alive=0.2), "limits": Limits(max_body_bytes=100_000), **settings},
    )

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["test.thread"] = threading.get_ident()
        path = environ["PATH_INFO"]
        if not path.startswith("/v1/"):
            body = json.dumps({"threads": threading.active_count()}).encode()
            start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
            return [body]
        answer = handle_request(
            OpenResponses(kit), environ, path=path.removeprefix("/v1"), host_request=environ, translate_error=refusal
        )
        phrase = HTTPStatus(answer.status).phrase if answer.status in {*HTTPStatus} else "Client Closed Request"
        headers = list(answer.headers.items())
        if answer.stream is None:
            headers.append(("Content-Length", str(len(answer.body))))
        start_response(f"{answer.status} {phrase}", headers)
        return [answer.body] if answer.stream is None else answer.stream

    return app, kit


# The servers.


class _Threads(socketserver.ThreadingMixIn, WSGIServer):
    request_queue_size = 128
    daemon_threads = True


def _wsgiref(app: App, listener: socket.socket) -> None:
    with make_server("127.0.0.1", 0, app, _Threads, WSGIRequestHandler) as server:
        server.socket.close()
        server.socket = listener
        server.serve_forever()


def _werkzeug(app: App, listener: socket.socket) -> None:
    from werkzeug.serving import make_server as make_werkzeug

    make_werkzeug("127.0.0.1", 0, app, threaded=True, fd=listener.fileno()).serve_forever()


def _waitress(app: App, listener: socket.socket, **settings: Any) -> None:
    import waitress

    waitress.serve(app, sockets=[listener], threads=THREADS, **settings)


def _looking_ahead(app: App, listener: socket.socket) -> None:
    _waitress(app, listener, channel_request_lookahead=5)


def _gunicorn(folder: Path, descriptor: int, **settings: Any) -> None:
    from gunicorn.app.base import BaseApplication

    class Server(BaseApplication):  # type: ignore[misc]  # it has no types
        def load_config(self) -> None:
            everyday = {
                "bind": f"fd://{descriptor}",
                "threads": THREADS,
                "loglevel": "warning",
                "graceful_timeout": 20,
                "control_socket_disable": True,
            }
            for name, value in (everyday | settings).items():
                self.cfg.set(name, value)

        def load(self) -> App:
            app, kit = make(folder)
            loop_thread.handle_sigterm()
            if self.cfg.settings["preload_app"].get():
                return app
            loop_thread.start_kit(kit, grace=1.0)
            return app

    Server().run()


SERVERS: dict[str, Callable[[App, socket.socket], None]] = {
    "wsgiref": _wsgiref,
    "werkzeug": _werkzeug,
    "waitress": _waitress,
    "waitress looking ahead": _looking_ahead,
}

GUNICORNS: dict[str, dict[str, Any]] = {
    "gunicorn gthread": {"worker_class": "gthread"},
    "gunicorn sync": {"worker_class": "sync", "threads": 1},
    "gunicorn sync, impatient": {"worker_class": "sync", "threads": 1, "timeout": 1},
    "gunicorn gthread, preloaded": {"worker_class": "gthread", "preload_app": True, "workers": 2},
    "gunicorn gthread, once": {"worker_class": "gthread", "max_requests": 1, "graceful_timeout": 1},
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    if name in GUNICORNS:
        _gunicorn(folder, listener.detach(), **GUNICORNS[name])
        return
    app, kit = make(folder, asynchronous="asynchronous" in sys.argv)
    loop_thread.start_kit(kit, grace=1.0)
    with listener:
        SERVERS[name](app, listener)


if __name__ == "__main__":
    main()
