"""Several server processes on one store: PostgreSQL and Redis, if the environment names them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import pytest

ROOT = Path(__file__).resolve().parents[3]

VARIABLES = {"postgresql": "RESPONSES_KIT_TEST_POSTGRES", "redis": "RESPONSES_KIT_TEST_REDIS"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Member:
    """A server process and a client for it."""

    process: subprocess.Popen[str]
    client: httpx.AsyncClient

    def kill(self) -> None:
        """Kill the process with SIGKILL, which it cannot handle."""
        self.process.kill()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        return await anyio.to_thread.run_sync(self.process.wait, 20)


@dataclass
class Fleet:
    """Servers that share the store that `environment` names."""

    environment: dict[str, str]

    @asynccontextmanager
    async def members(self, count: int, *arguments: str) -> AsyncIterator[list[Member]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.member(*arguments)) for _ in range(count)]

    @asynccontextmanager
    async def member(self, *arguments: str) -> AsyncIterator[Member]:
        """Run a server process and kill it at the end if it is still alive."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.fleet.serve", *arguments],
            cwd=ROOT,
            env=os.environ | self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = await anyio.to_thread.run_sync(process.stdout.readline)
            address = f"http://127.0.0.1:{json.loads(line)['port']}/v1"
            async with httpx.AsyncClient(base_url=address, timeout=30) as client:
                yield Member(process, client)
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module", params=list(VARIABLES))
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Yield a fleet with its own store: a database, or a key prefix."""
    url = os.environ.get(VARIABLES[request.param])
    if not url:
        pytest.skip(f"{VARIABLES[request.param]} is not set")
    name = f"responses_kit_{uuid.uuid4().hex[:12]}"
    if request.param == "redis":
        yield from _on_redis(url, f"{name}:")
    else:
        yield from _on_postgres(url, name)


def _on_redis(url: str, prefix: str) -> Iterator[Fleet]:
    import redis

    yield Fleet({"FLEET_STORE": url, "FLEET_STORE_SETTINGS": json.dumps({"prefix": prefix})})
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(f"{prefix}*"):
            client.delete(key)


def _on_postgres(url: str, name: str) -> Iterator[Fleet]:
    def execute(statement: str) -> None:
        import asyncpg

        async def connected() -> None:
            connection = await asyncpg.connect(url)
            await connection.execute(statement)
            await connection.close()

        anyio.run(connected)

    execute(f"CREATE DATABASE {name}")
    yield Fleet({"FLEET_STORE": f"{url.rpartition('/')[0]}/{name}", "FLEET_STORE_SETTINGS": "{}"})
    execute(f"DROP DATABASE {name} WITH (FORCE)")
