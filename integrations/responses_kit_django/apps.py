"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from responses_kit._concurrency.loop_thread import handle_sigterm_under_server

__all__ = ["ResponsesKitConfig"]


class ResponsesKitConfig(AppConfig):
    """`responses_kit_django` in `INSTALLED_APPS`."""

    name = "responses_kit_django"
    verbose_name = _("Responses")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks and shut the kit down when the server receives a SIGTERM."""
        from . import checks  # noqa: F401  # importing it registers the checks

        handle_sigterm_under_server()
