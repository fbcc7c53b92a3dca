"""Receivers of the kit's signals."""

from typing import Any

from django.db.models import F
from django.dispatch import receiver

from responses_kit_django.signals import response_completed

from .models import Usage


@receiver(response_completed)
def count(owner: str, response: dict[str, Any], **_: Any) -> None:
    """Add the usage of a response to its user's. F expressions avoid lost updates between processes."""
    used = response["usage"] or {"input_tokens": 0, "output_tokens": 0}
    Usage.objects.get_or_create(user_id=owner)
    Usage.objects.filter(user_id=owner).update(
        responses=F("responses") + 1,
        input_tokens=F("input_tokens") + used["input_tokens"],
        output_tokens=F("output_tokens") + used["output_tokens"],
    )
