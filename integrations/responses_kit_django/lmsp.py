"""`path("lmsp/v1/", include("responses_kit_django.lmsp"))`: LMSP 1.0 from the project's kit."""

from __future__ import annotations

from responses_kit.http.lmsp import LMSP

from .urls import paths

app_name = "responses_kit_lmsp"

urlpatterns = paths(LMSP)
