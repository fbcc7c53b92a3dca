"""What answers in the chat: rules that look into the database. `with_model` has a model do it."""

import asyncio
import re
from collections.abc import AsyncIterator

from django.utils.formats import date_format

from responses_kit import Backend, Turn, outputs

from .models import Order

HELP = "I know where orders are. Ask me “Where is my order 17?”, or to list your orders."


class Assistant(Backend):
    """Streams its answer word by word, as a model would."""

    models = ["shop-assistant"]
    pause = 0.05  # seconds from one word to the next

    async def generate(self, turn: Turn) -> AsyncIterator[outputs.Output]:
        words = re.findall(r"\S+\s*", await answer(turn))
        for word in words:
            yield word
            await asyncio.sleep(self.pause)
        yield outputs.Usage(input_tokens=len(turn.text.split()), output_tokens=len(words))


async def answer(turn: Turn) -> str:
    """The whole answer. `turn.owner` is the primary key of who asks: nobody else's orders are looked at."""
    orders = Order.objects.filter(customer=int(turn.owner)).order_by("number")
    number = number_in(turn.text)
    if number is None and re.search(r"\borders\b", turn.text, re.IGNORECASE):
        lines = [f"- {described(order)}" async for order in orders]
        return "\n".join(["These are your orders:", *lines]) if lines else "You have no orders yet."
    if number is None and re.search(r"\b(it|when|where)\b", turn.text, re.IGNORECASE):  # "And when will it be here?"
        number = next(filter(None, map(number_in, reversed(asked_before(turn)))), None)
    if number is None:
        return HELP
    order = await orders.filter(number=number).afirst()
    return f"{described(order)}." if order else f"You have no order {number}."


def described(order: Order) -> str:
    when = "on" if order.status == Order.Status.DELIVERED else "and should be with you on"
    return f"{order} {when} {date_format(order.due, 'l, j F')}"


def number_in(text: str) -> int | None:
    found = re.search(r"\b\d{1,9}\b", text)
    return int(found[0]) if found else None


def asked_before(turn: Turn) -> list[str]:
    """What the user has asked in this conversation: the kit has loaded all of it."""
    return [str(message["content"]) for message in turn.messages() if message["role"] == "user"]
