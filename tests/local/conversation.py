"""Turns as the kit would make them, and tiny models to answer them."""

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

KINDS: dict[str, type[Message]] = {
    "user": UserMessage,
    "assistant": AssistantMessage,
    "system": SystemMessage,
    "developer": SystemMessage,
}


def turn(*messages: tuple[str, str] | str, kind: type[Turn] = Turn, **values: Any) -> Turn:
    """A greedy turn; a message is (role, text), or a user's text."""
    pairs = [("user", message) if isinstance(message, str) else message for message in messages]
    items = [KINDS[role].model_validate({"role": role, "content": text}) for role, text in pairs]
    return kind(**{"model": "m", "items": items, "text_format": PlainText(type="text"), "temperature": 0.0} | values)


class Leaver(Turn):
    """A turn whose client leaves when the backend looks for the n-th time, counted from 1."""

    leaves_at: int
    looks: int

    @property
    def cancelled(self) -> bool:
        self.looks += 1
        return self.looks >= self.leaves_at

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self.looks = 0


def leaver(*messages: tuple[str, str] | str, at: int, **values: Any) -> Turn:
    """A turn that is cancelled from the backend's n-th look on."""
    made = turn(*messages, kind=Leaver, **values)
    assert isinstance(made, Leaver)
    made.leaves_at = at
    return made


def outcome(outputs: Iterable[Output]) -> tuple[str, Usage, str]:
    """Text, usage and reason of an answer; fails where they do not come in that order."""
    made = list(outputs)
    reason = "stop"
    if isinstance(made[-1], Finish):
        reason = made.pop().reason
    usage = made.pop()
    assert isinstance(usage, Usage)
    assert all(isinstance(piece, str) and piece for piece in made)
    return "".join(str(piece) for piece in made), usage, reason


def tiny_model(folder: Path, **changes: Any) -> PreparedModel:
    """A tiny model in the form that the engine loads; `changes` are those of `write_tiny`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESPONSES_KIT_CACHE", str(folder / "cache"))
        return prepare(write_tiny(folder / "tiny.gguf", **changes))


def tiny_backend(folder: Path, *, fields: dict[str, Any] | None = None, **options: Any) -> LocalBackend:
    """A backend with a tiny model of random weights: 64 tokens of context, and a token for each of "h", "i", "t"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESPONSES_KIT_CACHE", str(folder / "cache"))
        path = folder / "tiny.gguf"
        if not path.exists():
            write_tiny(path, fields=fields or {})
        # One thread: the engine's threads wait for each other by spinning, which a busy machine makes very slow.
        return LocalBackend(path, **{"threads": 1} | options)
