"""Measure stores: many concurrent streams with each store, and conversations of many turns.

`python -m tests.benchmarks.stores [memory sqlite postgresql redis]`, with PostgreSQL and Redis at
`RESPONSES_KIT_TEST_POSTGRES` and `RESPONSES_KIT_TEST_REDIS`. Its records stay there for an hour.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio

from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.opening import open_store
from responses_kit.stores.protocol import Record

from .http import apart_from_servers, posted, serving

STREAMS, RATE, SECONDS, RAMP = 500, 20, 10, 2.0
TURNS = (1, 10, 100, 1000)
TEXT = b"x" * 1000

_DELTA = re.compile(rb'"delta":"([^"]*) "')
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class Stream(asyncio.Protocol):
    """A client that records the arrival time of each delta."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request, self._done, self._rest = request, done, b""
        self.late: list[float] = []
        self.numbers: list[int] = []
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]  # a TCP connection's can

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        whole, _, self._rest = (self._rest + data).rpartition(b"\n\n")
        self.late += [now - float(stamp) for stamp in _DELTA.findall(whole)]
        self.numbers += map(int, _NUMBER.findall(whole))
        self.ended = self.ended or b"event: response.completed" in whole

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def resident(port: int) -> float:
    """Return the resident memory of the server on this port, in kilobytes."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"--port\0{port}\0".encode() in (process / "cmdline").read_bytes():
                return float((process / "statm").read_text().split()[1]) * 4
        except OSError:
            continue
    return float("nan")


async def load(port: int, *, store: bool) -> dict[str, Any]:
    """Run concurrent streams that emit deltas at a fixed rate."""
    moves = json.dumps([["tick", RATE * SECONDS, 1 / RATE]])
    request = posted({"model": "puppet", "stream": True, "store": store, "input": moves}, close=True)
    loop = asyncio.get_running_loop()
    before = peak = resident(port)
    streams, ends = [], []
    started = time.monotonic()
    for number in range(STREAMS):
        done = loop.create_future()
        _, stream = await loop.create_connection(lambda done=done: Stream(request, done), "127.0.0.1", port)
        streams.append(stream)
        ends.append(done)
        await asyncio.sleep(max(0.0, started + RAMP * number / STREAMS - time.monotonic()))
    while not all(end.done() for end in ends):
        peak = max(peak, resident(port))
        await asyncio.wait(ends, timeout=0.5)
    late = sorted(one for stream in streams for one in stream.late)
    return {
        "lost": STREAMS * RATE * SECONDS - len(late),
        "out of order": sum(stream.numbers != sorted(set(stream.numbers)) for stream in streams),
        "completed": sum(stream.ended for stream in streams),
        "p50 ms": round(late[len(late) // 2] * 1e3, 1),
        "p99 ms": round(late[len(late) * 99 // 100] * 1e3, 1),
        "kB a stream": round((peak - before) / STREAMS),
    }


def addresses(wanted: list[str]) -> Iterator[tuple[str, str]]:
    """Return the names and addresses of the available stores."""
    there = {
        "memory": "",
        "sqlite": f"sqlite:///{tempfile.mkdtemp()}/benchmark.db",
        "postgresql": os.environ.get("RESPONSES_KIT_TEST_POSTGRES"),
        "redis": os.environ.get("RESPONSES_KIT_TEST_REDIS"),
    }
    for name, address in there.items():
        if address is not None and name in (wanted or there):
            yield name, address


async def chains(address: str) -> None:
    """Measure how long a conversation takes to load."""
    store: Any = open_store(address) if address else MemoryStore()
    if address:
        await store.setup()
    owner = f"benchmark {time.time()}"
    previous = None
    made = 0
    for turns in TURNS:
        while made < turns:
            record = Record(
                id=f"resp_{made}", previous_id=previous, input=b'["%b"]' % TEXT, response=b'{"output":"%b"}' % TEXT,
                item_ids=(f"msg_{made}",), final=True,
            )  # fmt: skip
            await store.create(owner, record)
            previous, made = record.id, made + 1
        times = []
        for _ in range(10):
            started = time.perf_counter()
            assert len(await store.chain(owner, str(previous))) == turns
            times.append(time.perf_counter() - started)
        print(f"  chain of {turns:5}: {statistics.median(times) * 1e3:8.2f} ms")
    if address:
        await store.aclose()


def main(wanted: list[str]) -> None:
    """Print all figures."""
    rows = [(name, address, resumable) for name, address in addresses(wanted) for resumable in (False, True)]
    with apart_from_servers():
        for name, address, resumable in rows:
            os.environ |= {"BENCHMARK_STORE": address, "BENCHMARK_RESUMABLE": "yes" if resumable else "no"}
            with serving("stored", "--factory") as port:
                if not resumable:
                    print(f"{name}, store off: {asyncio.run(load(port, store=False))}", flush=True)
                print(
                    f"{name}, {'resumable' if resumable else 'store on'}: {asyncio.run(load(port, store=True))}",
                    flush=True,
                )
    for name, address in addresses(wanted):
        print(name)
        anyio.run(chains, address)


if __name__ == "__main__":
    main(sys.argv[1:])
