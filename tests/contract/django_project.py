"""The project of the Django hosts: a site with its own routes, and the kit under `v1/`. One per process."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from django.db import connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt

from responses_kit import ResponsesKit
from responses_kit.http.lmsp import LMSP
from responses_kit.http.open_responses import OpenResponses

from .hosts import HOST_404

POSTGRES = os.environ.get("RESPONSES_KIT_TEST_POSTGRES")

App = Callable[[Any, Any, Any], Awaitable[None]]


@contextmanager
def django_project(database: str) -> Iterator[None]:
    """Configure the project, with a database that is deleted at the end.

    Args:
        database: "sqlite" or "postgresql".
    """
    creator, name = os.getpid(), f"kit_{secrets.token_hex(6)}"
    place = (_postgres_schema if database == "postgresql" else _sqlite_database)(name)
    _configure(place.__enter__())
    try:
        call_command("migrate", verbosity=0)
        connections.close_all()  # forked processes must not inherit connections
        yield
    finally:
        if os.getpid() == creator:  # forked processes leave the block, too
            place.__exit__(None, None, None)


@contextmanager
def _sqlite_database(name: str) -> Iterator[dict[str, Any]]:
    folder = tempfile.mkdtemp(prefix=name)
    pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
    options = {"init_command": pragmas, "transaction_mode": "IMMEDIATE"}
    yield {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path(folder) / "db.sqlite3"), "OPTIONS": options}
    shutil.rmtree(folder)


@contextmanager
def _postgres_schema(name: str) -> Iterator[dict[str, Any]]:
    import psycopg

    assert POSTGRES is not None, "RESPONSES_KIT_TEST_POSTGRES names no server"
    parts = urlsplit(POSTGRES)
    with psycopg.connect(POSTGRES, autocommit=True) as outside:
        outside.execute(f"CREATE SCHEMA {name}")
    yield {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.removeprefix("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": {"options": f"-c search_path={name} -c synchronous_commit=off"},  # durability is not needed
    }
    with psycopg.connect(POSTGRES, autocommit=True) as outside:
        outside.execute(f"DROP SCHEMA {name} CASCADE")


def _configure(database: dict[str, Any]) -> None:
    settings.configure(
        SECRET_KEY="a secret that is for tests alone, and long enough to be one",
        ALLOWED_HOSTS=["127.0.0.1"],
        DATABASES={"default": database},
        INSTALLED_APPS=[
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "responses_kit_django",
        ],
        MIDDLEWARE=[
            "django.middleware.gzip.GZipMiddleware",
            "django.middleware.security.SecurityMiddleware",
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.common.CommonMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.middleware.clickjacking.XFrameOptionsMiddleware",
        ],
        ROOT_URLCONF=__name__,
        USE_TZ=True,
    )
    django.setup()


@csrf_exempt
def _echo(request: HttpRequest) -> HttpResponse:
    body = request.read()  # unlike `request.body`, without a size limit
    request_data = {
        "method": request.method,
        "path": request.path,
        "root_path": request.META["SCRIPT_NAME"],
        "query": request.META["QUERY_STRING"],
        "length": len(body),
        "body": body[:100].decode(),
    }
    return JsonResponse(request_data, headers={"X-Host": "django"})


def _state(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"started": getattr(request, "scope", {}).get("state", {}).get("started", False)})


def _not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    return HttpResponse(HOST_404, status=404, content_type="text/plain")


handler404 = _not_found
urlpatterns: list[Any] = [path("host/echo", _echo), path("host/state", _state)]


def _mount(kit: ResponsesKit) -> None:
    from responses_kit_django.views import ResponsesView  # needs the settings

    for prefix, dialect in (("v1/", OpenResponses), ("lmsp/v1/", LMSP)):
        view = ResponsesView.as_view(kit=kit, dialect=dialect)
        urlpatterns.append(path(prefix, include([path("", view), path("<path:path>", view)])))


def under_wsgi(kit: ResponsesKit) -> Any:
    _mount(kit)
    return get_wsgi_application()


def under_asgi(kit: ResponsesKit, *, beside: App) -> App:
    """Return Django with WebSocket mode, beside another ASGI app.

    Args:
        kit: Handles the requests.
        beside: Receives the lifespan events and the WebSockets of the site's own.
    """
    from responses_kit_django.asgi import ResponsesASGI

    _mount(kit)
    site = get_asgi_application()

    async def router(scope: Any, receive: Any, send: Any) -> None:
        await (site if scope["type"] == "http" else beside)(scope, receive, send)

    return ResponsesASGI(router)
