"""`path("v1/", include("responses_kit_django.urls"))`."""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.urls import URLPattern, path

from responses_kit.http.open_responses import OpenResponses
from responses_kit.http.router import WireProtocol

from .views import ResponsesView

if not apps.is_installed("responses_kit_django"):  # whose checks would say so, if they were there
    raise ImproperlyConfigured("add 'responses_kit_django' to INSTALLED_APPS")


def paths(dialect: type[WireProtocol]) -> list[URLPattern]:
    """All that is below a prefix, and the prefix itself."""
    view = ResponsesView.as_view(dialect=dialect)
    return [path("", view, name="root"), path("<path:path>", view, name="api")]


app_name = "responses_kit"

urlpatterns = paths(OpenResponses)
