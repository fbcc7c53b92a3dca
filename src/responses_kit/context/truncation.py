"""What of a conversation fits the model's context window (specification, "`truncation`").

Where the client allows it, the oldest turns are left out: a turn is what lies between one user message and the next.
Instructions, system messages, compactions and the last user message always stay. If that is not enough, the oldest
rounds of calls and outputs within the last turn go too. A call and its output stay or go together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ..errors import ContextLengthExceeded
from ..schema.items import Compaction, ExtensionItem, FunctionCall, FunctionCallOutput, Item, Message
from ..turn import Turn

__all__ = ["fit_to_window", "pairs"]


async def fit_to_window(turn: Turn, window: int | None, count: Callable[[Turn], Awaitable[int | None]]) -> Turn:
    """The turn, or a copy with fewer items that fits.

    With `truncation: auto`, room is left for `max_output_tokens`, or for a quarter of the window where that is not
    set, but never for more than half of the window.

    Args:
        turn: The turn.
        window: Tokens that prompt and answer share, or None where unknown.
        count: How many tokens a turn's prompt takes, or None where nobody can tell. Then the turn is left as it is.

    Raises:
        ContextLengthExceeded: It does not fit, and may not be truncated, or not far enough.
    """
    if window is None:
        return turn
    tokens = await count(turn)
    if tokens is None:
        return turn
    room = window - min(turn.max_output_tokens or window // 4, window // 2)
    if tokens <= room or (turn.truncation == "disabled" and tokens < window):
        return turn
    if turn.truncation == "disabled":
        raise _too_long(tokens, window)
    parts = _droppable(turn.items)

    async def without(number: int) -> tuple[Turn, int]:
        shorter = replace(turn, items=_without(turn.items, parts[:number]))
        return shorter, await count(shorter) or 0

    too_few, enough = 0, len(parts)
    best, tokens = await without(enough)
    if tokens >= window:
        raise _too_long(tokens, window)
    # By halving, since each look costs a tokenization of the conversation.
    while tokens <= room and enough - too_few > 1:
        middle = (too_few + enough) // 2
        shorter, tokens_left = await without(middle)
        if tokens_left > room:
            too_few = middle
        else:
            best, enough = shorter, middle
    return best


def _too_long(tokens: int, window: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"The input has {tokens} tokens; the model has room for {window}, the answer included. Shorten the input."
    )


def _droppable(items: Sequence[Item]) -> list[set[int]]:
    """Places of the items that may go, in parts, the oldest first."""
    users = {place for place, item in enumerate(items) if isinstance(item, Message) and item.role == "user"}
    last = max(users, default=0)
    while last - 1 in users:  # several messages in a row ask together
        last -= 1
    answer = last
    while answer in users:
        answer += 1
    turns = [place for place in range(last) if place == 0 or (place in users and place - 1 not in users)]
    rounds = [place for place in range(answer, len(items)) if place == answer or _begins_round(items, place)]
    parts = [*pairwise([*turns, last]), *pairwise(rounds)]  # the last round is what has to be answered
    return [{place for place in range(*part) if not _stays(items[place])} for part in parts]


def _begins_round(items: Sequence[Item], place: int) -> bool:
    ended = isinstance(items[place - 1], FunctionCallOutput | ExtensionItem)
    return ended and not isinstance(items[place], FunctionCallOutput)


def _stays(item: Item) -> bool:
    return isinstance(item, Compaction) or (isinstance(item, Message) and item.role in ("system", "developer"))


def _without(items: Sequence[Item], parts: Sequence[set[int]]) -> list[Item]:
    gone = set().union(*parts)
    for call, output in pairs(items):
        if call in gone or output in gone:
            gone |= {call, output}
    return [item for place, item in enumerate(items) if place not in gone]


def pairs(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """Places of calls and of their outputs. Small servers give the same call_id again and again."""
    places: dict[str, tuple[list[int], list[int]]] = {}
    for place, item in enumerate(items):
        if isinstance(item, FunctionCall | FunctionCallOutput):
            calls, outputs = places.setdefault(item.call_id, ([], []))
            (calls if isinstance(item, FunctionCall) else outputs).append(place)
    for calls, outputs in places.values():
        yield from zip(calls, outputs, strict=False)
