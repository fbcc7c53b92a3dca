"""System checks of the settings."""

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
from .mounts import get_explicit_kit, iter_views

__all__: list[str] = []

Check = Callable[[Conf], Iterable[CheckMessage]]

_COMPRESSION: Final = re.compile("gzip|brotli|zstd|(?<!de)compress", re.IGNORECASE)


def _register_check(*, deploy: bool = False) -> Callable[[Check], Check]:
    """Register a check that returns no messages if the settings have errors, which `check_settings` reports."""

    def decorate(check: Check) -> Check:
        def run(app_configs: Any, **_: Any) -> list[CheckMessage]:
            try:
                return list(check(Conf()))
            except (ImproperlyConfigured, ConfigurationError):
                return []

        register("responses_kit", deploy=deploy)(run)
        return check

    return decorate


# Errors: no kit can be created.


@register("responses_kit")
def check_settings(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Check that a kit can be created. The backend is imported but not created, because it may load gigabytes."""
    if not hasattr(settings, "RESPONSES_KIT") and any(map(get_explicit_kit, iter_views())):
        return []
    try:
        conf = Conf()
    except ImproperlyConfigured as error:
        return [Error(str(error), id="responses_kit.E001")]
    messages: list[CheckMessage] = []
    for number, check in enumerate((_check_backend, _check_hooks, _check_store, _check_runner, _check_tools), start=2):
        try:
            check(conf)
        except (ImproperlyConfigured, ConfigurationError) as error:
            is_default = check is _check_backend and conf["BACKEND"] == DEFAULTS["BACKEND"]
            if is_default and not hasattr(settings, "RESPONSES_KIT"):
                error = ImproperlyConfigured(
                    f"The setting RESPONSES_KIT is missing, and its default does not work: {error}"
                )
            hint = "Or use your own backend: RESPONSES_KIT = {'BACKEND': 'path.to.Backend'}." if is_default else None
            messages.append(Error(str(error), hint=hint, id=f"responses_kit.E00{number}"))
    return messages


def _check_backend(conf: Conf) -> None:
    backend = conf.import_setting("BACKEND")
    is_class = isinstance(backend, type) and issubclass(backend, Backend)
    if not (is_class or isinstance(backend, Backend) or inspect.isroutine(backend)):
        raise ImproperlyConfigured(
            "RESPONSES_KIT['BACKEND'] must be a subclass of responses_kit.Backend, an instance of one, or a function"
            " that returns one"
        )


def _check_hooks(conf: Conf) -> None:
    conf.build_owner_hook()


def _check_store(conf: Conf) -> ResponseStore | None:
    """Return the store, or None if only creating it would show whether it is valid."""
    address = conf["STORE"]
    if address is None or (isinstance(address, str) and ":" in address):
        return conf.build_store()
    store = conf.import_setting("STORE")
    if isinstance(store, type) or inspect.isroutine(store):
        return None
    check_store(store)
    return conf.build_store()


def _check_runner(conf: Conf) -> None:
    runner = conf.get_runner()
    try:
        store = _check_store(conf)
    except (ImproperlyConfigured, ConfigurationError):
        store = None  # reported as an error of STORE
    check_runner(runner, store)  # type: ignore[arg-type]  # it accepts None
    as_task = getattr(runner, "as_task", None)
    if as_task is not None:
        from . import tasks  # late, because it creates the runner of the settings when it is imported

        as_task(tasks.work_function)


def _check_tools(conf: Conf) -> None:
    for tool in conf.import_setting("TOOLS"):
        if not inspect.isroutine(tool) and not callable(getattr(tool, "tools", None)):
            raise ImproperlyConfigured(
                f"RESPONSES_KIT['TOOLS'] must contain HostedTool instances, toolsets, or functions that return them,"
                f" not {tool!r}"
            )


# Warnings: a kit can be created, but it may not work as intended.


@_register_check()
def check_urls(conf: Conf) -> Iterator[CheckMessage]:
    """Check that the URLconf includes the API."""
    if getattr(settings, "ROOT_URLCONF", None) and not any(True for _ in iter_views()):
        yield Warning(
            "The app responses_kit_django is installed, but the URLconf does not include its API.",
            hint="Add path('v1/', include('responses_kit_django.urls')).",
            id="responses_kit.W001",
        )


@_register_check()
def check_session(conf: Conf) -> Iterator[CheckMessage]:
    """Check that sessions are set up if `AUTH` uses them."""
    if auth.session not in conf.import_setting("AUTH"):
        return
    required = ["django.contrib.auth"]
    if settings.SESSION_ENGINE in ("django.contrib.sessions.backends.db", "django.contrib.sessions.backends.cached_db"):
        required.append("django.contrib.sessions")
    missing = [f"'{app}' in INSTALLED_APPS" for app in required if not apps.is_installed(app)]
    for path in (
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ):
        kind = _try_import(path)
        if not any(isinstance(one, type) and kind and issubclass(one, kind) for one in _import_middleware().values()):
            missing.append(f"{path.rpartition('.')[2]} in MIDDLEWARE")
    if missing:
        yield Warning(
            f"RESPONSES_KIT['AUTH'] contains responses_kit_django.auth.session, which needs {' and '.join(missing)}.",
            hint="Add the missing entries, or set AUTH to authenticators that do not use sessions.",
            id="responses_kit.W002",
        )


@_register_check()
def check_csrf(conf: Conf) -> Iterator[CheckMessage]:
    """Check that requests with session cookies pass a CSRF check."""
    if not conf["AUTH"] and conf.import_setting("OWNER") is auth.user:
        yield Warning(
            "RESPONSES_KIT['AUTH'] is empty while OWNER is the user of the session: there is no CSRF check, so pages of"
            " other sites can send requests on behalf of your users.",
            hint="Add 'responses_kit_django.auth.session' to AUTH, or set OWNER to a function that reads no session.",
            id="responses_kit.W003",
        )


@_register_check()
def check_compression(conf: Conf) -> Iterator[CheckMessage]:
    """Check for compressing middleware. Django's own skips responses that have a Content-Encoding."""
    for path, middleware in _import_middleware().items():
        is_builtin = isinstance(middleware, type) and issubclass(middleware, GZipMiddleware)
        if _COMPRESSION.search(path) and not is_builtin:
            yield Warning(
                f"The middleware {path} may compress streams, which delays their events.",
                hint="Run manage.py responses_kit_check URL against the running server to find out.",
                id="responses_kit.W004",
            )


@_register_check(deploy=True)
def check_memory(conf: Conf) -> Iterator[CheckMessage]:
    """Check that the processes of the server share a store."""
    several = os.environ.get("WEB_CONCURRENCY", "1") not in ("", "0", "1")
    if isinstance(_check_store(conf), MemoryStore) and (several or not settings.DEBUG):
        yield Warning(
            "RESPONSES_KIT['STORE'] is a memory store: processes do not share their responses, and a restart loses all"
            " of them.",
            hint="Remove STORE to store responses in the project's database.",
            id="responses_kit.W005",
        )


@_register_check(deploy=True)
def check_owner(conf: Conf) -> Iterator[CheckMessage]:
    """Check that responses have different owners."""
    if conf["OWNER"] is None:
        yield Warning(
            "RESPONSES_KIT['OWNER'] is None: all clients share one owner, so each can read and delete any response if"
            " it knows the id.",
            hint="Remove OWNER to make request.user the owner, or set it to a function of the request.",
            id="responses_kit.W006",
        )


@_register_check(deploy=True)
def check_workers(conf: Conf) -> Iterator[CheckMessage]:
    """Check that a `TaskRunner` has workers."""
    if not getattr(conf.get_runner(), "has_workers", True):
        yield Warning(
            "RESPONSES_KIT['RUNNER'] is a TaskRunner, but the setting TASKS uses the ImmediateBackend, which has no"
            " workers: background responses run in the web processes.",
            hint="Set TASKS to a backend with workers, such as django_tasks_db.DatabaseBackend.",
            id="responses_kit.W007",
        )


# Helpers.


def _import_middleware() -> dict[str, Any]:
    """Return the middleware by path, without entries that cannot be imported, which Django itself reports."""
    return {path: middleware for path in settings.MIDDLEWARE if (middleware := _try_import(path)) is not None}


def _try_import(path: str) -> Any:
    with suppress(Exception):  # importing may fail in any way, such as on models of an app that is not installed
        return import_string(path)
    return None
