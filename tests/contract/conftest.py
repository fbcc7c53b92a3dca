"""Servers for the contract suite: one per host and setting, started on first use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .client import Client, ControlClient
from .hosts import DEFAULT_HOSTS, HOSTS, Host, select_hosts, settings_host

ROOT = Path(__file__).resolve().parents[2]

LOGGED_FAULTS = re.compile(
    r"Exception in ASGI application|never retrieved|was destroyed but it is pending|was never awaited"
    r"|generator ignored GeneratorExit|didn't stop after athrow|generator is already running|ResourceWarning"
    r"|Unclosed|unraisable|StopAsyncIteration"
)
"""Log messages that a server must never write, whatever its clients and backend do."""


@dataclass
class Server:
    """A running host."""

    name: str
    host: Host
    port: int
    control_port: int
    log: Path
    log_offset: int = 0

    def check_log(self) -> None:
        """Fail if the log shows a fault since the last call."""
        with self.log.open("rb") as log:
            log.seek(self.log_offset)
            text = log.read().decode(errors="replace")
            self.log_offset = log.tell()
        if LOGGED_FAULTS.search(text):
            pytest.fail(f"{self.name} logged a fault:\n{text[-4000:]}", pytrace=False)


Start = Callable[[str, str], Server]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that starts a host's server once."""
    running: dict[tuple[str, str], tuple[Server, subprocess.Popen[str]]] = {}
    folder = tmp_path_factory.mktemp("logs")

    def start_server(name: str, setting: str) -> Server:
        if (name, setting) not in running:
            log = folder / f"{len(running)}.log"
            with log.open("wb") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-W", "default", "-m", "tests.contract.serve", name, setting],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                process.wait(10)
                pytest.fail(f"{name} did not start:\n{log.read_text()[-3000:]}", pytrace=False)
            running[name, setting] = Server(name, HOSTS[name], log=log, **json.loads(line)), process
        return running[name, setting][0]

    yield start_server
    for _, process in running.values():
        process.terminate()
    for server, process in running.values():
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=15)
            pytest.fail(f"{server.name} did not stop after SIGTERM")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "websockets: needs a host that supports WebSockets")
    config.addinivalue_line("markers", "clock: needs a store whose clock can be advanced")
    config.addinivalue_line("markers", "independent: needs responses that outlive their requests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on the default hosts, or on its module's `SERVED_BY`.

    Responses do not depend on the host, so tests of their content run on one or two hosts.
    """
    if "server" in metafunc.fixturenames:
        metafunc.parametrize(
            "server", select_hosts(getattr(metafunc.module, "SERVED_BY", DEFAULT_HOSTS)), indirect=True
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deselect tests of features that a host cannot support."""

    def is_supported(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        host = callspec and HOSTS.get(callspec.params.get("server"))
        return host is None or all(
            has_feature or item.get_closest_marker(marker) is None
            for marker, has_feature in (
                ("websockets", host.has_websockets),
                ("clock", host.has_test_clock),
                ("independent", not host.is_view),
            )
        )

    items[:] = filter(is_supported, items)


@pytest.fixture
def server(request: pytest.FixtureRequest, start: Start) -> Iterator[Server]:
    """The server of the test's host; its backend runs in threads if the test's model does."""
    model = request.node.callspec.params.get("model")
    server = start(request.param, "threads" if model in ("scripted-sync", "scripted-plain") else "loop")
    yield server
    server.check_log()


@pytest.fixture
def extended(start: Start) -> Iterator[Client]:
    """A client of a kit that streams raw reasoning and extension events, on one host."""
    server = start(settings_host(), "extended")
    yield Client(server.port)
    server.check_log()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.port, prefix=server.host.prefix)


@pytest.fixture
def control(server: Server) -> ControlClient:
    return ControlClient(server.control_port)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    """Whether to stream the response."""
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["alone", "continued"])
async def context(request: pytest.FixtureRequest, client: Client) -> dict[str, str]:
    """Fields that make a request the first one of a conversation, or continue one."""
    if not request.param:
        return {}
    first = await client.create(input=[{"role": "user", "content": "Before."}, {"role": "user", "content": "[]"}])
    return {"previous_response_id": first["id"]}


@pytest.fixture
def name() -> Callable[[], str]:
    """Return a function that generates unique names for gates and runs."""
    return lambda: uuid.uuid4().hex
