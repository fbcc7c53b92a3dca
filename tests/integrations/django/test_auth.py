"""Tests of authentication: sessions and CSRF tokens, keys, classes of Django REST framework, and hooks of all kinds."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from .databases import configure

configure()

from asgiref.sync import async_to_sync  # noqa: E402  # Django's settings come first
from django.contrib.auth.models import User  # noqa: E402  # Django's models come after its settings
from django.core.exceptions import (  # noqa: E402
    BadRequest,
    ImproperlyConfigured,
    PermissionDenied,
    SuspiciousOperation,
)
from django.db import connection, transaction  # noqa: E402
from django.http import Http404, HttpRequest, HttpResponse  # noqa: E402
from django.middleware.csrf import get_token  # noqa: E402
from django.test import AsyncClient, Client, override_settings  # noqa: E402
from django.urls import include, path  # noqa: E402
from rest_framework import exceptions  # noqa: E402
from rest_framework.authentication import BaseAuthentication  # noqa: E402

from responses_kit_django.auth import bearer_token  # noqa: E402
from responses_kit_django.conf import Conf, get_kit  # noqa: E402

HERE = __name__


def page(request: HttpRequest) -> HttpResponse:
    """A view of the project with a form."""
    return HttpResponse(get_token(request))


urlpatterns = [path("page/", page), path("v1/", include("responses_kit_django.urls"))]


class Site:
    """A client of the project, over WSGI or ASGI."""

    def __init__(self, interface: str, **defaults: Any) -> None:
        self.interface = interface
        self.client: Any = (Client if interface == "wsgi" else AsyncClient)(enforce_csrf_checks=True, **defaults)

    def login(self, user: User) -> None:
        self.client.force_login(user)

    def send(self, method: str, where: str, body: Any = None, *, media: str = "application/json", **more: Any) -> Any:
        data = {} if method == "get" else {"data": body, "content_type": media}
        act = getattr(self.client, method)
        return (act if self.interface == "wsgi" else async_to_sync(act))(where, **data, **more)

    def ask(self, text: str = "Hello?", **more: Any) -> Any:
        return self.send("post", "/v1/responses", {"input": text}, **more)

    def token(self) -> dict[str, str]:
        """Return the header with the CSRF token, as pages of the project send it."""
        self.send("get", "/page/")
        return {"X-CSRFToken": self.client.cookies["csrftoken"].value}


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> Site:
    return Site(request.param)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.fixture
def ann() -> User:
    return User.objects.create_user("ann")


@contextmanager
def project(*middleware: str, **said: Any) -> Iterator[None]:
    """Override the project's settings; the store outlives the event loop of one request."""
    with override_settings(
        ROOT_URLCONF=HERE,
        ALLOWED_HOSTS=["testserver"],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            *middleware,
        ],
        RESPONSES_KIT={"BACKEND": lambda: ScriptedBackend(["Hi."]), "STORE": MemoryStore(), **said},
    ):
        yield


def refusal(answer: Any) -> tuple[int, str, str]:
    """Return the status, code and message of an API error."""
    assert answer["Content-Type"] == "application/json", answer.content
    assert not answer.has_header("Location")
    error = json.loads(answer.content)["error"]
    assert error.keys() == {"type", "code", "message", "param"}
    assert error["message"]
    return answer.status_code, error["code"], error["message"]


NOBODY = (401, "invalid_api_key", "This server needs a valid key or session.")


# Sessions.


def test_session_user_needs_csrf_token_to_write(site: Site, ann: User) -> None:
    with project():
        site.login(ann)
        assert refusal(site.ask())[:2] == (403, "csrf_failed")
        token = site.token()
        answer = site.ask(headers=token)
        assert answer.status_code == 200
        response = answer.json()
        assert list(get_kit().store._final) == [(str(ann.pk), response["id"])]  # type: ignore[attr-defined]

        where = f"/v1/responses/{response['id']}"
        assert site.send("get", where).json() == response
        assert refusal(site.send("delete", where))[:2] == (403, "csrf_failed")
        assert refusal(site.send("post", f"{where}/cancel"))[:2] == (403, "csrf_failed")
        assert refusal(site.send("delete", where, headers={"X-CSRFToken": "x" * 32}))[:2] == (403, "csrf_failed")
        assert site.send("delete", where, headers=token).status_code == 200


