"""`path("v1/", include("responses_kit_django.urls"))`."""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.urls import URLPattern, path

from responses_kit.http.open_responses import OpenResponses
from responses_kit.http.router import WireProtocol

from .views import ResponsesView

if not apps.is_installed("responses_kit_django"):  # without the app, its system checks do not run
    raise ImproperlyConfigured("'responses_kit_django' must be in INSTALLED_APPS")


def paths(dialect: type[WireProtocol]) -> list[URLPattern]:
    """Return the URL patterns of a prefix and of all paths below it."""
    view = ResponsesView.as_view(dialect=dialect)
    return [path("", view, name="root"), path("<path:path>", view, name="api")]


app_name = "responses_kit"

urlpatterns = paths(OpenResponses)
