"""The assistant with a model: set SHOP_BACKEND=orders.with_model.ModelAssistant, and install "responses-kit[local]"."""

from collections.abc import Iterator
from dataclasses import replace

from responses_kit import Backend, Turn, outputs
from responses_kit.backends.local import LocalBackend

from .assistant import describe
from .models import Order


class ModelAssistant(Backend):
    """A backend that gives a model the user's orders. It is synchronous, so it runs in its own thread."""

    def __init__(self) -> None:
        self.model = LocalBackend()  # or any other API that streams text
        self.models = self.model.models

    def generate(self, turn: Turn) -> Iterator[outputs.Output]:
        orders = Order.objects.filter(customer=int(turn.owner)).order_by("-number")[:20]
        facts = "\n".join(describe(order) for order in orders) or "The customer has no orders."
        instructions = f"Answer the customer of a shop briefly. These are the customer's orders:\n{facts}"
        yield from self.model.generate(replace(turn, instructions=instructions))

    def close(self) -> None:
        self.model.close()
