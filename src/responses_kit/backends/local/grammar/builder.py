"""What a turn demands of an answer, as a grammar that a model is held to token by token.

Grammars are written in llguidance's variant of Lark.
"""

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
from ...parsing.formats import MARKERS, OPENERS, REASONING, CallFormat
from .json_schema import expressed

__all__ = ["MANY", "grammar"]

MANY = 8
"""Calls that a model may make at once where the client sets no bound: a small model does not stop by itself."""

_OBJECT: Mapping[str, Any] = {"type": "object"}

_NO_CALL: Mapping[str, Any] = {
    **_OBJECT,
    "properties": {"name": False, "function": False},
    "additionalProperties": True,
}
"""Any object but one that a reader could take for a call."""


def grammar(
    turn: Turn,
    dialect: CallFormat,
    control: Mapping[str, int],
    problem: Callable[[str], str],
    *,
    reasons: bool = False,
    thinking: bool = False,
) -> str | None:
    """The grammar of a turn's answer, or None where any text will do.

    An answer that must call is nothing but calls. One that may call is text, or JSON in the form that is wanted, and a
    call that it begins is a valid one, to a tool that may be called, with arguments that its schema allows. Calls end
    an answer: nothing follows the last one. At most `max_calls` are made, or `MANY`. One that may not call, where the
    conversation has calls, is text that does not look like one. An answer in JSON is nothing else. In front of all
    that, a model that reasons may do so.

    `text.format` and functions with `strict` are held to exactly. The keywords that a grammar cannot express are left
    out of the other functions' parameters, since these promise no more.

    Args:
        turn: The turn.
        dialect: How the model writes calls.
        control: Control tokens' ids by their text.
        problem: Says what is wrong with a grammar, in llguidance's words; nothing where it works.
        reasons: The model may open a span of reasoning.
        thinking: The prompt has opened one already.

    Raises:
        UnsupportedParameter: A schema that a grammar cannot express; `param` says which one.
    """
    writer = _Writer(control)
    callable_tools = turn.callable_tools
    answer = _form(turn, problem)
    if callable_tools:
        bound = MANY if turn.max_calls is None else turn.max_calls
        calls = _Calls(writer, dialect, bound, beside_json=answer is not None and not turn.must_call)
        for tool in callable_tools:
            calls.add(tool, _parameters(tool, turn.tools, problem))
        if turn.must_call:
            answer = calls.alone()
        elif answer is not None:
            answer = f"{answer} | {calls.alone()}"
        else:
            answer = calls.within_text(thoughts=reasons or thinking)
    elif answer is None and any(isinstance(item, FunctionCall | ExtensionItem) for item in turn.items):
        # Who has called before goes on calling, and where that is no call any more it would be shown as text.
        answer = _text(writer, ("<tool", *OPENERS), '[^"]*', thoughts=reasons or thinking)
    if answer is None:
        return None
    writer.rule("answer", answer)
    return writer.text(_thought(writer, reasons, thinking) + "answer")


def _form(turn: Turn, problem: Callable[[str], str]) -> str | None:
    form = turn.text_format
    if isinstance(form, PlainText):
        return None
    schema: Mapping[str, Any] = _NO_CALL if turn.callable_tools else _OBJECT
    if isinstance(form, JsonSchema) and form.schema_ is not None:
        schema = form.schema_
    return expressed(schema, exactly=True, param="text.format.schema", problem=problem)


def _parameters(tool: FunctionTool, tools: Sequence[FunctionTool], problem: Callable[[str], str]) -> str:
    """The arguments of a call: an object, whatever else the schema would allow."""
    schema: Mapping[str, Any] = tool.parameters or _OBJECT
    param = f"tools[{next(i for i, other in enumerate(tools) if other is tool)}].parameters"
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise UnsupportedParameter("A function's parameters must be an object.", param=param)
    return expressed({**schema, "type": "object"}, exactly=tool.strict is True, param=param, problem=problem)


def _thought(writer: _Writer, reasons: bool, thinking: bool) -> str:
    """What an answer may begin with: reasoning, and the line breaks behind it."""
    if not (reasons or thinking):
        return ""
    writer.rule("BREAK", r"/\n{0,2}/")
    spans = []
    for number, (opener, closer) in enumerate(REASONING.items()):
        rest = writer.until(f"thought_{number}", closer, r"/(?s:.*)/")
        spans.append(f"{rest} BREAK" if thinking else f"{writer.literal(opener)} {rest} BREAK")
    writer.rule("thought", " | ".join(spans))
    return "thought " if thinking else "thought? "


