"""`path("lmsp/v1/", include("responses_kit_django.lmsp"))`: LMSP 1.0, from the project's kit."""

from __future__ import annotations

from django.urls import path

from responses_kit.lmsp import LMSP

from .views import ResponsesView

app_name = "responses_kit_lmsp"

urlpatterns = [
    path("", ResponsesView.as_view(dialect=LMSP), name="root"),
    path("<path:path>", ResponsesView.as_view(dialect=LMSP), name="api"),
]
