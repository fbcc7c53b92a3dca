"""Turns in the form that the kit creates, and backends with tiny models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from responses_kit.backends.local import LocalBackend
from responses_kit.backends.local.model_files import PreparedModel, prepare
from responses_kit.outputs import Finish, Output, Usage
from responses_kit.schema.items import AssistantMessage, Message, SystemMessage, UserMessage
from responses_kit.schema.request import PlainText
from responses_kit.turn import Turn

from .tiny import write_tiny

MESSAGE_TYPES: dict[str, type[Message]] = {
    "user": UserMessage,
    "assistant": AssistantMessage,
    "system": SystemMessage,
    "developer": SystemMessage,
}


def turn(*messages: tuple[str, str] | str, turn_type: type[Turn] = Turn, **values: Any) -> Turn:
    """Return a turn with temperature 0; a message is a pair of role and text, or a user's text."""
    pairs = [("user", message) if isinstance(message, str) else message for message in messages]
    items = [MESSAGE_TYPES[role].model_validate({"role": role, "content": text}) for role, text in pairs]
    return turn_type(
        **{"model": "m", "items": items, "text_format": PlainText(type="text"), "temperature": 0.0} | values
    )


class CancelledTurn(Turn):
    """A turn that is cancelled from the n-th check on, counted from 1."""

    cancelled_at: int
    checks: int

    @property
    def cancelled(self) -> bool:
        self.checks += 1
        return self.checks >= self.cancelled_at

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self.checks = 0


def cancelled_turn(*messages: tuple[str, str] | str, at: int, **values: Any) -> Turn:
    """Return a turn that is cancelled from the backend's n-th check on."""
    cancelled = turn(*messages, turn_type=CancelledTurn, **values)
    assert isinstance(cancelled, CancelledTurn)
    cancelled.cancelled_at = at
    return cancelled


def collect(outputs: Iterable[Output]) -> tuple[str, Usage, str]:
    """Return the text, the usage and the reason of an answer, and assert that they are yielded in this order."""
    items = list(outputs)
    reason = "stop"
    if isinstance(items[-1], Finish):
        reason = items.pop().reason
    usage = items.pop()
    assert isinstance(usage, Usage)
    assert all(isinstance(piece, str) and piece for piece in items)
    return "".join(str(piece) for piece in items), usage, reason


def tiny_model(folder: Path, **changes: Any) -> PreparedModel:
    """Return a tiny model in the form that the engine loads; `changes` are those of `write_tiny`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESPONSES_KIT_CACHE", str(folder / "cache"))
        return prepare(write_tiny(folder / "tiny.gguf", **changes))


def tiny_backend(folder: Path, *, fields: dict[str, Any] | None = None, **options: Any) -> LocalBackend:
    """Return a backend with a tiny model of random weights, 64 tokens of context, and tokens for "h", "i" and "t"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESPONSES_KIT_CACHE", str(folder / "cache"))
        path = folder / "tiny.gguf"
        if not path.exists():
            write_tiny(path, fields=fields or {})
        # One thread: the engine's threads spin while they wait for each other, which is very slow on a busy machine.
        return LocalBackend(path, **{"threads": 1} | options)
