"""A parser for the text of a model: plain text, reasoning and calls.

A model writes one stream of text, which arrives in arbitrary pieces. `Parser` separates reasoning and calls from the
text for the user. Its outputs do not depend on the boundaries of the pieces, apart from their own boundaries.

The grammar consists of generators that pause when they need more text from a `Scanner`. Text that may be part of a call
is buffered, and returned as text if it is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Literal

from ...outputs import Output, Reasoning, ToolArguments, ToolCall
from .formats import CALL_OPENERS, REASONING_TAGS, CallFormat
from .scanner import Scan, Scanner

__all__ = ["Parser"]

_REASONING_CLOSERS = tuple(REASONING_TAGS.values())

_KEYS = ('name"', 'arguments"', 'parameters"', 'type"', 'function"')
"""Members that may precede the name and the arguments of a call."""

_LENIENT_SYNTAX = re.compile(r'["{}\[\]<]')
"""Syntax of arguments once it is certain that they belong to a call. They end at a tag at the latest."""

_STRICT_SYNTAX = re.compile(r'["{}\[\]]|[^\s\w:,.+-]|_')
"""Syntax of values that may belong to a call. A character that JSON allows only in strings makes them text."""


class Parser:
    """A parser for one answer of a model.

    Text in one of `REASONING_TAGS` is reasoning if only whitespace separates it from the beginning of the answer, from
    more reasoning or from a call; elsewhere the tags are text. Calls are recognized in all formats of
    `formats.CALL_FORMATS`. A call of an unknown tool, or one without a complete name, is text.

    Args:
        call_format: The format that the model was trained with. If calls have no opener in it, an object with only a
            tool's name is a call without arguments; otherwise that object is text.
        tools: The names of the functions that the model may call. If empty, nothing is a call.
        in_reasoning: Whether the prompt ends within a span of reasoning.
        max_calls: The number of calls after which further calls are dropped, or None.

    Attributes:
        state: The kind of output that the last piece was part of.
    """

    def __init__(
        self,
        call_format: CallFormat,
        *,
        tools: Collection[str] = (),
        in_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self.state: Literal["text", "reasoning", "call"] = "reasoning" if in_reasoning else "text"
        self._has_bare_calls = not call_format.opener
        self._tools = frozenset(tools)
        self._quoted_names = tuple(f'"{name}"' for name in self._tools)
        self._remaining_calls = max_calls
        self._is_dropping = False
        self._openers = CALL_OPENERS if tools else ()
        self._scanner = Scanner()
        self._outputs: list[Output] = []
        self._pass_through: Callable[[str], Output] | None = None
        self._is_truncated = False
        self._scan = self._scan_answer(in_reasoning)

    def feed(self, piece: str) -> list[Output]:
        """Parse the next piece of the answer.

        Returns:
            The outputs that the piece completes: `str`, `Reasoning`, `ToolCall` and `ToolArguments`. The list is empty
            if only more text can determine the kind of the output.
        """
        if self._pass_through is not None and "<" not in piece and "[" not in piece:
            return [self._pass_through(piece)] if piece else []
        self._scanner.feed(piece)
        return self._resume()

    def finish(self, *, truncated: bool = False) -> list[Output]:
        """Parse the rest of the answer.

        Args:
            truncated: Whether a limit cut off the answer. A call without a complete name is then dropped, instead of
                being returned as text.

        Returns:
            The buffered outputs.
        """
        self._is_truncated = truncated
        self._scanner.is_ended = True
        return self._resume()

    def _resume(self) -> list[Output]:
        self._pass_through = None
        next(self._scan, None)
        outputs, self._outputs = self._outputs, []
        return outputs

    # The grammar of an answer.

    def _scan_answer(self, in_reasoning: bool) -> Scan:
        scanner = self._scanner
        tags = (*REASONING_TAGS, *_REASONING_CLOSERS, *self._openers)
        is_after_span = in_reasoning
        if in_reasoning:
            yield from self._scan_reasoning(_REASONING_CLOSERS, repeated_openers=tuple(REASONING_TAGS))
        while True:
            # This is the beginning of the answer, or the end of reasoning or a call. Only whitespace before text at the
            # beginning is part of the text.
            if is_after_span:
                yield from scanner.read_space()
            scanner.mark()
            yield from scanner.read_space()
            tag = yield from scanner.read_one_of(tags)
            if tag is None and self._tools:
                tag = yield from scanner.read_one_of(("{", "[", "```"))
            if not (yield from self._scan_span(tag)) and not (yield from self._scan_text(self._reject_call(tag or ""))):
                return True
            is_after_span = True

    def _scan_span(self, tag: str | None) -> Scan:
        """Scan the reasoning or the calls that a tag opens, and return False if the tag opens neither."""
        if tag in REASONING_TAGS:
            return (yield from self._scan_reasoning((REASONING_TAGS[tag],)))
        return tag in _REASONING_CLOSERS or (tag is not None and (yield from self._scan_calls(tag)))

    def _scan_text(self, text_length: int) -> Scan:
        """Scan text and the calls after it, and return False if the answer ends without a call.

        Args:
            text_length: The number of characters that are certainly text.
        """
        while tag := (yield from self._scan_until(self._openers, str, text_length)):
            self._scanner.mark(len(tag))
            if (yield from self._scan_calls(tag)):
                return True
            text_length = self._reject_call(tag)
        return False

    def _scan_reasoning(self, closers: tuple[str, ...], *, repeated_openers: tuple[str, ...] = ()) -> Scan:
        """Scan a span of reasoning after its opener.

        Args:
            closers: The tags that close it.
            repeated_openers: Tags that the model may repeat at the beginning, because the prompt contains the opener.
        """
        scanner = self._scanner
        self.state = "reasoning"
        scanner.mark()
        has_content = yield from scanner.read_space()
        tag = yield from scanner.read_one_of((*closers, *repeated_openers))
        if tag in repeated_openers:
            return (yield from self._scan_reasoning((REASONING_TAGS[tag],)))
        if tag is None and has_content:  # whitespace alone is no reasoning
            scanner.rewind()
            yield from scanner.read_one_of(("\n", "\r\n"))
            tag = yield from self._scan_until(closers, Reasoning)
            scanner.read_to(scanner.position + len(tag or ""))
        return True

    def _scan_until(
        self, tags: tuple[str, ...], output_type: Callable[[str], Output], text_length: int = 0
    ) -> Generator[None, None, str | None]:
        """Output text up to one of the tags, buffer an incomplete tag, and return the tag, or None at the end.

        Args:
            tags: The tags, which are not read.
            output_type: Creates an output from a text.
            text_length: The number of characters at the beginning that are text, even if they contain a tag.
        """
        scanner = self._scanner
        pattern = re.compile("|".join(map(re.escape, tags)) or "(?!)")
        scanner.clear_mark()
        while True:
            start = scanner.position + text_length
            match = pattern.search(scanner.buffer, start)
            if text := scanner.read_to(match.start() if match else scanner.find_partial_tag(tags, start)):
                self._outputs.append(output_type(text))
            if match:
                return match[0]
            text_length = 0
            if not scanner.unread:
                self._pass_through = output_type
            if not (yield from scanner.wait_for_more()):
                if text := scanner.read_to(len(scanner.buffer)):
                    self._outputs.append(output_type(text))
                return None

    def _reject_call(self, tag: str) -> int:
        """Return to the mark because the text after it is not a call, and treat the text as such.

        Returns:
            The number of characters up to the end of the tag, which are text.
        """
        scanner = self._scanner
        self.state = "text"
        if self._is_truncated and scanner.is_exhausted and tag in CALL_OPENERS:
            scanner.read_to(len(scanner.buffer))
            return 0
        scanner.rewind()
        return scanner.find_non_space() - scanner.position + len(tag)

    # The grammar of calls.

    def _scan_calls(self, tag: str) -> Scan:
        """Scan one or several calls and the text that closes them, after the tag that opens them."""
        scanner = self._scanner
        self.state = "call"
        if tag == "```" and (yield from scanner.read_word()) not in ("", "json"):
            return False
        in_list = tag == "["
        if tag not in ("[", "{"):
            yield from scanner.read_space()
            in_list = (yield from scanner.read_one_of(("[",))) is not None
            if tag == "[TOOL_CALLS]" and not in_list and (yield from scanner.peek()) != "{":
                return (yield from self._scan_named_call())
        if tag != "{":
            yield from scanner.read_space()
            if (yield from scanner.read_one_of(("{",))) is None:
                return False
        name_suffices = self._has_bare_calls or tag in CALL_OPENERS
        if not (yield from self._scan_json_call(name_suffices)):
            return False
        while True:
            scanner.mark()
            yield from scanner.read_space()
            symbol = yield from scanner.read_one_of(("{", ",", ";", "]", "</tool_call>", "```"))
            if symbol in (",", ";"):
                yield from scanner.read_space()
                symbol = yield from scanner.read_one_of(("{",))
            if symbol == "{" and (yield from self._scan_json_call(name_suffices)):
                continue
            if symbol == "]" and in_list:
                in_list = False
                continue
            if self._is_truncated and scanner.is_exhausted:
                scanner.read_to(len(scanner.buffer))
            elif symbol != "</tool_call>" and not (symbol == "```" == tag):
                scanner.rewind()
            return True

    def _scan_json_call(self, name_suffices: bool) -> Scan:
        """Scan a call in JSON after its opening brace.

        Args:
            name_suffices: Whether an object with a name and without arguments is a call.
        """
        scanner = self._scanner
        depth = 1
        name: str | None = None
        arguments: list[str] | None = None  # buffered until the name is known and they are complete
        while True:
            yield from scanner.read_space()
            symbol = yield from scanner.read_one_of(('"', ",", "}"))
            if symbol == ",":
                continue
            if symbol == "}" and name is not None and (name_suffices or arguments is not None):
                self._emit_call(name, arguments)
                return (yield from self._scan_rest_of_call(depth - 1))
            key = (yield from scanner.read_one_of(_KEYS)) if symbol == '"' else None
            if key is None or not (yield from self._scan_colon()):
                return False
            next_char = yield from scanner.peek()
            if key == 'name"' and next_char == '"':
                name = yield from scanner.read_one_of(self._quoted_names)
                if name is None:
                    return False
                name = name[1:-1]
                if arguments is not None:
                    self._emit_call(name, arguments)
                    return (yield from self._scan_rest_of_call(depth))
            elif key == 'type"':
                if (yield from scanner.read_one_of(('"function"',))) is None:
                    return False
            elif key == 'function"' and depth == 1:
                if (yield from scanner.read_one_of(("{",))) is None:
                    return False
                depth = 2
            elif key not in ('arguments"', 'parameters"'):
                return False
            elif next_char == "{" and name is not None:
                self._emit_call(name)
                is_complete = yield from scanner.read_value(self._emit_arguments, _LENIENT_SYNTAX)
                return not is_complete or (yield from self._scan_rest_of_call(depth))
            elif next_char in ("{", '"'):
                arguments = []
                if not (yield from scanner.read_value(arguments.append, _STRICT_SYNTAX)):
                    return False
                if next_char == '"':
                    text = _decode_string("".join(arguments))
                    if text is None:
                        return False
                    arguments = [text]
                if name is not None:
                    self._emit_call(name, arguments)
                    return (yield from self._scan_rest_of_call(depth))
            elif (yield from scanner.read_one_of(("null",))) is None:
                return False
            else:
                arguments = []

    def _scan_rest_of_call(self, depth: int) -> Scan:
        """Scan further members and closing braces of a call in JSON, as far as they exist."""
        scanner = self._scanner
        scanner.mark()
        while depth:
            yield from scanner.read_space()
            symbol = yield from scanner.read_one_of((",", "}"))
            if symbol == "}":
                depth -= 1
            elif symbol is None or not (yield from self._skip_member()):
                break
            scanner.mark()
        if scanner.is_exhausted:
            scanner.read_to(len(scanner.buffer))
        else:
            scanner.rewind()
        return True

    def _skip_member(self) -> Scan:
        scanner = self._scanner
        yield from scanner.read_space()
        if (yield from scanner.peek()) != '"' or not (yield from scanner.read_value(_discard, _STRICT_SYNTAX)):
            return False
        if not (yield from self._scan_colon()):
            return False
        if (yield from scanner.peek()) in ('"', "{", "["):
            return (yield from scanner.read_value(_discard, _STRICT_SYNTAX))
        return bool((yield from scanner.read_word()))

    def _scan_named_call(self) -> Scan:
        """Scan a name and arguments in the format of Mistral's newer models."""
        scanner = self._scanner
        name = yield from scanner.read_word()
        if name not in self._tools:
            return False
        yield from scanner.read_space()
        if (yield from scanner.read_one_of(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
            yield from scanner.read_word()
            yield from scanner.read_one_of(("[ARGS]",))
        yield from scanner.read_space()
        if (yield from scanner.peek()) != "{":
            return False
        self._emit_call(name)
        yield from scanner.read_value(self._emit_arguments, _LENIENT_SYNTAX)
        return True

    def _scan_colon(self) -> Scan:
        scanner = self._scanner
        yield from scanner.read_space()
        colon = yield from scanner.read_one_of((":",))
        yield from scanner.read_space()
        return colon is not None

    def _emit_call(self, name: str, arguments: Iterable[str] | None = None) -> None:
        self._scanner.clear_mark()
        self._is_dropping = self._remaining_calls == 0
        if self._is_dropping:
            return
        if self._remaining_calls is not None:
            self._remaining_calls -= 1
        self._outputs.append(ToolCall(name))
        self._emit_arguments("".join(arguments or ()))

    def _emit_arguments(self, piece: str) -> None:
        if piece and not self._is_dropping:
            self._outputs.append(ToolArguments(piece))


def _decode_string(text: str) -> str | None:
    """Return the value of a JSON string, or None if it is invalid."""
    try:
        value: str = json.loads(text, strict=False)
    except ValueError:
        return None
    return value


def _discard(piece: str) -> None:
    """Discard a piece of a value."""
