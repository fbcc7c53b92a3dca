"""Clients that leave at random moments leave nothing open behind."""

from __future__ import annotations

import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from ...support.servers import ROOT

pytestmark = pytest.mark.timeout(120)

CLIENTS = 200
AT_ONCE = 24
BOUND = 20.0
PATHS = ["/plain", "/silent", "/async", "/v1/responses"]


@pytest.fixture(params=["gunicorn", "waitress"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.flask.leaving_site", request.param],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["port"]
    finally:
        process.terminate()
        process.communicate(timeout=BOUND)


def test_whatever_clients_left_is_closed_and_given_back(port: int) -> None:
    chance = random.Random(2026)  # the same moments in each run
    come_and_go(port, chance, CLIENTS)  # what is made once, and kept, such as threads of pools, is made now
    before = settled(port)
    come_and_go(port, chance, CLIENTS)
    after = settled(port)

    assert after["contexts pushed"] - before["contexts pushed"] > CLIENTS / 4  # others left before they had asked
    assert after["views opened"] - before["views opened"] > CLIENTS / 8
    assert "views closed elsewhere" not in after
    assert "contexts popped elsewhere" not in after
    assert len(after["threads"]) <= len(before["threads"]) + 2  # of the pools, which are not full yet
    assert after["bytes"] - before["bytes"] < 16 * 1024 * 1024


def come_and_go(port: int, chance: random.Random, clients: int) -> None:
    plans = [
        (chance.choice(PATHS), chance.choice([True, True, False]), chance.random(), chance.choice([True, False]))
        for _ in range(clients)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda plan: leave(port, *plan), plans))


def leave(port: int, path: str, streamed: bool, moment: float, reset: bool) -> None:
    """Comes, and leaves: in the middle of asking, at once after it, or in the middle of the answer.

    Args:
        port: Where the server is.
        path: What is asked.
        streamed: Whether for a stream.
        moment: From 0, when it has not asked yet, to 1, when it has read some of the answer.
        reset: Whether the connection breaks, and is not closed.
    """
    body = json.dumps({"input": "a word or two", "stream": streamed}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = head.encode() + b"\r\n\r\n" + body
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND) as client, suppress(ConnectionError):
        client.sendall(request[: round(len(request) * min(1.0, 4 * moment))])
        wanted = round(8000 * (moment - 0.5)) if streamed else 0
        while wanted > 0 and (piece := received(client, 3.0)):
            wanted -= len(piece)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def received(client: socket.socket, within: float) -> bytes:
    client.settimeout(within)
    try:
        return client.recv(4096)
    except TimeoutError:  # of a view that has fallen silent
        return b""


def settled(port: int) -> dict[str, Any]:
    """The counts, once nothing is open any more."""
    until = time.monotonic() + BOUND
    while True:
        counts: dict[str, Any] = httpx.get(f"http://127.0.0.1:{port}/counts", timeout=BOUND).json()
        still = [
            what
            for what, opened, closed in (
                ("views", "views opened", "views closed"),
                ("contexts", "contexts pushed", "contexts popped"),
            )
            if counts.get(opened, 0) != counts.get(closed, 0)
        ]
        if not still:
            return counts
        assert time.monotonic() < until, f"{still} are still open: {counts}"
