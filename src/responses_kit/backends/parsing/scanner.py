"""A scanner for text that arrives in pieces, for generators that pause when they need more text."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

__all__ = ["Scan", "Scanner"]

Scan = Generator[None, None, bool]
"""A generator that yields when it needs more text, and returns whether it matched."""

_NON_SPACE = re.compile(r"\S")
_NOT_IN_WORD = re.compile(r"[^\w.+-]")
_IN_STRING = re.compile(r'["\\]')

_MAX_WORD_LENGTH = 64
"""Characters of a word, which is the specification's limit for names of functions."""


class Scanner:
    """A buffer of text with a position, and a mark to which the position can return.

    Attributes:
        buffer: The received text, without parts that are no longer needed.
        position: The index in the buffer up to which the text was read.
        is_ended: Whether the text is complete.
        is_exhausted: Whether a scan reached the end of the text since the last mark.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.position = 0
        self.is_ended = False
        self.is_exhausted = False
        self._mark: int | None = None
        self._saved: list[str] = []  # text that was read since the mark and is no longer in the buffer

    @property
    def unread(self) -> str:
        """The text after the position."""
        return self.buffer[self.position :]

    def feed(self, piece: str) -> None:
        """Append a piece of text, and remove the text that was read."""
        if self._mark is not None:
            self._saved.append(self.buffer[self._mark : self.position])
            self._mark = 0
        self.buffer = self.buffer[self.position :] + piece
        self.position = 0

    def mark(self, skip: int = 0) -> None:
        """Set the mark at the position, then advance the position by `skip` characters."""
        self._saved.clear()
        self._mark = self.position
        self.position += skip
        self.is_exhausted = False

    def clear_mark(self) -> None:
        """Remove the mark and the text that was saved for it."""
        self._saved.clear()
        self._mark = None

    def rewind(self) -> None:
        """Return to the mark and remove it."""
        assert self._mark is not None
        self.buffer = "".join(self._saved) + self.buffer if self._saved else self.buffer
        self.position = self._mark
        self.clear_mark()

    def read_to(self, end: int) -> str:
        """Read and return the text up to an index of the buffer."""
        text = self.buffer[self.position : end]
        self.position = end
        return text

    def find_non_space(self) -> int:
        """Return the index of the next character that is not whitespace, or the buffer's length."""
        match = _NON_SPACE.search(self.buffer, self.position)
        return match.start() if match else len(self.buffer)

    def find_partial_tag(self, tags: tuple[str, ...], start: int) -> int:
        """Return the index at which the buffer ends in an incomplete tag, or the buffer's length.

        Args:
            tags: The tags, each of which begins with "<" or "[".
            start: The index from which to search; the buffer contains no complete tag after it.
        """
        start = max(self.buffer.rfind("<", start), self.buffer.rfind("[", start))
        if start >= 0 and any(tag.startswith(self.buffer[start:]) for tag in tags):
            return start
        return len(self.buffer)

    def wait_for_more(self) -> Scan:
        """Wait for more text, and return False if the text has ended."""
        if self.is_ended:
            self.is_exhausted = True
            return False
        yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it, or an empty string at the end."""
        while self.position == len(self.buffer):
            if not (yield from self.wait_for_more()):
                return ""
        return self.buffer[self.position]

    def read_space(self) -> Scan:
        """Read whitespace, and return whether more text follows."""
        while True:
            self.position = self.find_non_space()
            if self.position < len(self.buffer):
                return True
            if not (yield from self.wait_for_more()):
                return False

    def read_one_of(self, literals: tuple[str, ...]) -> Generator[None, None, str | None]:
        """Read one of several literals, or return None and read nothing.

        Args:
            literals: The literals, none of which is a prefix of another.
        """
        max_length = max(map(len, literals), default=0)
        while True:
            text = self.buffer[self.position : self.position + max_length]
            for literal in literals:
                if text.startswith(literal):
                    self.position += len(literal)
                    return literal
            if not any(literal.startswith(text) for literal in literals) or not (yield from self.wait_for_more()):
                return None

    def read_word(self) -> Generator[None, None, str | None]:
        """Read a word of at most 64 characters, or return None if it is longer."""
        word = ""
        while True:
            match = _NOT_IN_WORD.search(self.buffer, self.position)
            word += self.read_to(match.start() if match else len(self.buffer))
            if len(word) > _MAX_WORD_LENGTH:
                return None
            if match or not (yield from self.wait_for_more()):
                return word

    def read_value(self, emit: Callable[[str], None], syntax: re.Pattern[str]) -> Scan:
        """Read a JSON object, list or string in pieces, and return whether it is complete.

        Args:
            emit: Receives each piece.
            syntax: Matches quotes, braces and brackets outside strings, and characters that end an invalid value.
        """
        start, depth, in_string = self.position, 0, False
        while True:
            match = (_IN_STRING if in_string else syntax).search(self.buffer, self.position)
            char = match[0] if match else ""
            if match is None or (char == "\\" and match.end() == len(self.buffer)):
                self.position = start
                if text := self.read_to(match.start() if match else len(self.buffer)):
                    emit(text)
                if not (yield from self.wait_for_more()):
                    if text := self.read_to(len(self.buffer)):
                        emit(text)
                    return False
                start = self.position
                continue
            self.position = match.end()
            if in_string:
                in_string = char != '"'
                self.position += in_string  # after a backslash, skip the escaped character
            elif char == '"':
                in_string = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
            else:
                self.position, end = start, match.start()
                if text := self.read_to(end):
                    emit(text)
                return False
            if not in_string and not depth:
                self.position, end = start, self.position
                emit(self.read_to(end))
                return True
