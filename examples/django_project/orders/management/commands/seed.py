"""The command that creates example data."""

import secrets
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand
from django.utils import timezone

from orders.models import ApiKey, Order

ORDERS = [  # number, customer, article, status, days from today
    (15, "ann", "a red kettle", Order.Status.DELIVERED, -4),
    (16, "bob", "two soup bowls", Order.Status.PACKED, 3),
    (17, "ann", "a blue teapot", Order.Status.SENT, 1),
    (18, "ann", "six tea cups", Order.Status.PACKED, 3),
    (19, "ann", "a bamboo whisk", Order.Status.PLACED, 6),
]


class Command(BaseCommand):
    help = "Creates the customers ann and bob with orders, unless they exist, and prints their passwords and API keys."

    def handle(self, *args: Any, **options: Any) -> None:
        for name in ("ann", "bob"):
            user, is_new = User.objects.get_or_create(username=name)
            if not is_new:
                continue
            user.set_password(password := secrets.token_urlsafe(9))
            user.save()
            key = ApiKey(user=user, name="seed")
            self.stdout.write(f"{name}: password {password}, API key {key.generate()}")
            key.save()
            for number, customer, article, status, days in ORDERS:
                if customer == name:
                    due = timezone.localdate() + timedelta(days=days)
                    Order.objects.create(number=number, customer=user, article=article, status=status, due=due)
