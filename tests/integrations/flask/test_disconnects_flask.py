"""Clients that disconnect at random moments, after which no resource may stay open."""

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
CONCURRENCY = 24
TIMEOUT = 20.0
PATHS = ["/plain", "/silent", "/async", "/v1/responses"]


@pytest.fixture(params=["gunicorn", "waitress"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.flask.disconnect_site", request.param],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["port"]
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT)


def test_disconnects_release_all_resources(port: int) -> None:
    chance = random.Random(2026)  # reproducible moments
    run_clients(port, chance, CLIENTS)  # creates what stays, such as pool threads
    before = wait_until_settled(port)
    run_clients(port, chance, CLIENTS)
    after = wait_until_settled(port)

    assert (
        after["contexts pushed"] - before["contexts pushed"] > CLIENTS / 4
    )  # the rest disconnected before the request was complete
    assert after["views opened"] - before["views opened"] > CLIENTS / 8
    assert "views closed elsewhere" not in after
    assert "contexts popped elsewhere" not in after
    assert len(after["threads"]) <= len(before["threads"]) + 2  # pools may still grow
    assert after["bytes"] - before["bytes"] < 16 * 1024 * 1024


def run_clients(port: int, chance: random.Random, clients: int) -> None:
    plans = [
        (chance.choice(PATHS), chance.choice([True, True, False]), chance.random(), chance.choice([True, False]))
        for _ in range(clients)
    ]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(lambda plan: request_and_disconnect(port, *plan), plans))


def request_and_disconnect(port: int, path: str, streamed: bool, moment: float, reset: bool) -> None:
    """Connect, and disconnect during the request, right after it, or during the reply.

    Args:
        port: The server's port.
        path: The path to request.
        streamed: Whether to request a stream.
        moment: The moment of the disconnect, from 0 (before the request) to 1 (during the reply).
        reset: Whether to reset the connection instead of closing it.
    """
    body = json.dumps({"input": "a word or two", "stream": streamed}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = head.encode() + b"\r\n\r\n" + body
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as client, suppress(ConnectionError):
        client.sendall(request[: round(len(request) * min(1.0, 4 * moment))])
        remaining = round(8000 * (moment - 0.5)) if streamed else 0
        while remaining > 0 and (piece := read_available(client, 3.0)):
            remaining -= len(piece)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read_available(client: socket.socket, within: float) -> bytes:
    client.settimeout(within)
    try:
        return client.recv(4096)
    except TimeoutError:  # the view has become silent
        return b""


def wait_until_settled(port: int) -> dict[str, Any]:
    """Wait until nothing is open, and return the counts."""
    until = time.monotonic() + TIMEOUT
    while True:
        counts: dict[str, Any] = httpx.get(f"http://127.0.0.1:{port}/counts", timeout=TIMEOUT).json()
        open_counts = [
            what
            for what, opened, closed in (
                ("views", "views opened", "views closed"),
                ("contexts", "contexts pushed", "contexts popped"),
            )
            if counts.get(opened, 0) != counts.get(closed, 0)
        ]
        if not open_counts:
            return counts
        assert time.monotonic() < until, f"{open_counts} are still open: {counts}"
