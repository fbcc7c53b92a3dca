"""The shop's own tables in the admin; the responses are there by themselves."""

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest

from .models import ApiKey, Order, Usage

admin.site.register(Order, list_display=["number", "customer", "article", "status", "due"], list_filter=["status"])
admin.site.register(Usage, list_display=["user", "responses", "input_tokens", "output_tokens"])


@admin.register(ApiKey)
class ApiKeyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # which it takes in its stubs alone
    list_display = ["name", "user", "created"]

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        if not change:
            messages.warning(request, f"The key, which is shown only now: {obj.make()}")
        super().save_model(request, obj, form, change)