def _text(writer: _Writer, openers: Sequence[str], names: str, *, thoughts: bool) -> str:
    """Text in which nothing opens a call to one of the names, a pattern; after reasoning, nothing opens that again."""
    bare = rf"\s*(```\w*\s*)?(\[\s*)?\{{.*\"name\"\s*:\s*\"({names})\".*".replace("/", r"\/")
    barred = [f".*({'|'.join(map(re.escape, openers))}).*", bare, *([f"({'|'.join(REASONING)}).*"] if thoughts else [])]
    writer.rule("TEXT", " & ".join(["/(?s:.*)/", *(f"~/(?s:{pattern})/" for pattern in barred)]))
    return "TEXT"


class _Writer:
    """Collects the rules of a grammar."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._markers = {text: control[text] for text in MARKERS if text in control}
        self._rules: dict[str, str] = {}

    def rule(self, name: str, body: str) -> None:
        self._rules[name] = body

    def text(self, start: str) -> str:
        return "\n".join(
            ["%llguidance {}", f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]
        )

    def literal(self, text: str) -> str:
        """Terms that match a text; markers that are control tokens are matched as these."""
        if not text:
            return ""
        pieces = re.split(f"({'|'.join(map(re.escape, self._markers)) or '(?!)'})", text)
        return " ".join(
            f"<[{self._markers[piece]}]>" if piece in self._markers else json.dumps(piece) for piece in pieces if piece
        )

    def until(self, name: str, marker: str, text: str) -> str:
        """Text up to a marker and with it, be it a control token or spelled out."""
        self.rule(f"{name}_spelled[lazy]", f"{text} {json.dumps(marker)}")
        if marker not in self._markers:
            return f"{name}_spelled"
        return f"({name}_spelled | {text} <[{self._markers[marker]}]>)"


class _Calls:
    """The rules of calls in a dialect.

    A lexer does not go back: once it has read more than one of several terminals takes, it has left that one. So the
    beginning of a call is one terminal where it stands beside text, and JSON's own terminals where it stands beside
    JSON.
    """

    def __init__(self, writer: _Writer, dialect: CallFormat, bound: int, *, beside_json: bool) -> None:
        self._writer = writer
        self._dialect = dialect
        self._more = bound - 1
        self._as_json = beside_json and not dialect.trigger
        self._names: list[str] = []

    def add(self, tool: FunctionTool, arguments: str) -> None:
        """Adds a tool that may be called."""
        number, dialect, writer = len(self._names), self._dialect, self._writer
        self._names.append(tool.name)
        writer.rule(f"arguments_{number}", arguments)
        rest = f"arguments_{number} {writer.literal(dialect.tail)}"
        name = tool.name + dialect.middle
        opening = dialect.begin + dialect.head
        terminals = re.findall(r'"[^"]*"|[^"]+?(?=")|[^"]+$', opening + name) if self._as_json else [opening + name]
        writer.rule(f"first_{number}", " ".join([*map(writer.literal, terminals), rest]))
        writer.rule(f"more_{number}", f"{writer.literal(dialect.between + dialect.head + name)} {rest}")
        if dialect.trigger:
            writer.rule(f"rest_{number}", f"{writer.literal(opening.removeprefix(dialect.trigger) + name)} {rest}")

    def alone(self) -> str:
        """Calls and nothing else."""
        return self._then(self._any("first"))

    def within_text(self, *, thoughts: bool) -> str:
        """Text, or text and calls; in dialects whose calls have no trigger, text or calls."""
        trigger = self._dialect.trigger
        # Readers know a call in other spellings, too; these must not get by.
        others = [opener for opener in OPENERS if opener != trigger]
        _text(self._writer, others, "|".join(map(re.escape, self._names)), thoughts=thoughts)
        if not trigger:
            return f"TEXT | {self.alone()}"
        return f"TEXT | {self._then(self._writer.until('opened', trigger, 'TEXT') + ' ' + self._any('rest'))}"

    def _any(self, kind: str) -> str:
        return "(" + " | ".join(f"{kind}_{number}" for number in range(len(self._names))) + ")"

    def _then(self, first: str) -> str:
        more = f"{self._any('more')}{{0,{self._more}}}" if self._more else ""
        end = self._writer.literal(self._dialect.end)
        # A model that goes on with the line break that stands between calls need not make another one.
        gap = r"/\n{0,2}/" if self._dialect.between == "\n" else ""
        return " ".join(part for part in (first, more, end, gap) if part)
