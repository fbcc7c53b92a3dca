"""System checks: what is wrong with the settings, or likely to be, is said before the first request."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured
from django.middleware.gzip import GZipMiddleware
from django.utils.module_loading import import_string

from responses_kit.backend import Backend
from responses_kit.errors import ConfigurationError
from responses_kit.kit.settings import check_runner, check_store
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import ResponseStore

from . import auth
from .conf import DEFAULTS, Conf
from .mounts import own_kit, views

__all__: list[str] = []

Check = Callable[[Conf], Iterable[CheckMessage]]

_COMPRESSION: Final = re.compile("gzip|brotli|zstd|(?<!de)compress", re.IGNORECASE)


def _registered(*, deploy: bool = False) -> Callable[[Check], Check]:
    """Registers a check of settings that have none of the errors which `check_settings` finds."""

    def registered(check: Check) -> Check:
        def checked(app_configs: Any, **_: Any) -> list[CheckMessage]:
            try:
                return list(check(Conf()))
            except (ImproperlyConfigured, ConfigurationError):
                return []

        register("responses_kit", deploy=deploy)(checked)
        return check

    return registered


# Errors: no kit can be made of these settings.


@register("responses_kit")
def check_settings(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Whether a kit can be made. The backend is only looked up, since making it may load gigabytes."""
    if not hasattr(settings, "RESPONSES_KIT") and any(map(own_kit, views())):
        return []
    try:
        conf = Conf()
    except ImproperlyConfigured as error:
        return [Error(str(error), id="responses_kit.E001")]
    found: list[CheckMessage] = []
    for number, setting in enumerate((_backend, _hooks, _store, _runner, _tools), start=2):
        try:
            setting(conf)
        except (ImproperlyConfigured, ConfigurationError) as error:
            is_default = setting is _backend and conf["BACKEND"] == DEFAULTS["BACKEND"]
            if is_default and not hasattr(settings, "RESPONSES_KIT"):
                error = ImproperlyConfigured(f"The settings have no RESPONSES_KIT, and the default: {error}")
            hint = "Or name one of your own: RESPONSES_KIT = {'BACKEND': 'path.to.Backend'}." if is_default else None
            found.append(Error(str(error), hint=hint, id=f"responses_kit.E00{number}"))
    return found


def _backend(conf: Conf) -> None:
    found = conf.imported("BACKEND")
    is_class = isinstance(found, type) and issubclass(found, Backend)
    if not (is_class or isinstance(found, Backend) or inspect.isroutine(found)):
        raise ImproperlyConfigured(
            "RESPONSES_KIT['BACKEND'] is no subclass of responses_kit.Backend, no instance of one, and no function that"
            " would make one."
        )


def _hooks(conf: Conf) -> None:
    conf.gate()


def _store(conf: Conf) -> ResponseStore | None:
    """The store, where making it costs nothing."""
    address = conf["STORE"]
    if address is None or (isinstance(address, str) and ":" in address):
        return conf.store()
    found = conf.imported("STORE")
    if isinstance(found, type) or inspect.isroutine(found):
        return None
    check_store(found)
    return conf.store()


def _runner(conf: Conf) -> None:
    runner = conf.runner()
    try:
        store = _store(conf)
    except (ImproperlyConfigured, ConfigurationError):
        store = None  # which is told already
    check_runner(runner, store)  # type: ignore[arg-type]  # it looks for one kind of store
    as_task = getattr(runner, "as_task", None)
    if as_task is not None:
        from . import tasks  # which asks for the runner, too

        as_task(tasks.function)


def _tools(conf: Conf) -> None:
    for found in conf.imported("TOOLS"):
        if not inspect.isroutine(found) and not callable(getattr(found, "tools", None)):
            raise ImproperlyConfigured(
                f"RESPONSES_KIT['TOOLS']: {found!r} is no HostedTool, no toolset, and no function that would make one."
            )


# Warnings: there could be a kit, but not as it should be.


@_registered()
def check_urls(conf: Conf) -> Iterator[CheckMessage]:
    """Whether the API can be reached."""
    if getattr(settings, "ROOT_URLCONF", None) and not any(True for _ in views()):
        yield Warning(
            "The app responses_kit_django is installed, but its API is nowhere in the URLconf.",
            hint="Add path('v1/', include('responses_kit_django.urls')).",
            id="responses_kit.W001",
        )


