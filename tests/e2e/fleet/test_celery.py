"""Background responses on Celery workers with a real broker: enqueued, followed and cancelled by web processes."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.support.conformance import check_stream

from .conftest import ROOT, Fleet
from .kit import LEASE
from .test_fleet import BOUND, asking, ended, follow, get, post

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


@pytest.fixture
def queue(fleet: Fleet) -> None:
    broker = os.environ.get("RESPONSES_KIT_TEST_RABBITMQ")
    if not broker:
        pytest.skip("RESPONSES_KIT_TEST_RABBITMQ is not set")
    fleet.environment |= {"FLEET_BROKER": broker, "FLEET_QUEUE": f"responses_kit_{uuid.uuid4().hex[:12]}"}


@asynccontextmanager
async def worker(fleet: Fleet, log: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run a Celery worker with two processes until the block ends."""
    command = [sys.executable, "-m", "celery", "-A", "tests.e2e.fleet.tasks", "worker", "-c", "2", "-l", "INFO"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--without-gossip", "--without-mingle"],
            cwd=ROOT,
            env=os.environ | fleet.environment,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        with anyio.fail_after(BOUND):
            while b" ready." not in log.read_bytes():
                assert process.poll() is None, log.read_text()
                await anyio.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        await anyio.to_thread.run_sync(process.wait, 20)


async def test_celery_workers_run_responses_of_web_processes(fleet: Fleet, queue: None, tmp_path: Path) -> None:
    async with fleet.members(2, "celery") as (a, b):
        waiting = await post(a, "/responses", asking(2, 0, background=True))
        assert (await get(b, f"/responses/{waiting['id']}"))["status"] == "queued"
        unwanted = await post(a, "/responses", asking(2, 0, background=True))
        assert (await post(b, f"/responses/{unwanted['id']}/cancel"))["status"] == "cancelled"
        async with worker(fleet, tmp_path / "worker.log"):
            with anyio.fail_after(BOUND):
                whole = await follow(b, waiting["id"])
            assert check_stream(whole) == await get(a, f"/responses/{waiting['id']}")
            assert check_stream(whole)["status"] == "completed"

            more = asking(3, 0.01, background=True, stream=True, previous_response_id=waiting["id"])
            reply = await b.client.post("/responses", json=more)
            assert reply.text.endswith("data: [DONE]\n\n")

            endless = await post(a, "/responses", asking(1000, 0.05, background=True))
            while (await get(b, f"/responses/{endless['id']}"))["status"] != "in_progress":
                await anyio.sleep(0.05)
            cancelled = await post(b, f"/responses/{endless['id']}/cancel")
            assert cancelled["status"] == "cancelled"
            assert check_stream(await follow(a, endless["id"])) == cancelled
            assert (await get(a, f"/responses/{unwanted['id']}"))["status"] == "cancelled"


async def test_killed_worker_fails_running_and_hands_on_queued_responses(
    fleet: Fleet, queue: None, tmp_path: Path
) -> None:
    async with fleet.member("celery") as web:
        async with worker(fleet, tmp_path / "first.log") as process:
            running = [await post(web, "/responses", asking(1000, 0.05, background=True)) for _ in range(2)]
            for response in running:
                while (await get(web, f"/responses/{response['id']}"))["status"] != "in_progress":
                    await anyio.sleep(0.05)
            waiting = await post(web, "/responses", asking(2, 0, background=True))
            os.killpg(process.pid, 9)
        killed = anyio.current_time()
        for response in running:
            assert (await ended(web, response["id"]))["error"]["code"] == "worker_lost"
        assert anyio.current_time() - killed < LEASE + 5
        async with worker(fleet, tmp_path / "second.log"):
            assert (await ended(web, waiting["id"]))["status"] == "completed"
            for response in running:  # the task is delivered to the second worker too, which ignores it
                assert (await get(web, f"/responses/{response['id']}"))["status"] == "failed"
