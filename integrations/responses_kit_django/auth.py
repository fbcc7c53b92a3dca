"""Authentication, permissions and owners.

The setting `AUTH` lists authenticators: functions of Django's request that return a user, or None if they do not
recognize the request. They are called in order, and the first user becomes `request.user`. Authentication classes of
Django REST framework, with a method `authenticate`, are accepted, too. All hooks are plain functions, which may use
the ORM, or async ones.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.contrib.auth import get_user_model
from django.core.exceptions import BadRequest, ImproperlyConfigured, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.middleware.csrf import CsrfViewMiddleware
from django.utils.module_loading import import_string

from responses_kit.errors import APIError, Forbidden, TooManyRequests, error_for_status

from .scope import release_connections

__all__ = ["Hook", "OwnerHook", "bearer_token", "error_from_exception", "session", "user"]

Hook = Callable[[HttpRequest], Any]
"""A function of Django's request. An awaitable that it returns is awaited."""


def session(request: HttpRequest) -> Any:
    """Return the user of Django's session, or the one that middleware has set. Unsafe methods need the CSRF token.

    Raises:
        Forbidden: The CSRF check failed.
    """
    user = getattr(request, "user", None)
    if not _is_active_user(user):
        return None
    check = _Csrf(_empty_view)
    check.process_request(request)
    reason = check.process_view(request, _empty_view, (), {})
    if reason is not None:
        raise Forbidden(
            f"The session's CSRF check failed: {reason} Send the token in the header X-CSRFToken.", code="csrf_failed"
        )
    return user


