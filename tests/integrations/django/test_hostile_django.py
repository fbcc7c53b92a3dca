"""Tests of hostile users and clients: their requests and stored content do not affect other users."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from .databases import configure

configure()

from django.contrib.auth.models import AnonymousUser, Group, User  # noqa: E402  # Django's settings come first
from django.core.exceptions import ImproperlyConfigured  # noqa: E402  # Django's settings come first
from django.db import connection, transaction  # noqa: E402
from django.http import HttpRequest  # noqa: E402
from django.test import Client, RequestFactory, override_settings  # noqa: E402
from django.test.utils import CaptureQueriesContext  # noqa: E402
from django.urls import include, path  # noqa: E402

from responses_kit_django import auth  # noqa: E402
from responses_kit_django._admin import queries  # noqa: E402

from .rows import create_row  # noqa: E402

HERE = __name__

urlpatterns = [path("v1/", include("responses_kit_django.urls"))]

LIST = "/admin/responses_kit_django/response/"


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.fixture
def staff() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def asked_by(who: Any) -> HttpRequest:
    request = RequestFactory().get("/")
    request.user = who
    return request


# Authentication.


@pytest.mark.parametrize(
    "named",
    [None, False, "", AnonymousUser(), User(pk=1, username="ann", is_active=False)],
    ids=["none", "false", "empty", "anonymous", "switched off"],
)
@pytest.mark.parametrize("owner", [None, lambda request: "company"], ids=["everybody", "company"])
def test_authenticator_returning_anonymous_refuses(named: Any, owner: Any) -> None:
    with override_settings(
        ROOT_URLCONF=HERE,
        RESPONSES_KIT={
            "BACKEND": lambda: ScriptedBackend(["Hi."]),
            "STORE": MemoryStore(),
            "AUTH": [lambda request: named],
            "OWNER": owner,
        },
    ):
        assert Client().get("/v1/models").status_code == 401


def test_authenticator_returning_anonymous_falls_through() -> None:
    ann = User(pk=7, username="ann")
    gate = auth.OwnerHook(auth=[lambda request: AnonymousUser(), lambda request: ann], permission=None, owner=auth.user)
    assert gate(RequestFactory().get("/")) == "7"


def test_users_of_other_models_with_same_key_are_separate_owners() -> None:
    device: Any = Group(pk=7)
    device.is_authenticated = True
    owners = [auth.user(asked_by(User(pk=7))), auth.user(asked_by(device))]
    assert owners == ["7", "auth.group:7"]


def test_proxy_users_are_same_owner() -> None:
    class Clerk(User):
        class Meta:
            proxy = True
            app_label = "tests"

    assert auth.user(asked_by(Clerk(pk=7))) == "7"


def test_unsaved_users_need_primary_key() -> None:
    assert auth.user(asked_by(SimpleNamespace(pk="machine-7", is_authenticated=True))) == "machine-7"


def test_users_without_primary_key_are_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="has no primary key"):
        auth.user(asked_by(User(username="ann")))


# The admin.


@pytest.mark.parametrize(
    "lookup",
    [
        "input__contains=a",
        "input__regex=(a%2B)%2B$",
        "response__iregex=(a%2B)%2B$",
        "head__contains=a",
        "names__regex=a",
    ],
)
def test_admin_queries_never_match_patterns_in_long_texts(staff: Client, lookup: str) -> None:
    create_row(None, "resp_1")
    with CaptureQueriesContext(connection) as asked:
        answer = staff.get(f"{LIST}?{lookup}")
    assert answer.status_code == 400
    assert not [query for query in asked if "responses_kit_django" in query["sql"]]


def test_admin_list_reads_only_start_of_huge_texts(staff: Client) -> None:
    long = {"type": "message", "role": "user", "content": "a" * queries._MAX_TAIL_BYTES}
    last = {"type": "message", "role": "user", "content": "the end"}
    create_row(None, "resp_long", input=json.dumps([long, last], separators=(",", ":")))
    create_row(None, "resp_short", input=json.dumps([last], separators=(",", ":")))
    shown = staff.get(LIST).content.decode()
    assert shown.count("the end") == 1
    assert "aaaa" in shown


@pytest.mark.parametrize(
    "size",
    [queries._PREVIEW_LENGTH - 1, queries._PREVIEW_LENGTH, queries._PREVIEW_LENGTH + 1, 3 * queries._PREVIEW_LENGTH],
)
def test_non_ascii_text_is_previewed(staff: Client, size: int) -> None:
    items = [{"type": "message", "role": "user", "content": said} for said in ("é" * size, "ça va")]
    create_row(None, "resp_1", input=json.dumps(items, separators=(",", ":"), ensure_ascii=False))
    assert "ça va" in staff.get(LIST).content.decode()


def test_search_reads_start_of_texts(staff: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "_MAX_SEARCHED_LENGTH", 100)
    create_row(None, "resp_near", input=json.dumps([{"type": "message", "content": "zebra"}]))
    create_row(None, "resp_far", input=json.dumps([{"type": "message", "content": "-" * 100 + "zebra"}]))
    shown = staff.get(LIST, {"q": "zebra"}).content.decode()
    assert "resp_near" in shown
    assert "resp_far" not in shown
