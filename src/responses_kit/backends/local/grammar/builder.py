"""Grammars for the answer to a turn, in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....errors import UnsupportedParameter
from ....schema.items import ExtensionItem, FunctionCall
from ....schema.request import JsonSchema, PlainText
from ....schema.tools import FunctionTool
from ....turn import Turn
from ...parsing.formats import CALL_OPENERS, MARKER_TOKENS, REASONING_TAGS, CallFormat
from .json_schema import schema_to_grammar

__all__ = ["DEFAULT_MAX_CALLS", "build_grammar"]

DEFAULT_MAX_CALLS = 8
"""Calls per answer if the client sets no limit; a small model may not stop by itself."""

_OBJECT: Mapping[str, Any] = {"type": "object"}

_NO_CALL: Mapping[str, Any] = {
    **_OBJECT,
    "properties": {"name": False, "function": False},
    "additionalProperties": True,
}
"""A schema of all objects that the parser does not treat as a call."""


def build_grammar(
    turn: Turn,
    call_format: CallFormat,
    control_tokens: Mapping[str, int],
    find_problem: Callable[[str], str],
    *,
    may_reason: bool = False,
    in_reasoning: bool = False,
) -> str | None:
    """Return the grammar of a turn's answer, or None if the answer may be any text.

    The grammar allows:

    - only calls, if the model must call a tool;
    - text or JSON in the requested format, then calls, if it may call a tool;
    - only JSON, if the format is JSON and it may not call;
    - text that does not look like a call, if it may not call, but the conversation contains calls. Without this rule,
      a model that has called tools continues to do so, and its calls would become text.

    Calls name tools that the model may call, have arguments that satisfy the tool's schema, end the answer, and number
    at most `max_calls` or `DEFAULT_MAX_CALLS`. Reasoning may precede the answer.

    `text.format` and the parameters of functions with `strict` are enforced completely. For other functions, keywords
    that a grammar cannot express are ignored.

    Args:
        turn: The turn.
        call_format: The format in which the model writes calls.
        control_tokens: The ids of control tokens by their text.
        find_problem: Returns llguidance's error message about a grammar, or an empty string if the grammar is valid.
        may_reason: Whether the model may begin with a span of reasoning.
        in_reasoning: Whether the prompt ends within a span of reasoning.

    Raises:
        UnsupportedParameter: A grammar cannot express a schema; `param` identifies the schema.
    """
    writer = _GrammarWriter(control_tokens)
    callable_tools = turn.callable_tools
    answer = _format_rule(turn, find_problem)
    if callable_tools:
        max_calls = DEFAULT_MAX_CALLS if turn.max_calls is None else turn.max_calls
        calls = _CallRules(writer, call_format, max_calls, beside_json=answer is not None and not turn.must_call)
        for tool in callable_tools:
            calls.add(tool, _parameters_rule(tool, turn.tools, find_problem))
        if turn.must_call:
            answer = calls.only_calls()
        elif answer is not None:
            answer = f"{answer} | {calls.only_calls()}"
        else:
            answer = calls.text_and_calls(after_reasoning=may_reason or in_reasoning)
    elif answer is None and any(isinstance(item, FunctionCall | ExtensionItem) for item in turn.items):
        answer = _add_text_rule(writer, ("<tool", *CALL_OPENERS), '[^"]*', after_reasoning=may_reason or in_reasoning)
    if answer is None:
        return None
    writer.add_rule("answer", answer)
    return writer.build(_add_reasoning_rule(writer, may_reason, in_reasoning) + "answer")


def _format_rule(turn: Turn, find_problem: Callable[[str], str]) -> str | None:
    text_format = turn.text_format
    if isinstance(text_format, PlainText):
        return None
    schema: Mapping[str, Any] = _NO_CALL if turn.callable_tools else _OBJECT
    if isinstance(text_format, JsonSchema) and text_format.schema_ is not None:
        schema = text_format.schema_
    return schema_to_grammar(schema, strict=True, param="text.format.schema", find_problem=find_problem)


def _parameters_rule(tool: FunctionTool, tools: Sequence[FunctionTool], find_problem: Callable[[str], str]) -> str:
    """Return the rule for the arguments of a call, which are an object even if the schema allows other types."""
    schema: Mapping[str, Any] = tool.parameters or _OBJECT
    param = f"tools[{next(i for i, other in enumerate(tools) if other is tool)}].parameters"
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise UnsupportedParameter(f"'{param}' must be the schema of an object.", param=param)
    return schema_to_grammar(
        {**schema, "type": "object"}, strict=tool.strict is True, param=param, find_problem=find_problem
    )


def _add_reasoning_rule(writer: _GrammarWriter, may_reason: bool, in_reasoning: bool) -> str:
    """Add rules for reasoning and the line breaks after it, and return the beginning of the start rule."""
    if not (may_reason or in_reasoning):
        return ""
    writer.add_rule("BREAK", r"/\n{0,2}/")
    spans = []
    for number, (opener, closer) in enumerate(REASONING_TAGS.items()):
        rest = writer.add_until(f"reasoning_{number}", closer, r"/(?s:.*)/")
        spans.append(f"{rest} BREAK" if in_reasoning else f"{writer.literal(opener)} {rest} BREAK")
    writer.add_rule("reasoning", " | ".join(spans))
    return "reasoning " if in_reasoning else "reasoning? "


def _add_text_rule(writer: _GrammarWriter, openers: Sequence[str], names: str, *, after_reasoning: bool) -> str:
    """Add a rule for text that contains no call, and return its name.

    Args:
        writer: Collects the rules.
        openers: Texts that open calls.
        names: A pattern for the names in JSON objects that are calls.
        after_reasoning: Whether reasoning may precede the text, which then must not begin with a reasoning tag.
    """
    bare_call = rf"\s*(```\w*\s*)?(\[\s*)?\{{.*\"name\"\s*:\s*\"({names})\".*".replace("/", r"\/")
    excluded = [f".*({'|'.join(map(re.escape, openers))}).*", bare_call]
    if after_reasoning:
        excluded.append(f"({'|'.join(REASONING_TAGS)}).*")
    writer.add_rule("TEXT", " & ".join(["/(?s:.*)/", *(f"~/(?s:{pattern})/" for pattern in excluded)]))
    return "TEXT"


class _GrammarWriter:
    """The rules of a grammar under construction."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._markers = {text: control_tokens[text] for text in MARKER_TOKENS if text in control_tokens}
        self._rules: dict[str, str] = {}

    def add_rule(self, name: str, body: str) -> None:
        """Add a rule, or replace the rule of that name."""
        self._rules[name] = body

    def build(self, start: str) -> str:
        """Return the grammar with a start rule."""
        return "\n".join(
            ["%llguidance {}", f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]
        )

    def literal(self, text: str) -> str:
        """Return terms that match a text; markers that are control tokens match by their ids."""
        if not text:
            return ""
        pieces = re.split(f"({'|'.join(map(re.escape, self._markers)) or '(?!)'})", text)
        return " ".join(
            f"<[{self._markers[piece]}]>" if piece in self._markers else json.dumps(piece) for piece in pieces if piece
        )

    def add_until(self, name: str, marker: str, text: str) -> str:
        """Add a rule for text up to and including a marker, as a control token or as text, and return a term for it.

        Args:
            name: The prefix of the rule's name.
            marker: The marker.
            text: The rule for the text.
        """
        self.add_rule(f"{name}_spelled[lazy]", f"{text} {json.dumps(marker)}")
        if marker not in self._markers:
            return f"{name}_spelled"
        return f"({name}_spelled | {text} <[{self._markers[marker]}]>)"


