"""One server a host and setting for the whole session, started when the first test asks for it."""

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

from .client import Client, Hand
from .hosts import EVERYDAY, HOSTS, Host, chosen, single

ROOT = Path(__file__).resolve().parents[2]

COMPLAINTS = re.compile(
    r"Exception in ASGI application|never retrieved|was destroyed but it is pending|was never awaited"
    r"|generator ignored GeneratorExit|didn't stop after athrow|generator is already running|ResourceWarning"
    r"|Unclosed|unraisable|StopAsyncIteration"
)
"""What a server's log never says while all is well, whatever its clients and its backend do."""


@dataclass
class Server:
    """A running host."""

    name: str
    host: Host
    port: int
    control: int
    log: Path
    read: int = 0

    def check_log(self) -> None:
        """Fails if what was logged since the last call tells of a fault."""
        with self.log.open("rb") as log:
            log.seek(self.read)
            text = log.read().decode(errors="replace")
            self.read = log.tell()
        if COMPLAINTS.search(text):
            pytest.fail(f"{self.name} complains:\n{text[-4000:]}", pytrace=False)


Start = Callable[[str, str], Server]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a host's server, or finds it started."""
    running: dict[tuple[str, str], tuple[Server, subprocess.Popen[str]]] = {}
    folder = tmp_path_factory.mktemp("logs")

    def begin(name: str, setting: str) -> Server:
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
                pytest.fail(f"{name} does not start:\n{log.read_text()[-3000:]}", pytrace=False)
            running[name, setting] = Server(name, HOSTS[name], log=log, **json.loads(line)), process
        return running[name, setting][0]

    yield begin
    for _, process in running.values():
        process.terminate()
    for server, process in running.values():
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=15)
            pytest.fail(f"{server.name} does not stop when it is told to")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sockets: needs a host that can do WebSockets")
    config.addinivalue_line("markers", "clock: needs a store whose clock can be turned")
    config.addinivalue_line("markers", "unbound: needs responses that outlive their requests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test on each of the hosts of every day, or on those that its module names in `SERVED_BY`.

    What a response is does not depend on the host that carries it: there two that differ most will do, or one.
    """
    if "server" in metafunc.fixturenames:
        metafunc.parametrize("server", chosen(getattr(metafunc.module, "SERVED_BY", EVERYDAY)), indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what a host cannot do at all."""

    def can_be_done(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        host = callspec and HOSTS.get(callspec.params.get("server"))
        return host is None or all(
            able or item.get_closest_marker(needed) is None
            for needed, able in (("sockets", host.sockets), ("clock", host.clock), ("unbound", not host.bound))
        )

    items[:] = filter(can_be_done, items)


@pytest.fixture
def server(request: pytest.FixtureRequest, start: Start) -> Iterator[Server]:
    """The host that the test asks for; its backend runs in threads where the test asks for such a model."""
    model = request.node.callspec.params.get("model")
    server = start(request.param, "threads" if model in ("puppet-sync", "puppet-plain") else "loop")
    yield server
    server.check_log()


@pytest.fixture
def chatty(start: Start) -> Iterator[Client]:
    """A client of a kit that also tells raw reasoning and extension events; the same on every host."""
    server = start(single(), "chatty")
    yield Client(server.port)
    server.check_log()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.port, prefix=server.host.prefix)


@pytest.fixture
def hand(server: Server) -> Hand:
    return Hand(server.control)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    """Both ways to get an answer."""
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["alone", "continued"])
async def context(request: pytest.FixtureRequest, client: Client) -> dict[str, str]:
    """What makes a request the first of a conversation, or its continuation."""
    if not request.param:
        return {}
    first = await client.create(input=[{"role": "user", "content": "Before."}, {"role": "user", "content": "[]"}])
    return {"previous_response_id": first["id"]}


@pytest.fixture
def name() -> Callable[[], str]:
    """Makes names of gates and runs that no other test uses."""
    return lambda: uuid.uuid4().hex
