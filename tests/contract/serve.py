"""Run one host's server: `python -m tests.contract.serve "Starlette mount" loop`.

Each server has its own process, because frameworks have process-wide settings, a hanging server must not stop the
tests, and client and server must not share the GIL. The server prints its ports as one line of JSON. It exits when its
standard input ends, so that it does not outlive a killed test run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from .hosts import HOSTS, build_kit
from .scripted import Control, serve_control

Make = Callable[[int], Any]
"""Creates the app and prints the given port."""

SEND_BUFFER_BYTES = 64 * 1024
"""Bytes that the operating system buffers for a client that does not read; few, so that backpressure starts soon."""

THREADS = 64
"""More than the concurrent clients of any test, since every request occupies a thread under WSGI."""


def _uvicorn(make: Make) -> None:
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.bind(("127.0.0.1", 0))
    # From here on the socket accepts connections, so the port may be printed.
    listener.listen(256)
    app = make(listener.getsockname()[1])
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, ws="websockets-sansio")
    uvicorn.Server(config).run(sockets=[listener])


def _gunicorn(make: Make) -> None:
    from gunicorn.app.base import BaseApplication

    class Server(BaseApplication):  # type: ignore[misc]  # it has no types
        def load_config(self) -> None:
            settings = {
                "bind": "127.0.0.1:0",
                "worker_class": "gthread",
                "threads": THREADS,
                "limit_request_line": 8190,  # as long as on the other servers
                "loglevel": "warning",
                "graceful_timeout": 2,
                "control_socket_disable": True,
                "when_ready": self.listens,
            }
            for name, value in settings.items():
                if name in self.cfg.settings:  # older versions have no control socket
                    self.cfg.set(name, value)

        def listens(self, server: Any) -> None:
            (listener,) = server.LISTENERS
            listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self.port = listener.getsockname()[1]

        def load(self) -> Any:
            """Create the app in the worker, so that the control channel is in the serving process."""
            return make(self.port)

    Server().run()


def _waitress(make: Make) -> None:
    import waitress

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    app = make(listener.getsockname()[1])
    # With lookahead waitress reads during a request, and so detects disconnects.
    settings = {"channel_request_lookahead": 5, "outbuf_high_watermark": SEND_BUFFER_BYTES}
    waitress.serve(app, sockets=[listener], threads=THREADS, **settings)


SERVERS = {"uvicorn": _uvicorn, "gunicorn": _gunicorn, "waitress": _waitress}


def _exit_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(10)
    os._exit(1)


def main() -> None:
    name, setting = sys.argv[1:]
    host = HOSTS[name]

    def make(port: int) -> Any:
        control = Control()
        app = host.app(build_kit(control, setting, **host.settings(control)))
        print(json.dumps({"port": port, "control_port": serve_control(control)}), flush=True)
        return app

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # leave the block below after the server has stopped
    with host.environment():
        SERVERS[host.server](make)


if __name__ == "__main__":
    main()
