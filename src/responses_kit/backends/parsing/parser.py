"""Reads what a model wrote: text, reasoning and calls.

A model writes one stream of text, in pieces that end anywhere. `Reader` tells reasoning and calls from what is to be
shown. What it yields does not depend on where the pieces end.

The grammar is written as generators that pause where they need more text; `Source` is what they read from. Whatever
may still turn out not to be a call is kept, and goes out as text if it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Literal

from ...outputs import Output, Reasoning, ToolArguments, ToolCall
from .formats import OPENERS, REASONING, CallFormat
from .scanner import Reading, Source

__all__ = ["Reader"]

_CLOSERS = tuple(REASONING.values())

_KEYS = ('name"', 'arguments"', 'parameters"', 'type"', 'function"')
"""Members that a call may have before both its name and its arguments are known."""

_IN_JSON = re.compile(r'["{}\[\]<]')
_STRICT = re.compile(r'["{}\[\]]|[^\s\w:,.+-]|_')
"""Where JSON has no such character outside its strings, a call that may yet turn out to be text is none."""


class Reader:
    """Tells reasoning and calls from text in one answer.

    Reasoning is what stands in the tags of `REASONING`, where nothing but whitespace stands between it and the
    beginning of the answer, another span or a call; elsewhere such a tag is text. Calls are read in every convention
    that `dialects` describes. A call of an unknown tool, and whatever only begins like a call, is text.

    Args:
        dialect: How the model was made to write calls. Where its calls are bare JSON, an object that holds only a
            tool's name is a call without arguments; elsewhere that is text.
        tools: Names of the functions that may be called; with none, nothing is a call.
        thinking: The prompt has opened a span of reasoning already.
        max_calls: Calls beyond so many are dropped.

    Attributes:
        reading: What the last piece was a part of.
    """

    def __init__(
        self,
        dialect: CallFormat,
        *,
        tools: Collection[str] = (),
        thinking: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self.reading: Literal["text", "reasoning", "call"] = "reasoning" if thinking else "text"
        self._bare = not dialect.trigger
        self._tools = frozenset(tools)
        self._names = tuple(f'"{name}"' for name in self._tools)
        self._left = max_calls
        self._dropping = False
        self._openers = OPENERS if tools else ()
        self._source = Source()
        self._made: list[Output] = []
        self._passing: Callable[[str], Output] | None = None
        self._cut = False
        self._run = self._answer(thinking)

    def feed(self, piece: str) -> list[Output]:
        """Takes the next piece of the answer.

        Returns:
            What it completes: `str`, `Reasoning`, `ToolCall` and `ToolArguments`. Often nothing, where more text has
            to tell what it is.
        """
        if self._passing is not None and "<" not in piece and "[" not in piece:
            return [self._passing(piece)] if piece else []
        self._source.feed(piece)
        return self._go_on()

    def end(self, *, cut: bool = False) -> list[Output]:
        """Says that nothing follows.

        Args:
            cut: The answer was cut by a limit. A call of which there is its tag and not yet its name is dropped then;
                in an answer that ended by itself it is text.

        Returns:
            What was held back.
        """
        self._cut = cut
        self._source.ended = True
        return self._go_on()

    def _go_on(self) -> list[Output]:
        self._passing = None
        next(self._run, None)
        made, self._made = self._made, []
        return made

    # The grammar of an answer.

    def _answer(self, thinking: bool) -> Reading:
        source = self._source
        tags = (*REASONING, *_CLOSERS, *self._openers)
        begun = thinking
        if thinking:
            yield from self._reasoning(_CLOSERS, again=tuple(REASONING))
        while True:
            # So far there is nothing, or a span or a call has ended. Whitespace is content only before text that begins
            # the answer.
            if begun:
                yield from source.space()
            source.mark()
            yield from source.space()
            tag = yield from source.one_of(tags)
            if tag is None and self._tools:
                tag = yield from source.one_of(("{", "[", "```"))
            if not (yield from self._span(tag)) and not (yield from self._text(self._give_up(tag or ""))):
                return True
            begun = True

    def _span(self, tag: str | None) -> Reading:
        """What a tag opens."""
        if tag in REASONING:
            return (yield from self._reasoning((REASONING[tag],)))
        return tag in _CLOSERS or (tag is not None and (yield from self._calls(tag)))

    def _text(self, sure: int) -> Reading:
        """Text up to a call, and the call; without one it ends with the answer. So many characters surely are text."""
        while tag := (yield from self._until(self._openers, str, sure)):
            self._source.mark(len(tag))
            if (yield from self._calls(tag)):
                return True
            sure = self._give_up(tag)
        return False

    def _reasoning(self, closers: tuple[str, ...], *, again: tuple[str, ...] = ()) -> Reading:
        """A span of reasoning, its opener read; the model may write the opener that the prompt has already again."""
        source = self._source
        self.reading = "reasoning"
        source.mark()
        anything = yield from source.space()
        tag = yield from source.one_of((*closers, *again))
        if tag in again:
            return (yield from self._reasoning((REASONING[tag],)))
        if tag is None and anything:  # a span of whitespace alone says nothing
            source.back()
            yield from source.one_of(("\n", "\r\n"))
            tag = yield from self._until(closers, Reasoning)
            source.take(source.at + len(tag or ""))
        return True

    def _until(
        self, tags: tuple[str, ...], kind: Callable[[str], Output], sure: int = 0
    ) -> Generator[None, None, str | None]:
        """Passes text on up to one of the tags, and holds back what may become one; None at the answer's end."""
        source = self._source
        pattern = re.compile("|".join(map(re.escape, tags)) or "(?!)")
        source.commit()
        while True:
            start = source.at + sure
            found = pattern.search(source.window, start)
            if text := source.take(found.start() if found else source.torn(tags, start)):
                self._made.append(kind(text))
            if found:
                return found[0]
            sure = 0
            if not source.rest:
                self._passing = kind
            if not (yield from source.more()):
                if text := source.take(len(source.window)):
                    self._made.append(kind(text))
                return None

    def _give_up(self, tag: str) -> int:
        """What was kept is no call: all of it is to be read again, and to its tag's end it is text.

        Returns:
            How many characters that are.
        """
        source = self._source
        self.reading = "text"
        if self._cut and source.starved and tag in OPENERS:
            source.take(len(source.window))
            return 0
        source.back()
        return source.ink() - source.at + len(tag)

    # The grammar of calls.

    def _calls(self, tag: str) -> Reading:
        """One call or several, and what closes them; the tag that opens them is read."""
        source = self._source
        self.reading = "call"
        if tag == "```" and (yield from source.word()) not in ("", "json"):
            return False
        listed = tag == "["
        if tag not in ("[", "{"):
            yield from source.space()
            listed = (yield from source.one_of(("[",))) is not None
            if tag == "[TOOL_CALLS]" and not listed and (yield from source.peek()) != "{":
                return (yield from self._named())
        if tag != "{":
            yield from source.space()
            if (yield from source.one_of(("{",))) is None:
                return False
        alone = self._bare or tag in OPENERS
        if not (yield from self._object(alone)):
            return False
        while True:
            source.mark()
            yield from source.space()
            mark = yield from source.one_of(("{", ",", ";", "]", "</tool_call>", "```"))
            if mark in (",", ";"):
                yield from source.space()
                mark = yield from source.one_of(("{",))
            if mark == "{" and (yield from self._object(alone)):
                continue
            if mark == "]" and listed:
                listed = False
                continue
            if self._cut and source.starved:
                source.take(len(source.window))
            elif mark != "</tool_call>" and not (mark == "```" == tag):
                source.back()
            return True

    def _object(self, alone: bool) -> Reading:
        """A call in JSON, its brace read. With `alone`, a name without arguments makes one."""
        source = self._source
        depth = 1
        name: str | None = None
        arguments: list[str] | None = None  # held back, as their name is not known or they are not whole
        while True:
            yield from source.space()
            mark = yield from source.one_of(('"', ",", "}"))
            if mark == ",":
                continue
            if mark == "}" and name is not None and (alone or arguments is not None):
                self._call(name, arguments)
                return (yield from self._rest(depth - 1))
            key = (yield from source.one_of(_KEYS)) if mark == '"' else None
            if key is None or not (yield from self._colon()):
                return False
            value = yield from source.peek()
            if key == 'name"' and value == '"':
                name = yield from source.one_of(self._names)
                if name is None:
                    return False
                name = name[1:-1]
                if arguments is not None:
                    self._call(name, arguments)
                    return (yield from self._rest(depth))
            elif key == 'type"':
                if (yield from source.one_of(('"function"',))) is None:
                    return False
            elif key == 'function"' and depth == 1:
                if (yield from source.one_of(("{",))) is None:
                    return False
                depth = 2
            elif key not in ('arguments"', 'parameters"'):
                return False
            elif value == "{" and name is not None:
                self._call(name)
                return not (yield from source.value(self._argue, _IN_JSON)) or (yield from self._rest(depth))
            elif value in ("{", '"'):
                arguments = []
                if not (yield from source.value(arguments.append, _STRICT)):
                    return False
                if value == '"':
                    text = _decoded("".join(arguments))
                    if text is None:
                        return False
                    arguments = [text]
                if name is not None:
                    self._call(name, arguments)
                    return (yield from self._rest(depth))
            elif (yield from source.one_of(("null",))) is None:
                return False
            else:
                arguments = []

    def _rest(self, depth: int) -> Reading:
        """The rest of a call in JSON, as far as it is there: members that say nothing, and closing braces."""
        source = self._source
        source.mark()
        while depth:
            yield from source.space()
            mark = yield from source.one_of((",", "}"))
            if mark == "}":
                depth -= 1
            elif mark is None or not (yield from self._member()):
                break
            source.mark()
        if source.starved:
            source.take(len(source.window))
        else:
            source.back()
        return True

    def _member(self) -> Reading:
        source = self._source
        yield from source.space()
        if (yield from source.peek()) != '"' or not (yield from source.value(_ignore, _STRICT)):
            return False
        if not (yield from self._colon()):
            return False
        if (yield from source.peek()) in ('"', "{", "["):
            return (yield from source.value(_ignore, _STRICT))
        return bool((yield from source.word()))

    def _named(self) -> Reading:
        """A name and its arguments, as Mistral's newer models write them."""
        source = self._source
        name = yield from source.word()
        if name not in self._tools:
            return False
        yield from source.space()
        if (yield from source.one_of(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
            yield from source.word()
            yield from source.one_of(("[ARGS]",))
        yield from source.space()
        if (yield from source.peek()) != "{":
            return False
        self._call(name)
        yield from source.value(self._argue, _IN_JSON)
        return True

    def _colon(self) -> Reading:
        source = self._source
        yield from source.space()
        found = yield from source.one_of((":",))
        yield from source.space()
        return found is not None

    def _call(self, name: str, arguments: Iterable[str] | None = None) -> None:
        self._source.commit()
        self._dropping = self._left == 0
        if self._dropping:
            return
        if self._left is not None:
            self._left -= 1
        self._made.append(ToolCall(name))
        self._argue("".join(arguments or ()))

    def _argue(self, piece: str) -> None:
        if piece and not self._dropping:
            self._made.append(ToolArguments(piece))


def _decoded(text: str) -> str | None:
    """The text that a JSON string holds."""
    try:
        value: str = json.loads(text, strict=False)
    except ValueError:
        return None
    return value


def _ignore(piece: str) -> None:
    """Takes what says nothing."""
