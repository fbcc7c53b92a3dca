"""Measure a Flask app's answers per kind of view: `python -m tests.benchmarks.flask_views`, on an idle machine.

A decorated view, plain and async, and a backend under the prefix send the same text, on gunicorn's threads. The
baseline is a plain Flask view that streams as many ready-made lines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import httpx
from flask import Flask, Response

from responses_kit import Backend, ResponsesKit, Turn
from responses_kit_flask import Responses

OUTPUTS = 2_000
ROUNDS = 5
REQUESTS = 200
WAYS = ["/bare", "/plain", "/async", "/v1/responses"]


def pieces(turn: Turn) -> Iterator[str]:
    for _ in range(int(turn.text)):
        yield " upon"


class Upon(Backend):
    models = ("upon",)

    def generate(self, turn: Turn) -> Iterator[str]:
        yield from pieces(turn)


def make() -> Flask:
    app = Flask(__name__)
    responses = Responses(app, ResponsesKit(Upon()))

    @app.post("/bare")
    def bare() -> Response:
        line = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":" upon"}\n\n'
        return Response((line for _ in range(OUTPUTS)), mimetype="text/event-stream")

    @app.post("/plain")
    @responses.endpoint
    def plain(turn: Turn) -> Iterator[str]:
        yield from pieces(turn)

    @app.post("/async")
    @responses.endpoint
    async def on_loop(turn: Turn) -> AsyncIterator[str]:
        for piece in pieces(turn):
            yield piece

    return app


def main() -> None:
    command = [sys.executable, "-m", "gunicorn", "-k", "gthread", "--threads", "8", "-b", "127.0.0.1:8190"]
    server = subprocess.Popen([*command, "--log-level", "critical", "tests.benchmarks.flask_views:make()"])
    try:
        with httpx.Client(base_url="http://127.0.0.1:8190", timeout=60) as client:
            while True:
                try:
                    client.get("/")
                    break
                except httpx.ConnectError:
                    time.sleep(0.05)
            for way in WAYS:
                client.post(way, json={"input": "1", "store": False}).read()
            streams: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(ROUNDS):
                for way in WAYS:
                    started = time.perf_counter()
                    client.post(way, json={"input": str(OUTPUTS), "stream": True, "store": False}).raise_for_status()
                    streams[way].append((time.perf_counter() - started) / OUTPUTS * 1e6)
            shorts: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
            for _ in range(REQUESTS):
                for way in WAYS[1:]:
                    started = time.perf_counter()
                    client.post(way, json={"input": "1", "store": False}).raise_for_status()
                    shorts[way].append((time.perf_counter() - started) * 1e3)
    finally:
        server.terminate()
        server.wait()
    print(
        json.dumps({f"{way}, µs an output": round(min(found), 1) for way, found in streams.items()}, ensure_ascii=False)
    )
    print(json.dumps({f"{way}, ms a request": round(statistics.median(found), 2) for way, found in shorts.items()}))


if __name__ == "__main__":
    main()
