"""Who asks, and whose responses they may see.

The setting `AUTH` lists authenticators, functions of Django's request that return a user, or None for "I can't tell".
They are asked in turn, and whom the first of them names becomes `request.user`. Classes in the manner of Django REST
framework's, with a method `authenticate`, may stand there, too. All hooks may be plain, and use the ORM, or async.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

from asgiref.sync import async_to_sync
from django.contrib.auth import get_user_model
from django.core.exceptions import BadRequest, ImproperlyConfigured, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.middleware.csrf import CsrfViewMiddleware
from django.utils.module_loading import import_string

from responses_kit.errors import APIError, Forbidden, TooManyRequests, error_for_status

from .scope import give_back

__all__ = ["Gate", "Hook", "bearer_token", "refused", "session", "user"]

Hook = Callable[[HttpRequest], Any]
"""What the project says of a request; where it returns an awaitable, that is waited for."""


def session(request: HttpRequest) -> Any:
    """Whoever is logged in by Django's session, or was named by middleware. What they change needs the CSRF token."""
    who = getattr(request, "user", None)
    if not _is_somebody(who):
        return None
    check = _Csrf(_view)
    check.process_request(request)
    reason = check.process_view(request, _view, (), {})
    if reason is not None:
        raise Forbidden(
            f"The session's CSRF check failed: {reason} Send the token as the header X-CSRFToken.", code="csrf_failed"
        )
    return who


def _view(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


class _Csrf(CsrfViewMiddleware):
    def _reject(self, request: HttpRequest, reason: str) -> Any:
        return reason


def bearer_token(request: HttpRequest) -> str | None:
    """The key in `Authorization: Bearer ...`, which is how SDKs send what they call the API key; for your own hooks."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def user(request: HttpRequest) -> str | None:
    """The default `OWNER`: the primary key of `request.user`, who has to be somebody.

    With the model before it, as in "devices.device:1", where that is none of the project's users: another model's
    keys are numbers, too.
    """
    who: Any = getattr(request, "user", None)
    if not _is_somebody(who):
        return None
    if who.pk is None:
        raise ImproperlyConfigured("request.user is not in the database: name an OWNER that tells such users apart")
    about: Any = getattr(who, "_meta", None)
    ours: Any = get_user_model()
    if about is None or issubclass(about.concrete_model, ours._meta.concrete_model):
        return str(who.pk)
    return f"{about.concrete_model._meta.label_lower}:{who.pk}"


def _is_somebody(who: Any) -> bool:
    """Whether this is a user, and one that has not been switched off."""
    return bool(who) and getattr(who, "is_authenticated", True) and getattr(who, "is_active", True)


class Gate:
    """Says whose responses a request may see; None for nobody's. Called in a thread in which the ORM may be used.

    Args:
        auth: As the setting of that name.
        permission: As the setting of that name.
        owner: As the setting of that name.

    Raises:
        ImproperlyConfigured: One of them is nothing that can be asked.
    """

    def __init__(self, *, auth: Iterable[Any], permission: Any, owner: Any) -> None:
        self._auth = [_authenticator(one) for one in auth]
        self._permission = None if permission is None else _function("PERMISSION", permission)
        self._owner = None if owner is None else _function("OWNER", owner)

    def __call__(self, request: HttpRequest) -> str | None:
        """Asks the hooks.

        Raises:
            Forbidden: The permission hook says no.
        """
        try:
            if self._auth:
                who = next((found for one in self._auth if _is_somebody(found := _waited_for(one(request)))), None)
                if who is None:
                    return None
                request.user = who
                request.auser = functools.partial(_given, who)  # or it would be the session's
            if self._permission is not None and not _waited_for(self._permission(request)):
                raise Forbidden("You may not use this API.")
            return "everybody" if self._owner is None else _waited_for(self._owner(request))
        finally:
            give_back(old=True)  # an answer may take long, and needs none meanwhile


async def _given(who: Any) -> Any:
    return who


def _function(setting: str, hook: Any) -> Hook:
    if isinstance(hook, type) or not callable(hook):
        raise ImproperlyConfigured(f"RESPONSES_KIT[{setting!r}]: {_kind(hook)} is no function of the request")
    return hook  # type: ignore[no-any-return]  # what it returns is the project's matter


def _authenticator(hook: Any) -> Hook:
    found = hook() if isinstance(hook, type) and hasattr(hook, "authenticate") else hook
    if hasattr(found, "get_user_permissions"):
        raise ImproperlyConfigured(
            f"RESPONSES_KIT['AUTH']: {_kind(found)} is for AUTHENTICATION_BACKENDS, with which people log in;"
            " who has logged in is found by 'responses_kit_django.auth.session'"
        )
    if not hasattr(found, "authenticate"):
        return _function("AUTH", found)
    try:
        request_class = import_string("rest_framework.request.Request")
    except ImportError as missing:
        raise ImproperlyConfigured(
            f"RESPONSES_KIT['AUTH']: {_kind(found)} needs Django REST framework: pip install djangorestframework"
        ) from missing

    def ask(request: HttpRequest) -> Any:
        answer = _waited_for(found.authenticate(request_class(request, parsers=[_Unread()])))
        if answer is None:
            return None
        who, request.auth = answer  # type: ignore[attr-defined]  # theirs sets it, too: what the key may do
        return who

    return ask


class _Unread:
    """In the place of a parser of DRF's, which would read the body where a CSRF token might be in it."""

    media_type = "*/*"

    def parse(self, *_: Any) -> dict[str, Any]:
        return {}


def _kind(found: Any) -> str:
    return found.__name__ if isinstance(found, type) else type(found).__name__


def _waited_for(answer: Any) -> Any:
    return async_to_sync(_waited)(answer) if inspect.isawaitable(answer) else answer


async def _waited(answer: Any) -> Any:
    return await answer


def refused(error: Exception) -> APIError | None:
    """What an exception of Django's, or of a framework on it, means on the wire; None if it is none of those."""
    if isinstance(error, PermissionDenied):
        return error_for_status(403, str(error) or "You may not use this API.")
    if isinstance(error, Http404):
        return error_for_status(404, str(error) or "There is no such thing.")
    if isinstance(error, SuspiciousOperation | BadRequest | MultiPartParserError):
        return error_for_status(400, "The request cannot be accepted as it is.")
    status = getattr(error, "status_code", None)  # Django REST framework, Django Ninja
    if not isinstance(status, int) or not 400 <= status < 500:
        return None
    said = _first(getattr(error, "detail", error)) or "The request was refused."
    wait = getattr(error, "wait", None)  # Django REST framework's throttles know it
    return (
        TooManyRequests(said, retry_after=math.ceil(wait)) if wait and status == 429 else error_for_status(status, said)
    )


def _first(detail: Any) -> str:
    """What a detail says, or the first of several, which may be by the names of fields."""
    while isinstance(detail, dict | list | tuple):
        detail = next(iter(detail.values() if isinstance(detail, dict) else detail), "")
    return str(detail)
