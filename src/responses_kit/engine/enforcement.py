"""What a request demands of the model, enforced on what the backend yields (specification, "`tool_choice`").

A backend is told the demands by its `Turn`, and may hold the model to them while it generates. Whether it does or not,
every output passes through here before the machine sees it:

- A call that the request does not allow fails the response: the model was not where the client wanted it.
- A call beyond `max_tool_calls`, or a second one where calls may not be parallel, is suppressed.
- A call that had to be made and was not, an answer that is not in its format, or arguments of a strict function that
  are not valid, fail the response. Only what was cut, and what the model refused, may stay unfinished.

Calls of hosted tools are not for the client: they are collected for the kit to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .. import outputs
from ..context.constraints import Constraints
from ..errors import IllegalOutput, ModelError
from ..outputs import Output
from ..protocol.ids import new_id
from ..protocol.json_schema import Schema
from ..protocol.state_machine import Event
from ..tools import HostedCall
from ..turn import Turn

__all__ = ["Enforcer"]


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A call that may still get arguments."""

    pieces: list[str]
    suppressed: bool = False
    hosted: bool = False
    schema: Schema | None = None


class Enforcer:
    """One round of a response: holds the outputs of one `generate` to its turn.

    Args:
        turn: The round's turn.
        demands: The request's other demands.
        feed: Takes the outputs that pass; the machine's own `feed`.
        before: What earlier rounds have used.

    Attributes:
        hosted: The hosted tools' calls that have to be answered.
        made: How many calls the model made, suppressed ones aside.
        usage: What the response has used so far, once the backend says so.
    """

    def __init__(
        self,
        turn: Turn,
        demands: Constraints,
        feed: Callable[[Output], list[Event]],
        before: outputs.Usage | None = None,
    ) -> None:
        self.hosted: list[HostedCall] = []
        self.made = 0
        self.usage = before
        self._demands = demands
        self._feed = feed
        self._before = before
        self._must_call = turn.must_call
        self._most = turn.max_calls
        self._exhausted = turn.max_tool_calls == 0
        self._allowed = {tool.name for tool in turn.callable_tools}
        self._open: list[_OpenCall] = []
        self._by_id: dict[str, _OpenCall] = {}
        self._text: list[str] | None = None
        self._unformatted = False
        self._answered = False
        self._refused = False
        self._over: str | None = None
        self._free = demands.format is None

    @property
    def handed_over(self) -> bool:
        """Whether functions were called that the client has to run, so that it is the client's turn now."""
        return self.made > len(self.hosted)

    def feed(self, output: Output) -> list[Event]:
        """Takes one output and returns the events it makes.

        Raises:
            ModelError: The model did not keep to the request.
            IllegalOutput: The backend did not keep to its protocol.
        """
        if type(output) is str and self._free:
            return self._feed(output)
        if self._over is not None and not isinstance(output, outputs.Usage):
            raise IllegalOutput(f"{type(output).__name__} after Finish; only Usage may follow it")
        if isinstance(output, outputs.ToolCall):
            return self._take_call(output)
        if isinstance(output, outputs.ToolArguments):
            return self._take_arguments(output)
        if isinstance(output, outputs.Usage):
            return self._take_usage(output)
        if isinstance(output, outputs.Event):
            return self._feed(output)
        if isinstance(output, outputs.Finish):
            return self._take_finish(output)
        self._end_calls()
        if isinstance(output, str | outputs.Text):
            if self._demands.format is not None:
                self._text = self._text or []
                self._text.append(output if isinstance(output, str) else output.text)
        elif isinstance(output, outputs.Refusal):
            self._refused, self._text = True, None
        elif not isinstance(output, outputs.Annotation):
            self._end_text()
            self._unformatted = isinstance(output, outputs.Message) and output.phase == "commentary"
        return self._feed(output)

    def end(self) -> None:
        """The backend has nothing more to say.

        Raises:
            ModelError: What it said is not what the request demands.
        """
        if self._over in _CUT:
            return
        self._end_calls()
        self._end_text()
        if self._refused or self.made:
            return
        if self._must_call:
            raise ModelError("The model did not call the tool that it had to call.", code="tool_call_missing")
        if self._demands.format is not None and not self._answered:
            raise ModelError(_NOT_IN_FORMAT, code="invalid_output_format")

    # Calls.

    def _take_call(self, output: outputs.ToolCall) -> list[Event]:
        if not isinstance(output.name, str) or not isinstance(output.arguments, str):
            raise IllegalOutput("a tool's name and its arguments are str")
        call = _OpenCall([output.arguments])
        if (self._most is not None and self.made >= self._most) or self._exhausted:
            call.suppressed = True
            self._opened(call, output.call_id)
            return []
        if output.name not in self._allowed:
            raise ModelError("The model called a tool that it may not call.", code="tool_not_allowed")
        tool = self._demands.hosted.get(output.name)
        if self._text is not None and not "".join(self._text).strip():
            self._text = None  # some models begin a line before they call
        if tool is None:
            self._end_text()
            events = self._feed(output)
            call.schema = self._demands.arguments.get(output.name)
        else:
            # Its id is ours: a backend may use the same ones again in every round.
            self.hosted.append(HostedCall(tool, new_id("call"), call.pieces))
            call.hosted, events = True, []
        self.made += 1
        self._opened(call, output.call_id)
        return events

    def _opened(self, call: _OpenCall, call_id: str | None) -> None:
        self._open.append(call)
        if call_id is not None:
            self._by_id[call_id] = call
        self._free = False

    def _take_arguments(self, output: outputs.ToolArguments) -> list[Event]:
        call = self._by_id.get(output.call_id) if output.call_id is not None else self._open[-1] if self._open else None
        if call is None:
            raise IllegalOutput("ToolArguments without an open ToolCall")
        if call.suppressed:
            return []
        if not isinstance(output.delta, str):
            raise IllegalOutput(f"text must be str, not {type(output.delta).__name__}")
        call.pieces.append(output.delta)
        return [] if call.hosted else self._feed(output)

    def _end_calls(self, *, cut: bool = False) -> None:
        """The calls are over: what is no call has come. If generation was cut, the last one need not be whole."""
        if not self._open:
            return
        for call in self._open:
            fault = None if call.schema is None else call.schema.fault("".join(call.pieces).strip() or "{}")
            if fault is not None and not (cut and (call is self._open[-1] or fault.keyword == "json")):
                raise ModelError(
                    "The model called a strict function with arguments that its schema does not allow "
                    f"(`{fault.keyword}`).",
                    code="invalid_tool_arguments",
                )
        self._open, self._by_id = [], {}
        self._free = self._demands.format is None

    # The answer's text.

    def _end_text(self) -> None:
        """The message is over; its text has to be what the request demands."""
        text, self._text = self._text, None
        commentary, self._unformatted = self._unformatted, False
        if text is None or commentary or self._demands.format is None:
            return
        fault = self._demands.format.fault("".join(text))
        if fault is not None:
            raise ModelError(f"{_NOT_IN_FORMAT} (`{fault.keyword}`)", code="invalid_output_format")
        self._answered = True

    # The end.

    def _take_finish(self, output: outputs.Finish) -> list[Event]:
        if output.reason == "stop" and self.hosted:
            # A round that ends with hosted calls is not the end of the response.
            events = []
        else:
            events = self._cut() if output.reason in _CUT else []
            events += self._feed(output)
        self._over, self._free = output.reason, False
        return events

    def _cut(self) -> list[Event]:
        """There is no room for answers: a call that was never run leaves no receipt, unless it is what was cut."""
        opened, calls = self._open, self.hosted
        self._end_calls(cut=True)
        self.hosted = []
        if not opened or not opened[-1].hosted:
            return []
        if any(_ANYTHING.fault("".join(call.pieces) or "{}") for call in opened[:-1]):
            return []  # it was another that was cut
        self._end_text()
        return self._feed(calls[-1].receipt("in_progress"))

    def _take_usage(self, usage: outputs.Usage) -> list[Event]:
        events = self._feed(usage)  # which sees to it that these are numbers
        before, self.usage = self._before, usage
        if before is None:
            return events
        self.usage = outputs.Usage(
            before.input_tokens + usage.input_tokens,
            before.output_tokens + usage.output_tokens,
            before.cached_tokens + usage.cached_tokens,
            before.reasoning_tokens + usage.reasoning_tokens,
        )
        return self._feed(self.usage)


_ANYTHING: Final = Schema({})


_CUT: Final = ("max_output_tokens", "content_filter")


_NOT_IN_FORMAT: Final = "The model's answer is not in the format that was asked for."
