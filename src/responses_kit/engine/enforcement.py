"""Enforcement of a request's constraints on the backend's outputs (specification, "`tool_choice`").

A backend sees the constraints in its `Turn` and may apply them while it generates. In any case every output is checked
here before it reaches the state machine:

- A call of a tool that the request does not allow fails the response.
- A call beyond `max_tool_calls`, or a second one without `parallel_tool_calls`, is suppressed.
- A missing required call or an answer that does not match the requested format fails the response, unless the answer
  was truncated or refused.
- Invalid arguments of a strict function fail the response, unless they were truncated.

Calls of hosted tools are collected for the server to run.
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

_ANY_JSON: Final = Schema({})
"""Rejects only text that is not JSON."""

_TRUNCATED: Final = ("max_output_tokens", "content_filter")
"""Reasons to finish after which calls and answers may be incomplete."""

_INVALID_FORMAT: Final = "The model's answer does not match the requested format"


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A call that may still receive arguments."""

    pieces: list[str]
    is_suppressed: bool = False
    is_hosted: bool = False
    schema: Schema | None = None


class Enforcer:
    """Enforces a request's constraints on the outputs of one round.

    Args:
        turn: The turn of the round.
        constraints: Constraints of the request that are not in the turn.
        feed: Passes an accepted output to the state machine and returns its events.
        previous_usage: Usage of the earlier rounds.

    Attributes:
        hosted_calls: Calls of hosted tools that the server has to run.
        call_count: Number of the model's calls, including hosted ones and excluding suppressed ones.
        usage: Usage of the response up to this round, if the backend reports it.
    """

    def __init__(
        self,
        turn: Turn,
        constraints: Constraints,
        feed: Callable[[Output], list[Event]],
        previous_usage: outputs.Usage | None = None,
    ) -> None:
        self.hosted_calls: list[HostedCall] = []
        self.call_count = 0
        self.usage = previous_usage
        self._constraints = constraints
        self._feed = feed
        self._previous_usage = previous_usage
        self._must_call = turn.must_call
        self._max_calls = turn.max_calls
        self._is_exhausted = turn.max_tool_calls == 0
        self._allowed_names = {tool.name for tool in turn.callable_tools}
        self._open_calls: list[_OpenCall] = []
        self._open_by_id: dict[str, _OpenCall] = {}
        self._text: list[str] | None = None
        self._is_commentary = False
        self._has_answer = False
        self._is_refused = False
        self._finish_reason: str | None = None
        self._is_text_unchecked = constraints.format is None

    @property
    def has_client_calls(self) -> bool:
        """Whether the model called functions that the client has to run, so that the response ends here."""
        return self.call_count > len(self.hosted_calls)

    def feed(self, output: Output) -> list[Event]:
        """Check an output and return its events.

        Raises:
            ModelError: The output violates the request.
            IllegalOutput: The output violates the backend protocol.
        """
        if type(output) is str and self._is_text_unchecked:
            return self._feed(output)
        if self._finish_reason is not None and not isinstance(output, outputs.Usage):
            raise IllegalOutput(f"{type(output).__name__} after Finish; only Usage may follow it")
        if isinstance(output, outputs.ToolCall):
            return self._feed_call(output)
        if isinstance(output, outputs.ToolArguments):
            return self._feed_arguments(output)
        if isinstance(output, outputs.Usage):
            return self._feed_usage(output)
        if isinstance(output, outputs.Event):
            return self._feed(output)
        if isinstance(output, outputs.Finish):
            return self._feed_finish(output)
        self._end_calls()
        if isinstance(output, str | outputs.Text):
            if self._constraints.format is not None:
                self._text = self._text or []
                self._text.append(output if isinstance(output, str) else output.text)
        elif isinstance(output, outputs.Refusal):
            self._is_refused, self._text = True, None
        elif not isinstance(output, outputs.Annotation):
            self._end_text()
            self._is_commentary = isinstance(output, outputs.Message) and output.phase == "commentary"
        return self._feed(output)

    def end(self) -> None:
        """Check the round once the backend has finished.

        Raises:
            ModelError: The outputs violate the request.
        """
        if self._finish_reason in _TRUNCATED:
            return
        self._end_calls()
        self._end_text()
        if self._is_refused or self.call_count:
            return
        if self._must_call:
            raise ModelError("The model did not call the required tool.", code="tool_call_missing")
        if self._constraints.format is not None and not self._has_answer:
            raise ModelError(f"{_INVALID_FORMAT}.", code="invalid_output_format")

    # Calls.

    def _feed_call(self, output: outputs.ToolCall) -> list[Event]:
        if not isinstance(output.name, str) or not isinstance(output.arguments, str):
            raise IllegalOutput("the name and the arguments of a ToolCall must be str")
        call = _OpenCall([output.arguments])
        if (self._max_calls is not None and self.call_count >= self._max_calls) or self._is_exhausted:
            call.is_suppressed = True
            self._register_call(call, output.call_id)
            return []
        if output.name not in self._allowed_names:
            raise ModelError("The model called a tool that the request does not allow.", code="tool_not_allowed")
        tool = self._constraints.hosted.get(output.name)
        if self._text is not None and not "".join(self._text).strip():
            self._text = None  # some models emit whitespace before a call
        if tool is None:
            self._end_text()
            events = self._feed(output)
            call.schema = self._constraints.arguments.get(output.name)
        else:
            # A new id, because a backend may reuse its ids in every round.
            self.hosted_calls.append(HostedCall(tool, new_id("call"), call.pieces))
            call.is_hosted, events = True, []
        self.call_count += 1
        self._register_call(call, output.call_id)
        return events

    def _register_call(self, call: _OpenCall, call_id: str | None) -> None:
        self._open_calls.append(call)
        if call_id is not None:
            self._open_by_id[call_id] = call
        self._is_text_unchecked = False

    def _feed_arguments(self, output: outputs.ToolArguments) -> list[Event]:
        if output.call_id is not None:
            call = self._open_by_id.get(output.call_id)
        else:
            call = self._open_calls[-1] if self._open_calls else None
        if call is None:
            raise IllegalOutput("ToolArguments without an open ToolCall")
        if call.is_suppressed:
            return []
        if not isinstance(output.delta, str):
            raise IllegalOutput(f"the delta of ToolArguments must be str, not {type(output.delta).__name__}")
        call.pieces.append(output.delta)
        return [] if call.is_hosted else self._feed(output)

    def _end_calls(self, *, is_truncated: bool = False) -> None:
        """Close the open calls and check strict arguments; if truncated, the last ones may be incomplete."""
        if not self._open_calls:
            return
        for call in self._open_calls:
            fault = None if call.schema is None else call.schema.validate("".join(call.pieces).strip() or "{}")
            if fault is not None and not (is_truncated and (call is self._open_calls[-1] or fault.keyword == "json")):
                raise ModelError(
                    f"The arguments of a strict function call do not match its schema (`{fault.keyword}`).",
                    code="invalid_tool_arguments",
                )
        self._open_calls, self._open_by_id = [], {}
        self._is_text_unchecked = self._constraints.format is None

    # The answer's text.

    def _end_text(self) -> None:
        """Close the message and check its text against the requested format."""
        text, self._text = self._text, None
        is_commentary, self._is_commentary = self._is_commentary, False
        if text is None or is_commentary or self._constraints.format is None:
            return
        fault = self._constraints.format.validate("".join(text))
        if fault is not None:
            raise ModelError(f"{_INVALID_FORMAT} (`{fault.keyword}`).", code="invalid_output_format")
        self._has_answer = True

    # Finish and usage.

    def _feed_finish(self, output: outputs.Finish) -> list[Event]:
        if output.reason == "stop" and self.hosted_calls:
            # Another round follows the hosted calls.
            events = []
        else:
            events = self._truncate() if output.reason in _TRUNCATED else []
            events += self._feed(output)
        self._finish_reason, self._is_text_unchecked = output.reason, False
        return events

    def _truncate(self) -> list[Event]:
        """Drop the hosted calls, which will not run; return the events of an item that shows a truncated one."""
        opened, calls = self._open_calls, self.hosted_calls
        self._end_calls(is_truncated=True)
        self.hosted_calls = []
        if not opened or not opened[-1].is_hosted:
            return []
        if any(_ANY_JSON.validate("".join(call.pieces) or "{}") for call in opened[:-1]):
            return []  # an earlier call is the truncated one
        self._end_text()
        return self._feed(calls[-1].receipt("in_progress"))

    def _feed_usage(self, usage: outputs.Usage) -> list[Event]:
        events = self._feed(usage)  # also validates the numbers
        previous, self.usage = self._previous_usage, usage
        if previous is None:
            return events
        self.usage = outputs.Usage(
            previous.input_tokens + usage.input_tokens,
            previous.output_tokens + usage.output_tokens,
            previous.cached_tokens + usage.cached_tokens,
            previous.reasoning_tokens + usage.reasoning_tokens,
        )
        return self._feed(self.usage)
