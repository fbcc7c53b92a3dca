"""`path("v1/", include("responses_kit_django.urls"))`."""

from __future__ import annotations

from django.urls import path

from .views import ResponsesView

app_name = "responses_kit"

urlpatterns = [
    path("", ResponsesView.as_view(), name="root"),
    path("<path:path>", ResponsesView.as_view(), name="api"),
]
