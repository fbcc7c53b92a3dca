"""Serve the fleet's kit on a free port and print it: `python -m tests.e2e.fleet.serve [celery]`."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from responses_kit_starlette import responses_routes

from .kit import new_kit


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    if sys.argv[1:] == ["celery"]:
        from .tasks import kit
    else:
        kit = new_kit()

    @asynccontextmanager
    async def lifespan(app: Any) -> Any:
        await kit.store.setup()  # type: ignore[attr-defined]  # a store of `open_store`
        async with kit.lifespan(grace=1.5):
            print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
            yield
        await kit.store.aclose()  # type: ignore[attr-defined]

    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    app = Starlette(routes=responses_routes(kit), lifespan=lifespan)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="websockets-sansio")).run(sockets=[listener])


if __name__ == "__main__":
    main()
