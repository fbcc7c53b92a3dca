"""Runs one host's server: `python -m tests.contract.serve "Starlette mount" loop`.

A process for each: frameworks keep settings for a whole process, a server that hangs must not take the tests
with it, and client and server then share no lock. Says on one line where it listens, and goes when its
standard input ends, so that no server outlives a killed test run.
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
from .puppet import Strings, serve_control

Make = Callable[[int], Any]
"""Makes the app, and says that it can be reached at this port."""

UNREAD = 64 * 1024
"""Bytes that the operating system keeps for a client that does not read, few so that it is soon felt."""

THREADS = 64
"""More than the clients of any test at once: under WSGI each of them has a thread of its own until it is answered."""


def _uvicorn(make: Make) -> None:
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
    listener.bind(("127.0.0.1", 0))
    # From here on connections queue; whoever reads where it is may connect at once.
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
                "limit_request_line": 8190,  # of paths as long as other servers take them
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
            listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
            self.port = listener.getsockname()[1]

        def load(self) -> Any:
            """Called in the worker: kit, strings and side channel are in the process that serves."""
            return make(self.port)

    Server().run()


def _waitress(make: Make) -> None:
    import waitress

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    app = make(listener.getsockname()[1])
    # Looking ahead it reads on while a request is answered, and so hears of a client that leaves.
    settings = {"channel_request_lookahead": 5, "outbuf_high_watermark": UNREAD}
    waitress.serve(app, sockets=[listener], threads=THREADS, **settings)


SERVERS = {"uvicorn": _uvicorn, "gunicorn": _gunicorn, "waitress": _waitress}


def _leave_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(10)
    os._exit(1)


def main() -> None:
    name, setting = sys.argv[1:]
    host = HOSTS[name]

    def make(port: int) -> Any:
        strings = Strings()
        app = host.app(build_kit(strings, setting, **host.settings(strings)))
        print(json.dumps({"port": port, "control": serve_control(strings)}), flush=True)
        return app

    threading.Thread(target=_leave_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which servers repeat when they end, before the place does
    with host.place():
        SERVERS[host.server](make)


if __name__ == "__main__":
    main()
