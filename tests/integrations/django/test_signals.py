"""Tests of the signals, which are sent once for each response that has ended, to receivers of all kinds."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from responses_kit import ResponsesKit, Turn
from responses_kit._concurrency import loop_thread
from responses_kit.engine import hooks
from responses_kit.errors import APIError, ModelError
from responses_kit.outputs import Finish, Usage
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Record
from responses_kit.testing import Pause, ScriptedBackend

from .databases import configure

configure()

from asgiref.sync import async_to_sync  # noqa: E402  # Django's settings come first
from django.contrib.auth.models import Group  # noqa: E402
from django.test import AsyncClient, Client, override_settings  # noqa: E402
from django.urls import include, path  # noqa: E402

from responses_kit_django.conf import get_kit  # noqa: E402
from responses_kit_django.signals import response_completed, response_failed  # noqa: E402

BOUND = 20.0

urlpatterns = [path("v1/", include("responses_kit_django.urls"))]


def script(turn: Turn) -> Iterable[Any]:
    """Return the script of a backend that behaves as the input says."""
    match turn.text:
        case "fail":
            return ["Hm", ModelError("No.")]
        case "break":
            return [RuntimeError("boom")]
        case "stop":
            return ["Hi", Finish("max_output_tokens")]
        case "wait":
            return ["Hi", Pause(60), "there"]
        case _:
            return ["Hi", Usage(3, 4)]


@pytest.fixture(autouse=True)
def _project() -> Iterator[None]:
    said = {
        "BACKEND": lambda: ScriptedBackend(script),
        "STORE": MemoryStore(),
        "AUTH": [],
        "OWNER": lambda request: request.headers.get("X-Owner", "ann"),
        "TIMEOUTS": {"keep_alive": 0.1},
    }
    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["testserver"], RESPONSES_KIT=said):
        yield


@contextmanager
def connected(receiver: Callable[..., Any], **more: Any) -> Iterator[None]:
    for signal in (response_completed, response_failed):
        signal.connect(receiver, **more)
    try:
        yield
    finally:
        for signal in (response_completed, response_failed):
            signal.disconnect(receiver, **more)


class ReceivedSignals(list[tuple[bool, str, dict[str, Any]]]):
    """The received signals: whether the response completed, its owner, and the response."""

    def record(self, signal: Any, owner: str, response: dict[str, Any], **_: Any) -> None:
        self.append((signal is response_completed, owner, response))

    @property
    def statuses(self) -> list[tuple[bool, str]]:
        return [(completed, response["status"]) for completed, _, response in self]

    def wait_for_one(self) -> tuple[bool, str, dict[str, Any]]:
        """Wait for a signal, and check that it is the only one."""
        wait_until(lambda: len(self) > 0)
        loop_thread.call(asyncio.sleep, 0.1)  # a second signal would arrive now
        (one,) = self
        return one


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until
        loop_thread.call(asyncio.sleep, 0.01)


@pytest.fixture
def signals() -> Iterator[ReceivedSignals]:
    signals = ReceivedSignals()
    with connected(signals.record):
        yield signals


def ask(text: str, **more: Any) -> dict[str, Any]:
    return loop_thread.call(lambda: get_kit().create({"input": text, **more}, owner="ann"))


def retrieve(response_id: str) -> dict[str, Any]:
    return loop_thread.call(lambda: get_kit().retrieve(response_id, owner="ann"))


# One signal for each response.


def test_completed_signal_carries_client_view(signals: ReceivedSignals) -> None:
    response = ask("Hello?")
    assert signals.wait_for_one() == (True, "ann", response)
    assert response["usage"]["total_tokens"] == 7


def test_incomplete_response_sends_completed_signal(signals: ReceivedSignals) -> None:
    ask("stop")
    completed, _, response = signals.wait_for_one()
    assert (completed, response["status"]) == (True, "incomplete")


@pytest.mark.parametrize("text", ["fail", "break"])
def test_failed_response_sends_failed_signal(signals: ReceivedSignals, text: str) -> None:
    with pytest.raises(APIError):
        ask(text)
    completed, owner, response = signals.wait_for_one()
    assert (completed, owner, response["status"]) == (False, "ann", "failed")
    assert response["error"]["code"] == "model_error"


def test_background_response_sends_signal_at_end(signals: ReceivedSignals) -> None:
    queued = ask("Hello?", background=True)
    completed, _, response = signals.wait_for_one()
    assert (completed, response["id"], response["status"]) == (True, queued["id"], "completed")
    assert response == retrieve(queued["id"])


def test_cancelled_response_sends_failed_signal(signals: ReceivedSignals) -> None:
    queued = ask("wait", background=True)
    wait_until(lambda: retrieve(queued["id"])["status"] == "in_progress")
    for _ in range(2):
        loop_thread.call(lambda: get_kit().cancel(queued["id"], owner="ann"))
    completed, _, response = signals.wait_for_one()
    assert (completed, response["status"]) == (False, "cancelled")


def test_deleted_response_sends_one_signal(signals: ReceivedSignals) -> None:
    queued = ask("wait", background=True)
    wait_until(lambda: retrieve(queued["id"])["status"] == "in_progress")
    loop_thread.call(lambda: get_kit().delete(queued["id"], owner="ann"))
    completed, _, response = signals.wait_for_one()
    assert (completed, response["status"]) == (False, "cancelled")


@pytest.mark.parametrize("stored", [True, False])
def test_disconnect_sends_signal(signals: ReceivedSignals, stored: bool) -> None:
    asked = {"input": "wait", "stream": True, "store": stored}
    answer: Any = Client().post("/v1/responses", asked, content_type="application/json", headers={"X-Owner": "bob"})
    assert b"response.created" in next(answer.streaming_content)
    assert signals == []
    answer.close()
    completed, owner, response = signals.wait_for_one()
    assert (completed, owner, response["status"]) == (False, "bob", "cancelled")


@pytest.mark.parametrize("stream", [True, False])
def test_unstored_response_sends_signal(signals: ReceivedSignals, stream: bool) -> None:
    asked = {"input": "Hello?", "store": False, "stream": stream}
    answer: Any = Client().post("/v1/responses", asked, content_type="application/json")
    assert b"completed" in (b"".join(answer.streaming_content) if stream else answer.content)
    completed, owner, response = signals.wait_for_one()
    assert (completed, owner, response["status"]) == (True, "ann", "completed")


def test_orphaned_response_sends_signal_when_ended(signals: ReceivedSignals) -> None:
    queued = ask("wait", background=True)
    wait_until(lambda: retrieve(queued["id"])["status"] == "in_progress")
    record = loop_thread.call(lambda: get_kit().store.get("ann", queued["id"]))
    assert record is not None
    lost = Record(id="resp_lost", previous_id=None, input=b"[]", response=record.response, lease=1.0)
    loop_thread.call(lambda: get_kit().store.create("ann", lost))
    assert [retrieve("resp_lost")["status"] for _ in range(3)] == ["failed"] * 3
    completed, _, response = signals.wait_for_one()
    assert (completed, response["error"]["code"]) == (False, "worker_lost")
    loop_thread.call(lambda: get_kit().cancel(queued["id"], owner="ann"))


def test_shutdown_sends_signals_for_stopped_responses(signals: ReceivedSignals) -> None:
    loop_thread.start_kit(found := get_kit(), grace=0.1)
    queued = ask("wait", background=True)
    wait_until(lambda: retrieve(queued["id"])["status"] == "in_progress")
    loop_thread.stop_kit(found)
    completed, _, response = signals.wait_for_one()
    assert (completed, response["status"]) == (False, "failed")


def test_refused_request_sends_no_signal(signals: ReceivedSignals) -> None:
    with pytest.raises(APIError):
        ask("Hello?", model="nobody")
    with pytest.raises(APIError):
        ask("Hello?", previous_response_id="resp_unknown")
    first = ask("Hello?")
    loop_thread.call(lambda: get_kit().compact({"model": "scripted", "previous_response_id": first["id"]}, owner="ann"))
    assert signals.wait_for_one()[2]["id"] == first["id"]


def test_concurrent_responses_send_one_signal_each(signals: ReceivedSignals) -> None:
    async def ask_all() -> list[str]:
        asked = [get_kit().create({"input": "Hello?"}, owner=str(number)) for number in range(30)]
        return [response["id"] for response in await asyncio.gather(*asked)]

    get_kit()
    ids = loop_thread.call(ask_all)
    assert sorted(response["id"] for _, _, response in signals) == sorted(ids)
    assert sorted(int(owner) for _, owner, _ in signals) == list(range(30))


# Receivers.


def post(interface: str, text: str = "Hello?") -> Any:
    """Send a request over WSGI or ASGI."""
    asked = {"input": text}
    if interface == "wsgi":
        return Client().post("/v1/responses", asked, content_type="application/json")
    return async_to_sync(AsyncClient().post)("/v1/responses", asked, content_type="application/json")


@pytest.fixture(params=["wsgi", "asgi"])
def interface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_sync_receivers_run_in_thread_and_async_on_loop(interface: str) -> None:
    on_loop: dict[str, bool] = {}

    def plain(**_: Any) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_loop["plain"] = False
        else:
            on_loop["plain"] = True

    async def waiting(**_: Any) -> None:
        await asyncio.sleep(0)
        on_loop["waiting"] = asyncio.get_running_loop().is_running()

    with connected(plain), connected(waiting):
        assert post(interface).status_code == 200
    assert on_loop == {"plain": False, "waiting": True}


@pytest.fixture
def _no_groups() -> Iterator[None]:
    yield
    Group.objects.all().delete()


@pytest.mark.usefixtures("_no_groups")
def test_receivers_can_use_orm(interface: str) -> None:
    def plain(owner: str, response: Any, **_: Any) -> None:
        Group.objects.create(name=f"plain {response['id']}")

    async def waiting(owner: str, response: Any, **_: Any) -> None:
        await Group.objects.acreate(name=f"waiting {response['id']}")

    with connected(plain), connected(waiting):
        answer = post(interface)
    made = answer.json()["id"]
    assert sorted(group.name for group in Group.objects.all()) == [f"plain {made}", f"waiting {made}"]


@pytest.mark.parametrize("kind", ["plain", "waiting"])
def test_failing_receiver_is_isolated(
    interface: str, kind: str, signals: ReceivedSignals, caplog: pytest.LogCaptureFixture
) -> None:
    def plain(**_: Any) -> None:
        raise ValueError("no")

    async def waiting(**_: Any) -> None:
        raise ValueError("no")

    with connected(plain if kind == "plain" else waiting):
        response = post(interface).json()
    assert response["status"] == "completed"
    assert signals.wait_for_one()[2]["id"] == response["id"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.name == "django.dispatch"


@pytest.mark.parametrize("kind", ["plain", "waiting"])
def test_hanging_receiver_delays_response_by_timeout_only(
    interface: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_HOOK_TIMEOUT", 0.2)
    release, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def plain(**_: Any) -> None:
        begun.set()
        release.wait(BOUND)
        ended.set()

    async def waiting(**_: Any) -> None:
        begun.set()
        await asyncio.to_thread(release.wait, BOUND)
        ended.set()

    with connected(plain if kind == "plain" else waiting):
        try:
            # Under WSGI the event loop and the receiver run on; the event loop of an ASGI request would wait for it.
            response = post("wsgi").json() if interface == "wsgi" else loop_thread.call(_over_asgi)
            assert response["status"] == "completed"
            assert begun.is_set()
            assert not ended.is_set()
        finally:
            release.set()
        assert ended.wait(BOUND)


async def _over_asgi() -> Any:
    answer = await AsyncClient().post("/v1/responses", {"input": "Hello?"}, content_type="application/json")
    return answer.json()  # type: ignore[attr-defined]  # Django's client puts it there


def test_receiver_changes_stay_local() -> None:
    def spoil(response: dict[str, Any], **_: Any) -> None:
        response["output"].clear()
        response["status"] = "spoilt"

    with connected(spoil):
        response = ask("Hello?")
    assert response["status"] == "completed"
    assert retrieve(response["id"]) == response


def test_sender_is_kit_class() -> None:
    signals = ReceivedSignals()
    with connected(signals.record, sender=ResponsesKit):
        ask("Hello?")
    with connected(signals.record, sender=ReceivedSignals):
        ask("Hello?")
    assert signals.statuses == [(True, "completed")]
