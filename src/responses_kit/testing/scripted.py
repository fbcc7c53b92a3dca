"""A backend without a model: it plays given outputs and remembers the turns it was given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio

from ..backend import Backend, Model
from ..outputs import Output
from ..turn import Turn

__all__ = ["Pause", "ScriptedBackend"]


@dataclass(frozen=True, slots=True)
class Pause:
    """Waits before the script goes on.

    Args:
        seconds: How long.
    """

    seconds: float


Step = Output | Pause | BaseException
Script = Iterable[Step] | Callable[[Turn], Iterable[Step]]


class ScriptedBackend(Backend):
    """Plays scripts. A script is a list of outputs, pauses, and exceptions, which are raised.

    Example::

        backend = ScriptedBackend(["Hello, ", "world."])
        backend = ScriptedBackend([ToolCall("add", '{"a": 1}')], ["It is 2."])     # one for each turn
        backend = ScriptedBackend(lambda turn: [turn.text.upper()])                # or made from the turn

    Args:
        scripts: Played one a turn, the last one again and again. A function makes its script from the turn.
        models: What the backend says it has: by default one model, "scripted", that can do everything.

    Attributes:
        turns: Every turn that was played, in order.
    """

    def __init__(self, *scripts: Script, models: Sequence[str | Model] | None = None) -> None:
        self.models = models or [
            Model("scripted", vision=True, tools=True, reasoning=True, structured_output=True, logprobs=True)
        ]
        self.turns: list[Turn] = []
        self._scripts = [script if callable(script) else list(script) for script in scripts] or [[]]

    async def generate(self, turn: Turn) -> AsyncIterator[Output]:
        script = self._scripts[min(len(self.turns), len(self._scripts) - 1)]
        self.turns.append(turn)
        for step in script(turn) if callable(script) else script:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, Pause):
                await anyio.sleep(step.seconds)
            else:
                yield step