def test_csrf_refusal_names_token_header(site: Site, ann: User) -> None:
    with project():
        site.login(ann)
        assert refusal(site.ask())[2] == (
            "The session's CSRF check failed: CSRF cookie not set. Send the token in the header X-CSRFToken."
        )


def test_foreign_origin_is_refused_despite_token(site: Site, ann: User) -> None:
    with project():
        site.login(ann)
        token = site.token()
        foreign = site.ask(headers={**token, "Origin": "https://evil.example"})
        assert refusal(foreign)[:2] == (403, "csrf_failed")
        assert site.ask(headers={**token, "Origin": "http://testserver"}).status_code == 200


def test_https_request_requires_same_origin(site: Site, ann: User) -> None:
    with project():
        site.login(ann)
        token = site.token()
        assert refusal(site.ask(secure=True, headers=token))[:2] == (403, "csrf_failed")
        known = {**token, "Referer": "https://testserver/page/"}
        assert site.ask(secure=True, headers=known).status_code == 200


@pytest.mark.parametrize("media", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"])
def test_foreign_forms_are_refused(site: Site, ann: User, media: str) -> None:
    with project():
        site.login(ann)
        site.token()
        answer = site.send("post", "/v1/responses", b'{"input": "Hello?"}', media=media)
        assert refusal(answer)[0] == (
            400 if media == "multipart/form-data" else 403
        )  # a multipart body without a boundary
        assert not get_kit().store._final  # type: ignore[attr-defined]


def test_anonymous_request_gets_json_401_despite_login_middleware(site: Site) -> None:
    with project("django.contrib.auth.middleware.LoginRequiredMiddleware"):
        assert refusal(site.ask()) == NOBODY
        assert refusal(site.send("get", "/v1/models")) == NOBODY
        assert refusal(site.send("get", "/v1/responses/resp_1")) == NOBODY
        assert site.send("get", "/page/").status_code == 302


def test_session_user_passes_login_middleware(site: Site, ann: User) -> None:
    with project("django.contrib.auth.middleware.LoginRequiredMiddleware"):
        site.login(ann)
        assert site.send("get", "/v1/models").status_code == 200


@pytest.mark.parametrize("backend", ["ModelBackend", "AllowAllUsersModelBackend"])
def test_inactive_user_is_anonymous(site: Site, ann: User, backend: str) -> None:
    with override_settings(AUTHENTICATION_BACKENDS=[f"django.contrib.auth.backends.{backend}"]), project():
        site.login(ann)
        token = site.token()
        assert site.ask(headers=token).status_code == 200
        User.objects.filter(pk=ann.pk).update(is_active=False)
        assert refusal(site.ask(headers=token)) == NOBODY
        assert refusal(site.send("get", "/v1/models")) == NOBODY


def test_missing_session_middleware_means_anonymous(site: Site) -> None:
    with project(), override_settings(MIDDLEWARE=[]):
        assert refusal(site.ask()) == NOBODY


def test_users_see_their_own_responses_only(site: Site, ann: User) -> None:
    with project():
        site.login(ann)
        token = site.token()
        made = site.ask(headers=token).json()["id"]
        bob = Site(site.interface)
        bob.login(User.objects.create_user("bob"))
        token = bob.token()
        unknown = refusal(bob.send("get", "/v1/responses/resp_unknown"))
        assert unknown[0] == 404
        for method, where in (
            ("get", made),
            ("delete", made),
            ("post", f"{made}/cancel"),
            ("get", f"{made}/input_items"),
        ):
            assert refusal(bob.send(method, f"/v1/responses/{where}", headers=token)) == unknown
        body = {"input": "And now?", "previous_response_id": made}
        continued = refusal(bob.send("post", "/v1/responses", body, headers=token))
        assert continued[:2] == (400, "previous_response_not_found")
        assert site.send("get", f"/v1/responses/{made}").status_code == 200


def test_test_client_without_csrf_checks_needs_no_token(ann: User) -> None:
    with project():
        client = Client()
        client.force_login(ann)
        assert client.post("/v1/responses", {"input": "Hi"}, content_type="application/json").status_code == 200


# Keys.


def by_key(request: HttpRequest) -> User | None:
    """An authenticator with the user's name as the key."""
    key = bearer_token(request)
    return User.objects.filter(username=key, is_active=True).first() if key else None


async def by_key_async(request: HttpRequest) -> User | None:
    key = bearer_token(request)
    return await User.objects.filter(username=key, is_active=True).afirst() if key else None


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


HOOKS = [f"{HERE}.by_key", f"{HERE}.by_key_async"]


@pytest.mark.parametrize("hook", HOOKS)
def test_key_needs_no_csrf_token(site: Site, ann: User, hook: str) -> None:
    with project(AUTH=[hook, "responses_kit_django.auth.session"]):
        answer = site.ask(headers=bearer("ann"))
        assert answer.status_code == 200
        assert list(get_kit().store._final) == [(str(ann.pk), answer.json()["id"])]  # type: ignore[attr-defined]
        site.login(User.objects.create_user("bob"))
        response = site.send("get", f"/v1/responses/{answer.json()['id']}", headers=bearer("ann"))
        assert response.status_code == 200  # the key takes precedence over the session of another user


@pytest.mark.parametrize("hook", HOOKS)
def test_wrong_key_discloses_nothing(site: Site, ann: User, hook: str) -> None:
    User.objects.create_user("eve", is_active=False)
    with project(AUTH=[hook]):
        for headers in ({}, bearer("nobody"), bearer("eve"), bearer(""), {"Authorization": "Basic YW5uOg=="}):
            answer = site.ask(headers=headers)
            assert refusal(answer) == NOBODY
            assert b"eve" not in answer.content


def test_wrong_key_falls_back_to_session(site: Site, ann: User) -> None:
    with project(AUTH=[*HOOKS, "responses_kit_django.auth.session"]):
        site.login(ann)
        token = site.token()
        assert site.ask(headers={**token, **bearer("nobody")}).status_code == 200


def test_first_matching_authenticator_wins(site: Site) -> None:
    asked: list[str] = []

    def hook(name: str, answer: Any) -> Callable[[HttpRequest], Any]:
        def ask(request: HttpRequest) -> Any:
            asked.append(name)
            return answer

        return ask

    with project(
        AUTH=[hook("one", None), hook("two", "bob"), hook("three", "eve")], OWNER=lambda request: request.user
    ):
        assert site.ask().status_code == 200
    assert asked == ["one", "two"]


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("BEARER a b", "a b"),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic abc", None),
        ("Bearerabc", None),
        ("", None),
    ],
)
def test_bearer_token_is_parsed(header: str, key: str | None) -> None:
    request = HttpRequest()
    request.META["HTTP_AUTHORIZATION"] = header
    assert bearer_token(request) == key
    assert bearer_token(HttpRequest()) is None


