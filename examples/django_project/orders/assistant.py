"""The backend of the chat, which answers by rules from the database. `with_model` uses a model instead."""

import asyncio
import re
from collections.abc import AsyncIterator

from django.utils.formats import date_format

from responses_kit import Backend, Turn, outputs

from .models import Order

HELP = "I know where orders are. Ask me “Where is my order 17?”, or to list your orders."


class Assistant(Backend):
    """A backend that streams its answer word by word, as a model does."""

    models = ["shop-assistant"]
    pause = 0.05  # seconds between words

    async def generate(self, turn: Turn) -> AsyncIterator[outputs.Output]:
        words = re.findall(r"\S+\s*", await answer(turn))
        for word in words:
            yield word
            await asyncio.sleep(self.pause)
        yield outputs.Usage(input_tokens=len(turn.text.split()), output_tokens=len(words))


async def answer(turn: Turn) -> str:
    """Return the answer. `turn.owner` is the primary key of the user, which restricts the orders."""
    orders = Order.objects.filter(customer=int(turn.owner)).order_by("number")
    number = find_number(turn.text)
    if number is None and re.search(r"\borders\b", turn.text, re.IGNORECASE):
        lines = [f"- {describe(order)}" async for order in orders]
        return "\n".join(["These are your orders:", *lines]) if lines else "You have no orders yet."
    if number is None and re.search(r"\b(it|when|where)\b", turn.text, re.IGNORECASE):  # "And when will it be here?"
        number = next(filter(None, map(find_number, reversed(previous_questions(turn)))), None)
    if number is None:
        return HELP
    order = await orders.filter(number=number).afirst()
    return f"{describe(order)}." if order else f"You have no order {number}."


def describe(order: Order) -> str:
    when = "on" if order.status == Order.Status.DELIVERED else "and should be with you on"
    return f"{order} {when} {date_format(order.due, 'l, j F')}"


def find_number(text: str) -> int | None:
    found = re.search(r"\b\d{1,9}\b", text)
    return int(found[0]) if found else None


def previous_questions(turn: Turn) -> list[str]:
    """Return the user's messages of this conversation, which the kit has loaded."""
    return [str(message["content"]) for message in turn.messages() if message["role"] == "user"]
