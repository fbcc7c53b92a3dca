"""Measure the kit on the wire, as ratios to a bare ASGI app that sends ready-made bytes.

Servers and client are pinned to a core each where the system can do that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator

from responses_kit.protocol.ids import new_id
from responses_kit.protocol.sse import encode_sse
from responses_kit.protocol.state_machine import StateMachine

DELTAS = 20_000
ROUNDS = 5
SECONDS = 2.0
CONNECTIONS = 32


def delta_microseconds() -> float:
    """Return the time of state machine and encoding for one text delta, in microseconds."""
    machine = StateMachine({"output": []}, new_id=new_id)
    machine.start()
    machine.feed("Once")

    def delta() -> None:
        for event in machine.feed(" upon"):
            encode_sse(event)

    return min(timeit.repeat(delta, number=20_000, repeat=10)) / 20_000 * 1e6


@contextlib.contextmanager
def serving(app: str, *options: str, pinned: bool = True) -> Iterator[int]:
    """Run the app under uvicorn and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", f"tests.benchmarks.apps:{app}", "--port", str(port), *options]
    command += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    server = subprocess.Popen(command)
    if hasattr(os, "sched_setaffinity") and pinned:
        os.sched_setaffinity(server.pid, {0})
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if time.monotonic() > deadline or server.poll() is not None:
                raise RuntimeError(f"{app} does not come up")
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(20)


@contextlib.contextmanager
def apart_from_servers() -> Iterator[None]:
    """Pin this process to other cores than the servers'."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(cores) < 2:
        yield
        return
    os.sched_setaffinity(0, cores - {0})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def posted(body: object, *, close: bool = False) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    return head.encode() + (b"Connection: close\r\n" if close else b"") + b"\r\n" + raw


def events_per_second(port: int) -> float:
    """Return the events per second of one stream with many short deltas."""
    moves = json.dumps([["texts", " tok", DELTAS]])
    request = posted({"model": "puppet", "stream": True, "store": False, "input": moves}, close=True)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        started = time.perf_counter()
        connection.sendall(request)
        received = []
        while data := connection.recv(1 << 20):
            received.append(data)
        seconds = time.perf_counter() - started
    events = b"".join(received).count(b"event: ")
    if events < DELTAS:
        raise RuntimeError(f"{events} events of {DELTAS}")
    return events / seconds


def first_byte_milliseconds(port: int) -> float:
    """Return the median time from request to first event on one connection, in milliseconds."""
    request = posted({"model": "puppet", "stream": True, "store": False, "input": "x"})
    times = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(300):
            started = time.perf_counter()
            connection.sendall(request)
            received, first = b"", 0.0
            while not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(65536)
                if not first and b"event:" in received:
                    first = time.perf_counter() - started
            times.append(first)
    return statistics.median(times[50:]) * 1e3


def answers_per_second(port: int, *, store: bool) -> float:
    """Return the complete responses per second over many connections."""
    request = posted({"model": "puppet", "input": "hi", "store": store})

    async def ask(until: float) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answered = 0
        while time.perf_counter() < until:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            answered += head.startswith(b"HTTP/1.1 200")
        writer.close()
        return answered

    async def all_of_them() -> float:
        started = time.perf_counter()
        answers = await asyncio.gather(*(ask(started + SECONDS) for _ in range(CONNECTIONS)))
        return sum(answers) / (time.perf_counter() - started)

    return asyncio.run(all_of_them())


def main() -> None:
    """Print all figures. The rounds of all servers alternate, so that noise affects them equally."""
    print(f"machine and encoding: {delta_microseconds():.2f} µs a text delta")
    with apart_from_servers(), serving("bare") as bare, serving("kit") as kit, serving("kit_sync") as kit_sync:
        rounds = [tuple(map(events_per_second, (bare, kit, kit_sync))) for _ in range(ROUNDS)]
        rates = [statistics.median(side) for side in zip(*rounds, strict=True)]
        for name, rate in zip(("bare", "async backend", "sync backend"), rates, strict=True):
            print(f"one stream, {name}: {rate:,.0f} events/s, ratio {rate / rates[0]:.2f}")
        first = [first_byte_milliseconds(port) for port in (bare, kit)]
        print(f"first byte: bare {first[0]:.3f} ms, kit {first[1]:.3f} ms, {first[1] / first[0]:.1f} times")
        for store in (False, True):
            pairs = [tuple(answers_per_second(port, store=store) for port in (bare, kit)) for _ in range(ROUNDS)]
            one, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(
                f"answers, {CONNECTIONS} connections, store {str(store).lower()}: "
                f"bare {one:,.0f}/s, kit {other:,.0f}/s, ratio {other / one:.2f}"
            )


if __name__ == "__main__":
    main()
