"""Measure compaction: the model's tokens of a conversation, and of the window that replaces it.

`python -m tests.benchmarks.compaction [threads]`; the threads are those of the local model, one by default.

The scripted model counts each word as a token and writes summaries of the maximum length, which gives the largest
possible window. Every turn states a fact. The number of facts left in the window measures the quality of the summary.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from responses_kit import Model, ResponsesKit, Turn
from responses_kit.backends.local import LocalBackend
from responses_kit.protocol.encryption import Encryptor
from responses_kit.schema.items import ITEMS, Compaction
from responses_kit.schema.request import PlainText
from responses_kit.testing import ScriptedBackend

SECRET = "the secret of the benchmarks"
TURNS = (10, 50, 200)
WINDOW = 8192


class Scripted(ScriptedBackend):
    """A scripted backend that counts each word as a token."""

    def __init__(self) -> None:
        super().__init__(
            lambda turn: ["so " * (turn.max_output_tokens or 0)], models=[Model("scripted", context_window=WINDOW)]
        )

    async def count_tokens(self, turn: Turn) -> int:
        return sum(len(message["content"].split()) for message in turn.messages())


def conversation(turns: int) -> list[dict[str, Any]]:
    """Return a conversation in which each turn states a distinct number."""
    history = []
    for turn in range(turns):
        question = (
            f"Guest {turn} comes with {fact(turn)} in the register, and would like a room with a view of the harbour."
        )
        answer = f"I have written that down for guest {turn}. The room is on floor {turn % 9}; breakfast is from seven."
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [{"type": "message", **message} for message in history]


def fact(turn: int) -> str:
    """Return the fact that a turn states."""
    return f"number {7919 * (turn + 1) % 100_000}"


def turn_of(model: str, items: list[dict[str, Any]]) -> Turn:
    """Return the turn that the model receives for the items."""
    opened = [_opened(item) if isinstance(item, Compaction) else item for item in ITEMS.validate_python(items)]
    return Turn(model=model, items=opened, text_format=PlainText())


def _opened(item: Compaction) -> Compaction:
    payload = Encryptor([SECRET]).decrypt(item.encrypted_content, kind="compaction", owner="", param="")
    return item.with_summary(payload or "")


async def measure(kit: ResponsesKit, model: str, count: Callable[[Turn], int]) -> None:
    """Print one line per conversation length."""
    for turns in TURNS:
        talk = conversation(turns)
        started = time.perf_counter()
        made = await kit.compact({"model": model, "input": talk})
        seconds = time.perf_counter() - started
        window = turn_of(model, made["output"])
        before, after = count(turn_of(model, talk)), count(window)
        window_text = str(window.messages())
        facts = sum(f"{fact(turn)} " in window_text or f"{fact(turn)}." in window_text for turn in range(turns))
        usage = made["usage"]
        print(
            f"{model}, {turns} turns: {before} tokens become {after} ({after / before:.0%}), with {facts} of {turns} "
            f"facts; it took {usage['input_tokens']} tokens in, {usage['output_tokens']} out, {seconds:.1f} s",
            flush=True,
        )


async def main() -> None:
    """Print all figures."""
    await measure(
        ResponsesKit(Scripted(), secrets=[SECRET]),
        "scripted",
        lambda turn: sum(len(message["content"].split()) for message in turn.messages()),
    )
    backend = LocalBackend(context_length=WINDOW, threads=int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    kit = ResponsesKit(backend, secrets=[SECRET])
    # Not `count_tokens`: for input far above the context length it returns only a lower bound.
    await measure(
        kit, "smollm2", lambda turn: len(backend._tokenizer.encode_prompt(backend._template.render(turn.messages())))
    )
    await kit.aclose()


if __name__ == "__main__":
    asyncio.run(main())
