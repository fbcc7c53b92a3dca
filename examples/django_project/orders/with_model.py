"""The same with a model: SHOP_BACKEND=orders.with_model.ModelAssistant, and pip install "responses-kit[local]"."""

from collections.abc import Iterator
from dataclasses import replace

from responses_kit import Backend, Turn, outputs
from responses_kit.backends.local import LocalBackend

from .assistant import described
from .models import Order


class ModelAssistant(Backend):
    """Tells a model the user's orders, and passes on what it says. Plain code: it runs in a thread of its own."""

    def __init__(self) -> None:
        self.model = LocalBackend()  # or whatever you have: any API that streams text goes into `generate`
        self.models = self.model.models

    def generate(self, turn: Turn) -> Iterator[outputs.Output]:
        orders = Order.objects.filter(customer=int(turn.owner)).order_by("-number")[:20]
        facts = "\n".join(described(order) for order in orders) or "They have no orders."
        told = f"You answer a shop's customer, shortly. What is known of their orders:\n{facts}"
        yield from self.model.generate(replace(turn, instructions=told))

    def close(self) -> None:
        self.model.close()
