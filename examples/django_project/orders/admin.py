"""The admin of the shop's own models. Responses have the kit's admin."""

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest

from .models import ApiKey, Order, Usage

admin.site.register(Order, list_display=["number", "customer", "article", "status", "due"], list_filter=["status"])
admin.site.register(Usage, list_display=["user", "responses", "input_tokens", "output_tokens"])


@admin.register(ApiKey)
class ApiKeyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic in the type stubs only
    list_display = ["name", "user", "created"]

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        if not change:
            messages.warning(request, f"The key, which is not shown again: {obj.generate()}")
        super().save_model(request, obj, form, change)
