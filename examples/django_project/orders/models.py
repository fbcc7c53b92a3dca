"""Orders, API keys, and each user's usage of the assistant."""

import hashlib
import secrets

from django.conf import settings
from django.db import models


class Order(models.Model):
    class Status(models.TextChoices):
        """The progress of an order."""

        PLACED = "placed", "placed"
        PACKED = "packed", "being packed"
        SENT = "sent", "on its way"
        DELIVERED = "delivered", "delivered"

    number = models.PositiveIntegerField(unique=True)
    customer = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="orders")
    article = models.CharField(max_length=200)
    status = models.CharField(max_length=20, choices=Status, default=Status.PLACED)
    due = models.DateField()

    def __str__(self) -> str:
        state = "was delivered" if self.status == self.Status.DELIVERED else f"is {self.get_status_display()}"
        return f"Order {self.number} ({self.article}) {state}"


class ApiKey(models.Model):
    """A key for a program that acts for a user. Only its digest is stored."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=100, help_text="What it is for.")
    digest = models.CharField(max_length=64, unique=True, editable=False)
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name

    def generate(self) -> str:
        """Generate and return the key. It is long and random, so a fast digest is safe."""
        key = f"shop_{secrets.token_urlsafe(32)}"
        self.digest = self.digest_of(key)
        return key

    @staticmethod
    def digest_of(key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()


class Usage(models.Model):
    """The responses and tokens of a user so far, such as for billing."""

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="usage")
    responses = models.PositiveBigIntegerField(default=0)
    input_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.responses} responses"
