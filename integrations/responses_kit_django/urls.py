"""`path("v1/", include("responses_kit_django.urls"))`."""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.urls import path

from .views import ResponsesView

if not apps.is_installed("responses_kit_django"):  # whose checks would say so, if they were there
    raise ImproperlyConfigured("add 'responses_kit_django' to INSTALLED_APPS")

app_name = "responses_kit"

urlpatterns = [
    path("", ResponsesView.as_view(), name="root"),
    path("<path:path>", ResponsesView.as_view(), name="api"),
]
