"""A backend without a model that yields scripted outputs and records its turns."""

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
    """A delay before the next step of a script.

    Args:
        seconds: The delay in seconds.
    """

    seconds: float


Step = Output | Pause | BaseException
Script = Iterable[Step] | Callable[[Turn], Iterable[Step]]


class ScriptedBackend(Backend):
    """A backend that yields scripted outputs.

    A script is a list of outputs, pauses, and exceptions to raise.

    Example::

        backend = ScriptedBackend(["Hello, ", "world."])
        backend = ScriptedBackend([ToolCall("add", '{"a": 1}')], ["It is 2."])     # one script per turn
        backend = ScriptedBackend(lambda turn: [turn.text.upper()])                # a script that depends on the turn

    Args:
        scripts: One script per turn; the last one is repeated. A function returns the script for its turn.
        models: The models of the backend. The default is one model, "scripted", with all capabilities.

    Attributes:
        turns: All turns so far, in order.
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