async def who_they_are(request: HttpRequest) -> str:
    user = await request.auser()
    return str(user.username)


@pytest.mark.parametrize("owner", [who_they_are, lambda request: request.user.username])
def test_key_user_replaces_session_user(site: Site, ann: User, owner: Any) -> None:
    with project(AUTH=[by_key], OWNER=owner):
        site.login(User.objects.create_user("bob"))
        made = site.ask(headers=bearer("ann")).json()["id"]
        assert list(get_kit().store._final) == [("ann", made)]  # type: ignore[attr-defined]


# Owners and permissions.


def test_without_owner_hook_responses_are_shared(site: Site, ann: User) -> None:
    User.objects.create_user("bob")
    with project(AUTH=[by_key], OWNER=None):
        made = site.ask(headers=bearer("ann")).json()["id"]
        assert site.send("get", f"/v1/responses/{made}", headers=bearer("bob")).status_code == 200
        assert refusal(site.send("get", f"/v1/responses/{made}")) == NOBODY


def test_without_authenticators_anonymous_requests_are_served(site: Site) -> None:
    with project(AUTH=[], OWNER=None):
        made = site.ask().json()["id"]
        assert site.send("get", f"/v1/responses/{made}").status_code == 200


def team(request: HttpRequest) -> str:
    return request.headers.get("X-Team", "")


