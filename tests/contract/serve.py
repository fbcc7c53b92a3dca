"""Runs one host's server: `python -m tests.contract.serve "Starlette mount" loop`.

A process for each: frameworks keep settings for a whole process, a server that hangs must not take the tests
with it, and client and server then share no lock. Says on one line where it listens, and goes when its
standard input ends, so that no server outlives a killed test run.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

from .hosts import HOSTS, build_kit
from .puppet import Strings, serve_control


def _uvicorn(app: Any, listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, ws="websockets-sansio")
    uvicorn.Server(config).run(sockets=[listener])


SERVERS = {"uvicorn": _uvicorn}


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    name, setting = sys.argv[1:]
    host, strings = HOSTS[name], Strings()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    # From here on connections queue; whoever reads the line below may connect at once.
    listener.listen(256)
    app = host.app(build_kit(strings, setting))
    print(json.dumps({"port": listener.getsockname()[1], "control": serve_control(strings)}), flush=True)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    SERVERS[host.server](app, listener)


if __name__ == "__main__":
    main()
