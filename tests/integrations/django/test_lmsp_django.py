"""Tests of LMSP in a Django project."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from responses_kit.testing import ScriptedBackend

from ...contract.lmsp import message
from ...http.lmsp.conformance import check_response, problem_in
from .databases import configure

configure()

from django.test import Client, override_settings  # noqa: E402  # Django's settings come first
from django.urls import include, path  # noqa: E402

urlpatterns = [
    path("v1/", include("responses_kit_django.urls")),
    path("lmsp/v1/", include("responses_kit_django.lmsp")),
]

ASKED: dict[str, Any] = {"model": "scripted", "input": [message("Hi")]}


def backend() -> ScriptedBackend:
    return ScriptedBackend(["Hello"])


def anybody(request: Any) -> str:
    return "ann"


def nobody(request: Any) -> None:
    return None


@pytest.fixture
def client() -> Iterator[Client]:
    settings = {"BACKEND": backend, "STORE": "memory:", "AUTH": [anybody], "OWNER": anybody}
    with override_settings(ROOT_URLCONF=__name__, RESPONSES_KIT=settings):
        yield Client()


def ask(client: Client, where: str = "/lmsp/v1/responses", **fields: Any) -> Any:
    return client.post(where, json.dumps({**ASKED, **fields}), content_type="application/json")


def problem(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.content
    return problem_in(status, answer.headers, answer.content)


def test_both_dialects_use_project_kit(client: Client) -> None:
    made = ask(client, store=True).json()
    check_response(made)
    assert client.get(f"/v1/responses/{made['id']}").json()["output"][0]["id"] == made["output"][0]["id"]


def test_stream_and_task_events_are_sent(client: Client) -> None:
    streamed = b"".join(ask(client, stream=True))
    assert streamed.endswith(b"\n\n")
    assert b"event: response.completed\n" in streamed
    task = ask(client, "/lmsp/v1/tasks").json()
    assert b"event: response.completed\n" in b"".join(client.get(f"/lmsp/v1/tasks/{task['id']}/events"))


def test_anonymous_request_returns_problem_document(client: Client) -> None:
    with override_settings(RESPONSES_KIT={"BACKEND": backend, "STORE": "memory:", "AUTH": [nobody]}):
        problem(ask(client), 401)


def test_misconfigured_api_returns_problem_document(client: Client) -> None:
    with override_settings(RESPONSES_KIT={"BACKEND": "no.such.Thing"}):
        problem(ask(client), 500)
