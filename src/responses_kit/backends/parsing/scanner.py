"""Text that comes in pieces, to be read by generators that pause where they need more."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

__all__ = ["Reading", "Source"]

Reading = Generator[None, None, bool]
"""A reading of something; whether it was there. It pauses where it needs more text."""

_INK = re.compile(r"\S")
_NO_WORD = re.compile(r"[^\w.+-]")
_IN_STRING = re.compile(r'["\\]')


class Source:
    """The text that has come, up to where it was read, and back to where it may have to be read again.

    Attributes:
        window: Text at hand.
        at: How far it was read.
        ended: Nothing follows.
        starved: Since the last mark, a reading wanted more than there was.
    """

    def __init__(self) -> None:
        self.window = ""
        self.at = 0
        self.ended = False
        self.starved = False
        self._mark: int | None = None
        self._kept: list[str] = []  # what was read since the mark and is in the window no more

    @property
    def rest(self) -> str:
        """What was not read yet."""
        return self.window[self.at :]

    def feed(self, piece: str) -> None:
        if self._mark is not None:
            self._kept.append(self.window[self._mark : self.at])
            self._mark = 0
        self.window = self.window[self.at :] + piece
        self.at = 0

    def mark(self, skip: int = 0) -> None:
        """From here on, keeps what is read; `skip` characters are read at once."""
        self._kept.clear()
        self._mark = self.at
        self.at += skip
        self.starved = False

    def commit(self) -> None:
        """Keeps nothing any more."""
        self._kept.clear()
        self._mark = None

    def back(self) -> None:
        """Goes back to the mark."""
        assert self._mark is not None
        self.window = "".join(self._kept) + self.window if self._kept else self.window
        self.at = self._mark
        self.commit()

    def take(self, end: int) -> str:
        """Reads up to an index of the window."""
        text = self.window[self.at : end]
        self.at = end
        return text

    def ink(self) -> int:
        """Index of the first character that is no whitespace."""
        found = _INK.search(self.window, self.at)
        return found.start() if found else len(self.window)

    def torn(self, tags: tuple[str, ...], start: int) -> int:
        """Index, from a start on, of what may become one of the tags once there is more; none of them is whole."""
        start = max(self.window.rfind("<", start), self.window.rfind("[", start))
        if start >= 0 and any(tag.startswith(self.window[start:]) for tag in tags):
            return start
        return len(self.window)

    def more(self) -> Reading:
        """Waits; False if nothing follows."""
        if self.ended:
            self.starved = True
            return False
        yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """The next character, or "" at the end."""
        while self.at == len(self.window):
            if not (yield from self.more()):
                return ""
        return self.window[self.at]

    def space(self) -> Reading:
        """Reads whitespace; whether anything follows."""
        while True:
            self.at = self.ink()
            if self.at < len(self.window):
                return True
            if not (yield from self.more()):
                return False

    def one_of(self, literals: tuple[str, ...]) -> Generator[None, None, str | None]:
        """Reads one of some texts, of which none begins another; None and nothing read if there is none."""
        longest = max(map(len, literals), default=0)
        while True:
            rest = self.window[self.at : self.at + longest]
            for literal in literals:
                if rest.startswith(literal):
                    self.at += len(literal)
                    return literal
            if not any(literal.startswith(rest) for literal in literals) or not (yield from self.more()):
                return None

    def word(self) -> Generator[None, None, str | None]:
        """Reads a name of up to 64 characters; None if it is longer."""
        word = ""
        while True:
            found = _NO_WORD.search(self.window, self.at)
            word += self.take(found.start() if found else len(self.window))
            if len(word) > 64:
                return None
            if found or not (yield from self.more()):
                return word

    def value(self, take: Callable[[str], None], marks: re.Pattern[str]) -> Reading:
        """Reads a JSON object, list or string to its end, and passes it on as it comes; False if it has none.

        Args:
            take: Is given each piece.
            marks: What to look at outside strings: quotes, braces and brackets; the value ends before all else.
        """
        start, depth, inside = self.at, 0, False
        while True:
            found = (_IN_STRING if inside else marks).search(self.window, self.at)
            char = found[0] if found else ""
            if found is None or (char == "\\" and found.end() == len(self.window)):
                self.at = start
                if text := self.take(found.start() if found else len(self.window)):
                    take(text)
                if not (yield from self.more()):
                    if text := self.take(len(self.window)):
                        take(text)
                    return False
                start = self.at
                continue
            self.at = found.end()
            if inside:
                inside = char != '"'
                self.at += inside  # past what is escaped
            elif char == '"':
                inside = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
            else:
                self.at, end = start, found.start()
                if text := self.take(end):
                    take(text)
                return False
            if not inside and not depth:
                self.at, end = start, self.at
                take(self.take(end))
                return True