async def team_async(request: HttpRequest) -> str:
    await User.objects.acount()
    return team(request)


@pytest.mark.parametrize("hook", [team, team_async])
def test_owner_hook_names_owner(site: Site, ann: User, hook: Any) -> None:
    with project(AUTH=[by_key], OWNER=hook):
        made = site.ask(headers={**bearer("ann"), "X-Team": "red"}).json()["id"]
        assert list(get_kit().store._final) == [("red", made)]  # type: ignore[attr-defined]
        blue = {**bearer("ann"), "X-Team": "blue"}
        assert refusal(site.send("get", f"/v1/responses/{made}", headers=blue))[0] == 404
        assert refusal(site.ask(headers=bearer("ann"))) == NOBODY  # this user is in no team


def test_owner_hook_must_return_string(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with project(AUTH=[], OWNER=lambda request: 17):
        assert refusal(site.ask())[:2] == (500, "server_error")
    assert "the owner hook must return a str" in str(caplog.records[0].exc_info)


async def forbids(request: HttpRequest) -> bool:
    return False


@pytest.mark.parametrize("hook", [lambda request: False, lambda request: None, forbids])
def test_missing_permission_returns_403(site: Site, ann: User, hook: Any) -> None:
    with project(AUTH=[by_key], PERMISSION=hook):
        assert refusal(site.ask(headers=bearer("ann"))) == (403, "forbidden", "You may not use this API.")
        assert refusal(site.ask(headers=bearer("nobody"))) == NOBODY


async def knows_them(request: HttpRequest) -> bool:
    return await User.objects.filter(pk=request.user.pk).aexists()


@pytest.mark.parametrize("hook", [lambda request: request.user.has_perms([]), knows_them])
def test_permission_hook_receives_user(site: Site, ann: User, hook: Any) -> None:
    with project(AUTH=[by_key], PERMISSION=hook):
        assert site.ask(headers=bearer("ann")).status_code == 200


def test_atomic_requests_hold_no_transaction_during_generation(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []
    with project(AUTH=[], OWNER=lambda request: depths.append(len(connection.savepoint_ids)) or "ann"):
        assert site.ask().status_code == 200
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
        assert site.ask().status_code == 200
    assert depths == [len(connection.savepoint_ids)] * 2


# Django REST framework.


class ByKey(BaseAuthentication):
    """An authentication class as in Django REST framework's documentation."""

    def authenticate(self, request: Any) -> Any:
        key = request.headers.get("X-Key")
        if key is None:
            return None
        user = User.objects.filter(username=key).first()
        if user is None:
            raise exceptions.AuthenticationFailed("No such key.")
        return user, {"scope": "read"}


class ByKeyAsync(ByKey):
    async def authenticate(self, request: Any) -> Any:
        return await User.objects.aget(username=request.headers["X-Key"]), {"scope": "read"}


@pytest.mark.parametrize("said", [f"{HERE}.ByKey", ByKey, ByKey(), ByKeyAsync])
def test_drf_authentication_class_sets_user_and_auth(site: Site, ann: User, said: Any) -> None:
    with project(AUTH=[said], PERMISSION=lambda request: request.auth == {"scope": "read"}):
        answer = site.ask(headers={"X-Key": "ann"})
        assert answer.status_code == 200
        assert list(get_kit().store._final) == [(str(ann.pk), answer.json()["id"])]  # type: ignore[attr-defined]


def test_drf_refusal_message_is_kept(site: Site) -> None:
    with project(AUTH=[ByKey]):
        assert refusal(site.ask(headers={"X-Key": "nobody"})) == (401, "invalid_api_key", "No such key.")
        assert refusal(site.ask()) == NOBODY


@override_settings(PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"])  # fast
def test_drf_builtin_classes_work(site: Site, ann: User) -> None:
    ann.set_password("a password")
    ann.save()
    drf = "rest_framework.authentication"
    with project(AUTH=[f"{drf}.BasicAuthentication", f"{drf}.SessionAuthentication"]):
        good, bad = (b64encode(f"ann:{word}".encode()).decode() for word in ("a password", "a guess"))
        assert site.ask(headers={"Authorization": f"Basic {good}"}).status_code == 200
        assert refusal(site.ask(headers={"Authorization": f"Basic {bad}"}))[0] == 401
        site.login(ann)
        assert refusal(site.ask())[:2] == (403, "forbidden")
        assert site.ask(headers=site.token()).status_code == 200


def test_drf_style_class_requires_drf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rest_framework.request", None)
    with pytest.raises(ImproperlyConfigured, match=r"ByKey needs Django REST framework: pip install"):
        Conf({"AUTH": [ByKey]}).build_owner_hook()


@pytest.mark.parametrize("name", ["ModelBackend", "RemoteUserBackend"])
def test_authentication_backend_is_rejected_as_authenticator(name: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"must not contain the login backend {name}"):
        Conf({"AUTH": [f"django.contrib.auth.backends.{name}"]}).build_owner_hook()


# Exceptions of hooks.


class HttpError(Exception):
    """An exception like those of Django Ninja."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (PermissionDenied(), 403, "You may not use this API."),
        (PermissionDenied("Not on Sundays."), 403, "Not on Sundays."),
        (Http404(), 404, "Not found."),
        (Http404("No such team."), 404, "No such team."),
        (SuspiciousOperation("what was suspicious"), 400, "The request is malformed."),
        (BadRequest("what was bad"), 400, "The request is malformed."),
        (exceptions.NotAuthenticated("Who are you?"), 401, "Who are you?"),
        (exceptions.PermissionDenied("No."), 403, "No."),
        (exceptions.Throttled(detail="Slowly."), 429, "Slowly."),
        (exceptions.Throttled(wait=11.2), 429, "Request was throttled. Expected available in 12 seconds."),
        (exceptions.ValidationError({"key": ["Too short.", "Too odd."]}), 400, "Too short."),
        (exceptions.ValidationError([]), 400, "The request was refused."),
        (HttpError(402, "Pay first."), 400, "Pay first."),
        (HttpError(499, ""), 400, "The request was refused."),
        (HttpError(500, "inner workings"), 500, "The server failed. Its log has the reason."),
        (exceptions.APIException("inner workings"), 500, "The server failed. Its log has the reason."),
        (ValueError("inner workings"), 500, "The server failed. Its log has the reason."),
        (SimpleNamespace, 500, "The server failed. Its log has the reason."),
    ],
)
@pytest.mark.parametrize("setting", ["AUTH", "PERMISSION", "OWNER"])
def test_hook_exception_becomes_api_error(site: Site, setting: str, error: Any, status: int, message: str) -> None:
    def hook(request: HttpRequest) -> str:
        raise error

    with project(**{"AUTH": [], "OWNER": None, setting: [hook] if setting == "AUTH" else hook}):
        answer = site.ask()
        assert refusal(answer)[0::2] == (status, message)
        assert answer.headers.get("Retry-After") == (None if status != 429 else "12" if error.wait else "1")
