"""An app that counts its open views and contexts, on gunicorn or waitress.

Usage: `python -m tests.integrations.flask.disconnect_site waitress`. It prints its port as one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flask import Flask, g, jsonify, request

from responses_kit import Backend, ResponsesKit, Timeouts, Turn
from responses_kit_flask import Responses

THREADS = 24
MAX_DURATION = 20.0
"""Seconds after which views end without a disconnect."""

counts: Counter[str] = Counter()
_lock = threading.Lock()


def count(what: str) -> None:
    with _lock:
        counts[what] += 1


@contextmanager
def counted_view() -> Iterator[None]:
    """Count an open view, and check that it is closed in the request's context."""
    count("views opened")
    try:
        yield
    finally:
        count("views closed")
        if g.number != id(request.environ):
            count("views closed elsewhere")


class WordBackend(Backend):
    models = ("talker",)

    def generate(self, turn: Turn) -> Iterator[str]:
        count("views opened")
        try:
            yield from _words(turn)
        finally:
            count("views closed")


def _words(turn: Turn) -> Iterator[str]:
    until = time.monotonic() + MAX_DURATION
    while time.monotonic() < until and not turn.cancelled:
        yield f"{turn.text} "
        time.sleep(0.002)


def create_app() -> Flask:
    app = Flask(__name__)
    responses = Responses(app, ResponsesKit(WordBackend(), timeouts=Timeouts(keep_alive=0.2)))

    @app.before_request
    def begin() -> None:
        if request.path != "/counts":
            count("contexts pushed")
            g.number, g.thread = id(request.environ), threading.get_ident()

    @app.teardown_appcontext
    def end(error: BaseException | None) -> None:
        if "number" in g:  # a request's context, not a backend's
            count("contexts popped")
            if g.thread != threading.get_ident():
                count("contexts popped elsewhere")

    @app.post("/plain")
    @responses.endpoint
    def plain(turn: Turn) -> Iterator[str]:
        with counted_view():
            yield from _words(turn)

    @app.post("/silent")
    @responses.endpoint
    def silent(turn: Turn) -> Iterator[str]:
        with counted_view():
            yield turn.text
            until = time.monotonic() + MAX_DURATION
            while time.monotonic() < until and not turn.cancelled:
                time.sleep(0.01)
            yield "unread"

    @app.post("/async")
    @responses.endpoint
    async def on_loop(turn: Turn) -> AsyncIterator[str]:
        with counted_view():
            while True:
                yield f"{turn.text} "
                await asyncio.sleep(0.002)

    @app.get("/counts")
    def get_counts() -> Any:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if sys.platform == "linux" else 0
        threads = sorted(thread.name.split("-")[0].split(" ")[0] for thread in threading.enumerate())
        return jsonify({**counts, "threads": threads, "bytes": resident})

    return app


def _gunicorn(descriptor: int) -> None:
    from gunicorn.app.base import BaseApplication

    class Server(BaseApplication):  # type: ignore[misc]  # it has no types
        def load_config(self) -> None:
            settings = {"bind": f"fd://{descriptor}", "worker_class": "gthread", "threads": THREADS}
            quiet = {"loglevel": "error", "control_socket_disable": True}
            for name, value in {**settings, **quiet}.items():
                if name in self.cfg.settings:  # older versions have no control socket
                    self.cfg.set(name, value)

        def load(self) -> Flask:
            return create_app()

    Server().run()


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    if sys.argv[1] == "gunicorn":
        _gunicorn(listener.detach())
        return
    import waitress

    settings = {"channel_request_lookahead": 5, "outbuf_high_watermark": 65536}
    waitress.serve(create_app(), sockets=[listener], threads=THREADS, **settings)


if __name__ == "__main__":
    main()