def _empty_view(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


class _Csrf(CsrfViewMiddleware):
    def _reject(self, request: HttpRequest, reason: str) -> Any:
        return reason


def bearer_token(request: HttpRequest) -> str | None:
    """Return the token of `Authorization: Bearer ...`, which is how SDKs send their API key. For your own hooks."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def user(request: HttpRequest) -> str | None:
    """Return the primary key of an authenticated `request.user`, or None. The default `OWNER`.

    The key of an object that is not of the project's user model has that model's label before it, as in
    "devices.device:1", because it could equal the key of a user.

    Raises:
        ImproperlyConfigured: The user is not stored, so it has no primary key.
    """
    user: Any = getattr(request, "user", None)
    if not _is_active_user(user):
        return None
    if user.pk is None:
        raise ImproperlyConfigured(
            "request.user has no primary key: set RESPONSES_KIT['OWNER'] to a function that returns another identifier"
        )
    meta: Any = getattr(user, "_meta", None)
    user_model: Any = get_user_model()
    if meta is None or issubclass(meta.concrete_model, user_model._meta.concrete_model):
        return str(user.pk)
    return f"{meta.concrete_model._meta.label_lower}:{user.pk}"


def _is_active_user(user: Any) -> bool:
    """Return whether a user is authenticated and has not been deactivated."""
    return bool(user) and getattr(user, "is_authenticated", True) and getattr(user, "is_active", True)


_SHARED_OWNER: Final = "everybody"
"""The owner of all responses if the setting `OWNER` is None. It is stored, so it must not change."""


class OwnerHook:
    """The kit's `owner` hook: returns the owner of a request, or None. The kit calls it in a thread with ORM access.

    Args:
        auth: The setting `AUTH`, imported.
        permission: The setting `PERMISSION`, imported.
        owner: The setting `OWNER`, imported.

    Raises:
        ImproperlyConfigured: One of them is not a function of the request.
    """

    def __init__(self, *, auth: Iterable[Any], permission: Any, owner: Any) -> None:
        self._auth = [_wrap_authenticator(one) for one in auth]
        self._permission = None if permission is None else _check_hook("PERMISSION", permission)
        self._owner = None if owner is None else _check_hook("OWNER", owner)

    def __call__(self, request: HttpRequest) -> str | None:
        """Return the owner of a request, or None if it is not authenticated.

        Raises:
            Forbidden: The permission hook returned a false value.
        """
        try:
            if self._auth:
                user = next((found for hook in self._auth if _is_active_user(found := _resolve(hook(request)))), None)
                if user is None:
                    return None
                request.user = user
                request.auser = functools.partial(_return_user, user)  # replaces the one of the session
            if self._permission is not None and not _resolve(self._permission(request)):
                raise Forbidden("You may not use this API.")
            return _SHARED_OWNER if self._owner is None else _resolve(self._owner(request))
        finally:
            release_connections(only_obsolete=True)  # generating the response may take long


async def _return_user(user: Any) -> Any:
    return user


def _check_hook(setting: str, hook: Any) -> Hook:
    if isinstance(hook, type) or not callable(hook):
        raise ImproperlyConfigured(
            f"RESPONSES_KIT[{setting!r}] must be a function of the request, not {_type_name(hook)}"
        )
    return hook  # type: ignore[no-any-return]  # the result of a project's hook has no type


def _wrap_authenticator(hook: Any) -> Hook:
    """Return an authenticator as a function of Django's request that returns a user or None."""
    authenticator = hook() if isinstance(hook, type) and hasattr(hook, "authenticate") else hook
    if hasattr(authenticator, "get_user_permissions"):
        raise ImproperlyConfigured(
            f"RESPONSES_KIT['AUTH'] must not contain the login backend {_type_name(authenticator)}, which belongs in"
            " AUTHENTICATION_BACKENDS; use 'responses_kit_django.auth.session' for logged-in users"
        )
    if not hasattr(authenticator, "authenticate"):
        return _check_hook("AUTH", authenticator)
    try:
        request_class = import_string("rest_framework.request.Request")
    except ImportError as missing:
        raise ImproperlyConfigured(
            f"RESPONSES_KIT['AUTH']: {_type_name(authenticator)} needs Django REST framework:"
            " pip install djangorestframework"
        ) from missing

    def authenticate(request: HttpRequest) -> Any:
        result = _resolve(authenticator.authenticate(request_class(request, parsers=[_NullParser()])))
        if result is None:
            return None
        user, request.auth = result  # type: ignore[attr-defined]  # Django REST framework sets it, too
        return user

    return authenticate


class _NullParser:
    """A parser that keeps the CSRF check of Django REST framework from reading the body."""

    media_type = "*/*"

    def parse(self, *_: Any) -> dict[str, Any]:
        return {}


def _type_name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _resolve(result: Any) -> Any:
    """Return the result of a hook, awaited if it is awaitable."""
    return async_to_sync(_await)(result) if inspect.isawaitable(result) else result


async def _await(result: Any) -> Any:
    return await result


def error_from_exception(error: Exception) -> APIError | None:
    """Return the API error for an exception of Django, Django REST framework or Django Ninja; None for any other."""
    if isinstance(error, PermissionDenied):
        return error_for_status(403, str(error) or "You may not use this API.")
    if isinstance(error, Http404):
        return error_for_status(404, str(error) or "Not found.")
    if isinstance(error, SuspiciousOperation | BadRequest | MultiPartParserError):
        return error_for_status(400, "The request is malformed.")
    status = getattr(error, "status_code", None)  # Django REST framework, Django Ninja
    if not isinstance(status, int) or not 400 <= status < 500:
        return None
    message = _first_message(getattr(error, "detail", error)) or "The request was refused."
    wait = getattr(error, "wait", None)  # seconds, of throttles of Django REST framework
    return (
        TooManyRequests(message, retry_after=math.ceil(wait))
        if wait and status == 429
        else error_for_status(status, message)
    )


def _first_message(detail: Any) -> str:
    """Return the first message of a detail, which may be a text, a list, or a dict of lists by field."""
    while isinstance(detail, dict | list | tuple):
        detail = next(iter(detail.values() if isinstance(detail, dict) else detail), "")
    return str(detail)
