"""The signals: each response that has ended is told once, however it did, to receivers of any kind."""

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

from responses_kit_django.conf import kit  # noqa: E402
from responses_kit_django.signals import response_completed, response_failed  # noqa: E402

BOUND = 20.0

urlpatterns = [path("v1/", include("responses_kit_django.urls"))]


def script(turn: Turn) -> Iterable[Any]:
    """What the question asks for."""
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


class Told(list[tuple[bool, str, dict[str, Any]]]):
    """What came: whether it was completed, whose it is, and the response."""

    def note(self, signal: Any, owner: str, response: dict[str, Any], **_: Any) -> None:
        self.append((signal is response_completed, owner, response))

    @property
    def statuses(self) -> list[tuple[bool, str]]:
        return [(completed, response["status"]) for completed, _, response in self]

    def once(self) -> tuple[bool, str, dict[str, Any]]:
        """The one that comes; there are no others."""
        wait_until(lambda: len(self) > 0)
        loop_thread.call(asyncio.sleep, 0.1)  # a second one would come now
        (one,) = self
        return one


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until
        loop_thread.call(asyncio.sleep, 0.01)


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    with connected(told.note):
        yield told


def ask(text: str, **more: Any) -> dict[str, Any]:
    return loop_thread.call(lambda: kit().create({"input": text, **more}, owner="ann"))


def retrieve(response_id: str) -> dict[str, Any]:
    return loop_thread.call(lambda: kit().retrieve(response_id, owner="ann"))


# Once, however it ends.


def test_a_response_that_is_complete_is_told_as_clients_see_it(told: Told) -> None:
    response = ask("Hello?")
    assert told.once() == (True, "ann", response)
    assert response["usage"]["total_tokens"] == 7


def test_an_incomplete_response_has_come_to_its_end_too(told: Told) -> None:
    ask("stop")
    completed, _, response = told.once()
    assert (completed, response["status"]) == (True, "incomplete")


@pytest.mark.parametrize("text", ["fail", "break"])
def test_a_response_that_fails_is_told_as_failed(told: Told, text: str) -> None:
    with pytest.raises(APIError):
        ask(text)
    completed, owner, response = told.once()
    assert (completed, owner, response["status"]) == (False, "ann", "failed")
    assert response["error"]["code"] == "model_error"


def test_a_background_response_is_told_when_it_has_ended(told: Told) -> None:
    queued = ask("Hello?", background=True)
    completed, _, response = told.once()
    assert (completed, response["id"], response["status"]) == (True, queued["id"], "completed")
    assert response == retrieve(queued["id"])


def test_a_response_that_is_cancelled_is_told_as_failed(told: Told) -> None:
    queued = ask("wait", background=True)
    wait_until(lambda: retrieve(queued["id"])["status"] == "in_progress")
    for _ in range(2):
        loop_thread.call(lambda: kit().cancel(queued["id"], owner="ann"))
    completed, _, response = told.once()
    assert (completed, response["status"]) == (False, "cancelled")


def test_a_response_that_is_deleted_on_its_way_is_told_once(told: Told) -> None:
    queued = ask("wait", background=True)
    wait_until(lambda: retrieve(queued["id"])["status"] == "in_progress")
    loop_thread.call(lambda: kit().delete(queued["id"], owner="ann"))
    completed, _, response = told.once()
    assert (completed, response["status"]) == (False, "cancelled")


@pytest.mark.parametrize("stored", [True, False])
def test_a_client_that_leaves_ends_its_response_and_it_is_told(told: Told, stored: bool) -> None:
    asked = {"input": "wait", "stream": True, "store": stored}
    answer: Any = Client().post("/v1/responses", asked, content_type="application/json", headers={"X-Owner": "bob"})
    assert b"response.created" in next(answer.streaming_content)
    assert told == []
    answer.close()
    completed, owner, response = told.once()
    assert (completed, owner, response["status"]) == (False, "bob", "cancelled")


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_stored_is_told_all_the_same(told: Told, stream: bool) -> None:
    asked = {"input": "Hello?", "store": False, "stream": stream}
    answer: Any = Client().post("/v1/responses", asked, content_type="application/json")
    assert b"completed" in (b"".join(answer.streaming_content) if stream else answer.content)
    completed, owner, response = told.once()
    assert (completed, owner, response["status"]) == (True, "ann", "completed")