class _CallRules:
    """The rules of calls in a format.

    The lexer does not backtrack: as soon as it has read more than one of several terminals matches, it excludes that
    terminal. The beginning of a call is therefore one terminal if text is an alternative, and consists of JSON's own
    terminals if JSON is the alternative.
    """

    def __init__(self, writer: _GrammarWriter, call_format: CallFormat, max_calls: int, *, beside_json: bool) -> None:
        self._writer = writer
        self._format = call_format
        self._max_further_calls = max_calls - 1
        self._split_terminals = beside_json and not call_format.opener
        self._names: list[str] = []

    def add(self, tool: FunctionTool, arguments: str) -> None:
        """Add the rules for calls of a tool, with the rule for its arguments."""
        number, call_format, writer = len(self._names), self._format, self._writer
        self._names.append(tool.name)
        writer.add_rule(f"arguments_{number}", arguments)
        rest = f"arguments_{number} {writer.literal(call_format.after_arguments)}"
        name = tool.name + call_format.before_arguments
        beginning = call_format.before_calls + call_format.before_name
        terminals = (
            re.findall(r'"[^"]*"|[^"]+?(?=")|[^"]+$', beginning + name) if self._split_terminals else [beginning + name]
        )
        writer.add_rule(f"first_{number}", " ".join([*map(writer.literal, terminals), rest]))
        further = writer.literal(call_format.separator + call_format.before_name + name)
        writer.add_rule(f"more_{number}", f"{further} {rest}")
        if call_format.opener:
            after_opener = writer.literal(beginning.removeprefix(call_format.opener) + name)
            writer.add_rule(f"rest_{number}", f"{after_opener} {rest}")

    def only_calls(self) -> str:
        """Return a term for calls without text."""
        return self._sequence(self._any_tool("first"))

    def text_and_calls(self, *, after_reasoning: bool) -> str:
        """Return a term for text, optionally followed by calls; or for text or calls, if calls have no opener."""
        opener = self._format.opener
        # The parser accepts calls in other formats, too, so the grammar must exclude their openers.
        others = [other for other in CALL_OPENERS if other != opener]
        names = "|".join(map(re.escape, self._names))
        _add_text_rule(self._writer, others, names, after_reasoning=after_reasoning)
        if not opener:
            return f"TEXT | {self.only_calls()}"
        return (
            f"TEXT | {self._sequence(self._writer.add_until('opened', opener, 'TEXT') + ' ' + self._any_tool('rest'))}"
        )

    def _any_tool(self, kind: str) -> str:
        return "(" + " | ".join(f"{kind}_{number}" for number in range(len(self._names))) + ")"

    def _sequence(self, first: str) -> str:
        """Return a term for a first call and further ones up to the limit."""
        further = f"{self._any_tool('more')}{{0,{self._max_further_calls}}}" if self._max_further_calls else ""
        end = self._writer.literal(self._format.after_calls)
        # A model may write the separator after the last call, too.
        trailing_break = r"/\n{0,2}/" if self._format.separator == "\n" else ""
        return " ".join(part for part in (first, further, end, trailing_break) if part)
