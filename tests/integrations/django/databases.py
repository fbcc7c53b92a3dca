"""The settings and databases of the Django tests."""

from __future__ import annotations

import atexit
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import django
from django.conf import settings
from django.core.management import call_command
from django.db import connections

__all__ = ["POSTGRES", "configure", "postgres"]

POSTGRES = os.environ.get("RESPONSES_KIT_TEST_POSTGRES")


def configure(databases: dict[str, Any] | None = None) -> None:
    """Configure Django, with empty tables in the SQLite databases `default` and `other`. Further calls do nothing.

    Args:
        databases: The databases of another process, which are used as they are.
    """
    if settings.configured:
        return
    settings.configure(
        SECRET_KEY="a secret that is for tests alone, and long enough to be one",
        DATABASES=_databases() if databases is None else databases,
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "django.contrib.staticfiles",
            "responses_kit_django",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        ROOT_URLCONF="tests.integrations.django.urls",
        STATIC_URL="static/",
        USE_TZ=True,
    )
    django.setup()
    if databases is None:
        for alias in ("default", "other"):
            call_command("migrate", database=alias, verbosity=0)
        connections.close_all()


def _databases() -> dict[str, Any]:
    folder = tempfile.TemporaryDirectory(prefix="responses-kit-")
    atexit.register(folder.cleanup)
    names = ("default", "other")
    databases: dict[str, Any] = {
        name: {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path(folder.name) / f"{name}.db")} for name in names
    }
    if POSTGRES is not None:
        parts = urlsplit(POSTGRES)
        databases["postgres"] = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path.removeprefix("/"),
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": parts.hostname or "",
            "PORT": str(parts.port or ""),
            "OPTIONS": {"options": f"-c search_path=kit_{secrets.token_hex(6)}"},
        }
    return databases


@contextmanager
def postgres() -> Iterator[None]:
    """Create the tables in the database `postgres`, in a schema that is dropped at the end of the block."""
    schema = settings.DATABASES["postgres"]["OPTIONS"]["options"].partition("=")[2]
    connection = connections["postgres"]
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE SCHEMA {schema}")
        call_command("migrate", database="postgres", verbosity=0)
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        connection.close()