def test_what_a_dead_worker_has_left_is_told_by_who_ends_it(told: Told) -> None:
    queued = ask("wait", background=True)
    wait_until(lambda: retrieve(queued["id"])["status"] == "in_progress")
    record = loop_thread.call(lambda: kit().store.get("ann", queued["id"]))
    assert record is not None
    lost = Record(id="resp_lost", previous_id=None, input=b"[]", response=record.response, lease=1.0)
    loop_thread.call(lambda: kit().store.create("ann", lost))
    assert [retrieve("resp_lost")["status"] for _ in range(3)] == ["failed"] * 3
    completed, _, response = told.once()
    assert (completed, response["error"]["code"]) == (False, "worker_lost")
    loop_thread.call(lambda: kit().cancel(queued["id"], owner="ann"))


def test_what_the_end_of_the_server_cuts_off_is_told(told: Told) -> None:
    loop_thread.start_kit(found := kit(), grace=0.1)
    queued = ask("wait", background=True)
    wait_until(lambda: retrieve(queued["id"])["status"] == "in_progress")
    loop_thread.stop_kit(found)
    completed, _, response = told.once()
    assert (completed, response["status"]) == (False, "failed")


def test_what_was_never_a_response_is_not_told(told: Told) -> None:
    with pytest.raises(APIError):
        ask("Hello?", model="nobody")
    with pytest.raises(APIError):
        ask("Hello?", previous_response_id="resp_unknown")
    first = ask("Hello?")
    loop_thread.call(lambda: kit().compact({"model": "scripted", "previous_response_id": first["id"]}, owner="ann"))
    assert told.once()[2]["id"] == first["id"]


def test_many_at_once_are_each_told_once(told: Told) -> None:
    async def ask_all() -> list[str]:
        asked = [kit().create({"input": "Hello?"}, owner=str(number)) for number in range(30)]
        return [response["id"] for response in await asyncio.gather(*asked)]

    kit()
    ids = loop_thread.call(ask_all)
    assert sorted(response["id"] for _, _, response in told) == sorted(ids)
    assert sorted(int(owner) for _, owner, _ in told) == list(range(30))


# Receivers.


def post(interface: str, text: str = "Hello?") -> Any:
    """Asks over one of Django's interfaces."""
    asked = {"input": text}
    if interface == "wsgi":
        return Client().post("/v1/responses", asked, content_type="application/json")
    return async_to_sync(AsyncClient().post)("/v1/responses", asked, content_type="application/json")


@pytest.fixture(params=["wsgi", "asgi"])
def interface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_plain_receivers_are_called_in_a_thread_and_async_ones_on_the_loop(interface: str) -> None:
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
def test_receivers_use_the_orm(interface: str) -> None:
    def plain(owner: str, response: Any, **_: Any) -> None:
        Group.objects.create(name=f"plain {response['id']}")

    async def waiting(owner: str, response: Any, **_: Any) -> None:
        await Group.objects.acreate(name=f"waiting {response['id']}")

    with connected(plain), connected(waiting):
        answer = post(interface)
    made = answer.json()["id"]
    assert sorted(group.name for group in Group.objects.all()) == [f"plain {made}", f"waiting {made}"]


@pytest.mark.parametrize("kind", ["plain", "waiting"])
def test_a_receiver_that_raises_harms_neither_the_answer_nor_the_others(
    interface: str, kind: str, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    def plain(**_: Any) -> None:
        raise ValueError("no")

    async def waiting(**_: Any) -> None:
        raise ValueError("no")

    with connected(plain if kind == "plain" else waiting):
        response = post(interface).json()
    assert response["status"] == "completed"
    assert told.once()[2]["id"] == response["id"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.name == "django.dispatch"


@pytest.mark.parametrize("kind", ["plain", "waiting"])
def test_a_receiver_that_hangs_holds_answers_up_no_longer_than_it_may(
    interface: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_PATIENCE_SECONDS", 0.2)
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
            # Over WSGI the loop goes on, and so does the receiver; the loop of one ASGI request would wait for it.
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


def test_what_a_receiver_does_to_the_response_stays_with_it() -> None:
    def spoil(response: dict[str, Any], **_: Any) -> None:
        response["output"].clear()
        response["status"] = "spoilt"

    with connected(spoil):
        response = ask("Hello?")
    assert response["status"] == "completed"
    assert retrieve(response["id"]) == response


def test_the_sender_is_the_kits_class() -> None:
    told = Told()
    with connected(told.note, sender=ResponsesKit):
        ask("Hello?")
    with connected(told.note, sender=Told):
        ask("Hello?")
    assert told.statuses == [(True, "completed")]