@_registered()
def check_session(conf: Conf) -> Iterator[CheckMessage]:
    """Whether there are sessions, if they are to say who asks."""
    if auth.session not in conf.imported("AUTH"):
        return
    needed = ["django.contrib.auth"]
    if settings.SESSION_ENGINE in ("django.contrib.sessions.backends.db", "django.contrib.sessions.backends.cached_db"):
        needed.append("django.contrib.sessions")
    lacking = [f"{app} in INSTALLED_APPS" for app in needed if not apps.is_installed(app)]
    for path in (
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ):
        kind = _imported(path)
        if not any(isinstance(found, type) and kind and issubclass(found, kind) for found in _middleware().values()):
            lacking.append(f"{path.rpartition('.')[2]} in MIDDLEWARE")
    if lacking:
        yield Warning(
            f"RESPONSES_KIT['AUTH'] has the session say who asks, but there is no {', no '.join(lacking)}.",
            hint="Add what is missing, or name in AUTH what reads your clients' keys.",
            id="responses_kit.W002",
        )


@_registered()
def check_csrf(conf: Conf) -> Iterator[CheckMessage]:
    """Whether a cookie alone is enough for whoever is logged in."""
    if not conf["AUTH"] and conf.imported("OWNER") is auth.user:
        yield Warning(
            "RESPONSES_KIT['AUTH'] is empty while OWNER is who is logged in: no CSRF token is asked for, so that pages"
            " of other sites can have the browsers of your users act for them.",
            hint="Leave 'responses_kit_django.auth.session' in AUTH, or read no session in OWNER.",
            id="responses_kit.W003",
        )


@_registered()
def check_compression(conf: Conf) -> Iterator[CheckMessage]:
    """Whether a middleware may hold streams back. Django's own lets alone what has a Content-Encoding already."""
    for path, found in _middleware().items():
        is_django_s = isinstance(found, type) and issubclass(found, GZipMiddleware)
        if _COMPRESSION.search(path) and not is_django_s:
            yield Warning(
                f"{path} seems to compress: if it does so with streams, their events come late or all at once.",
                hint="Run manage.py responses_kit_check URL against the running server, which finds out.",
                id="responses_kit.W004",
            )


@_registered(deploy=True)
def check_memory(conf: Conf) -> Iterator[CheckMessage]:
    """Whether processes know of each other's responses."""
    several = os.environ.get("WEB_CONCURRENCY", "1") not in ("", "0", "1")
    if isinstance(_store(conf), MemoryStore) and (several or not settings.DEBUG):
        yield Warning(
            "RESPONSES_KIT['STORE'] is the memory of each process: no other one knows what is there, and a restart"
            " forgets all of it.",
            hint="Leave STORE out, and responses are kept in the project's database.",
            id="responses_kit.W005",
        )


@_registered(deploy=True)
def check_owner(conf: Conf) -> Iterator[CheckMessage]:
    """Whether everybody is one owner."""
    if conf["OWNER"] is None:
        yield Warning(
            "RESPONSES_KIT['OWNER'] is None: everybody who may use the API can read and delete everybody's responses,"
            " if they know the ids.",
            hint="Leave OWNER out, and responses belong to request.user; or name a function of the request.",
            id="responses_kit.W006",
        )


@_registered(deploy=True)
def check_workers(conf: Conf) -> Iterator[CheckMessage]:
    """Whether there is somebody to whom a `TaskRunner` could give anything."""
    if not getattr(conf.runner(), "has_workers", True):
        yield Warning(
            "RESPONSES_KIT['RUNNER'] is for workers of Django's tasks framework, but the setting TASKS names the"
            " ImmediateBackend, which has none: each web process works on its background responses itself.",
            hint="Name a backend with workers in TASKS, such as django_tasks_db.DatabaseBackend.",
            id="responses_kit.W007",
        )


# What is looked at.


def _middleware() -> dict[str, Any]:
    """What the setting `MIDDLEWARE` names, as far as it is there: Django itself tells of the rest."""
    return {path: found for path in settings.MIDDLEWARE if (found := _imported(path)) is not None}


def _imported(path: str) -> Any:
    with suppress(Exception):  # such as that of models whose app is not installed
        return import_string(path)
    return None
