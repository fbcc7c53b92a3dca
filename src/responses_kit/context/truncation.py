"""Truncation of a conversation to the model's context window (specification, "`truncation`").

If the client allows it, the oldest exchanges are removed; an exchange extends from one user message to the next.
If that is not enough, the oldest rounds of calls and outputs after the last user message are removed, too.
Instructions, system messages, compactions and the last user message always remain. A call and its output are removed
together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ..errors import ContextLengthExceeded
from ..schema.items import Compaction, ExtensionItem, FunctionCall, FunctionCallOutput, Item, Message
from ..turn import Turn

__all__ = ["fit_to_window", "pair_calls"]


async def fit_to_window(turn: Turn, window: int | None, count: Callable[[Turn], Awaitable[int | None]]) -> Turn:
    """Return the turn, or a copy with fewer items that fits the context window.

    With `truncation: auto`, tokens are reserved for `max_output_tokens`, or for a quarter of the window if that is not
    set, but at most for half of the window.

    Args:
        turn: The turn.
        window: The number of tokens for prompt and answer together, or None if unknown.
        count: Returns the number of tokens of a turn's prompt, or None if unknown. Then the turn is not truncated.

    Raises:
        ContextLengthExceeded: The turn does not fit, and truncation is disabled or does not remove enough.
    """
    if window is None:
        return turn
    tokens = await count(turn)
    if tokens is None:
        return turn
    max_prompt_tokens = window - min(turn.max_output_tokens or window // 4, window // 2)
    if tokens <= max_prompt_tokens or (turn.truncation == "disabled" and tokens < window):
        return turn
    if turn.truncation == "disabled":
        raise _too_long(tokens, window)
    parts = _removable_parts(turn.items)

    async def remove(number: int) -> tuple[Turn, int]:
        shorter = replace(turn, items=_remove_parts(turn.items, parts[:number]))
        return shorter, await count(shorter) or 0

    too_few, enough = 0, len(parts)
    best, tokens = await remove(enough)
    if tokens >= window:
        raise _too_long(tokens, window)
    # A binary search, because each step tokenizes the conversation.
    while tokens <= max_prompt_tokens and enough - too_few > 1:
        middle = (too_few + enough) // 2
        shorter, shorter_tokens = await remove(middle)
        if shorter_tokens > max_prompt_tokens:
            too_few = middle
        else:
            best, enough = shorter, middle
    return best


def _too_long(tokens: int, window: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"'input' must fit the context window of {window} tokens together with the answer, but has {tokens} tokens."
    )


def _removable_parts(items: Sequence[Item]) -> list[set[int]]:
    """Return the indices of removable items, grouped into exchanges and rounds, oldest first."""
    users = {index for index, item in enumerate(items) if isinstance(item, Message) and item.role == "user"}
    last = max(users, default=0)
    while last - 1 in users:  # consecutive user messages belong to one exchange
        last -= 1
    answer = last
    while answer in users:
        answer += 1
    exchanges = [index for index in range(last) if index == 0 or (index in users and index - 1 not in users)]
    rounds = [index for index in range(answer, len(items)) if index == answer or _starts_round(items, index)]
    parts = [*pairwise([*exchanges, last]), *pairwise(rounds)]  # without the last round, which has to be answered
    return [{index for index in range(*part) if not _is_protected(items[index])} for part in parts]


def _starts_round(items: Sequence[Item], index: int) -> bool:
    follows_output = isinstance(items[index - 1], FunctionCallOutput | ExtensionItem)
    return follows_output and not isinstance(items[index], FunctionCallOutput)


def _is_protected(item: Item) -> bool:
    return isinstance(item, Compaction) or (isinstance(item, Message) and item.role in ("system", "developer"))


def _remove_parts(items: Sequence[Item], parts: Sequence[set[int]]) -> list[Item]:
    removed = set().union(*parts)
    for call, output in pair_calls(items):
        if call in removed or output in removed:
            removed |= {call, output}
    return [item for index, item in enumerate(items) if index not in removed]


def pair_calls(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """Yield the indices of each call and its output, in order for a `call_id` that occurs repeatedly."""
    indices: dict[str, tuple[list[int], list[int]]] = {}
    for index, item in enumerate(items):
        if isinstance(item, FunctionCall | FunctionCallOutput):
            calls, outputs = indices.setdefault(item.call_id, ([], []))
            (calls if isinstance(item, FunctionCall) else outputs).append(index)
    for calls, outputs in indices.values():
        yield from zip(calls, outputs, strict=False)
