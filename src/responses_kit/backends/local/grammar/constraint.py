"""Holds an answer to a grammar, token by token, with llguidance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ....errors import InvalidRequest, ModelError
from ..inference.engine import Logits
from ..inference.tokenizer import Tokenizer

__all__ = ["GrammarConstraint", "Grammars"]

Allowed = bytes
"""For each token of the vocabulary a bit, the lowest first: whether it may come next."""

MAX_LENGTH = 1_000_000
"""Characters of a whole grammar."""

SHORT = 20_000
"""Characters of a grammar whose problems, or that it has none, are worth remembering."""

TRIAL = 512
"""Tokens after which a trial run of a grammar is content."""

NEAR = 64
"""Tokens to spare from which on it is looked at with each token whether the answer still can be finished."""

CLOSE = 512
"""Tokens left from which on that is looked at with each token that may open something, whatever there is to spare."""

_LOOK = 8
"""Tokens of free text between two looks at whether it still is free."""

_log = logging.getLogger("responses_kit")


class Grammars:
    """Compiles grammars for one model, and keeps the latest: clients send the same tools with each turn. Thread-safe.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        stops = sorted(tokenizer.stops)
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, stops))
        self._tokenizer = LLTokenizer(vocabulary, eos_token=stops or None)
        self._limits = LLParserLimits(verbose_errors=False)  # or they quote the client's schema
        self._marks = _Marks(tokenizer.pieces, stops)
        self._lock = threading.Lock()  # a hostile grammar takes much memory while it is compiled
        self._compiled = lru_cache(16)(self._compile)
        self._known_problem = lru_cache(256)(self._find_problem)

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A constraint at the beginning of an answer.

        Raises:
            InvalidRequest: The grammar, whose parts all work, is too large as a whole.
        """
        if len(grammar) <= MAX_LENGTH and not (matcher := self._compiled(grammar)).is_error():
            return GrammarConstraint(matcher.deep_copy(), self._marks)
        raise InvalidRequest("The schemas of the answer and of the tools are too large together. Simplify them.")

    def problem(self, grammar: str) -> str:
        """What is wrong with a grammar, in llguidance's words; nothing where it works."""
        return self._known_problem(grammar) if len(grammar) <= SHORT else self._find_problem(grammar)

    def _find_problem(self, grammar: str) -> str:
        matcher = self._compile(grammar)
        if not matcher.is_error():
            with self._lock:
                _shortest(matcher, self._marks, TRIAL)
        return matcher.get_error()

    def _compile(self, grammar: str) -> LLMatcher:
        with self._lock:
            return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)


class GrammarConstraint:
    """A constraint on one answer.

    A small model runs on inside a string or a list until it is cut off, and then the answer is worth nothing. So no
    token is taken after which an answer in JSON could not be finished within the tokens that are left: in its place
    comes one that closes what is open, or is said soonest. Free text is never led.
    """

    def __init__(self, matcher: LLMatcher, marks: _Marks) -> None:
        self._matcher = matcher
        self._marks = marks
        self._left = 0
        self._look_at: float = float("inf")

    @property
    def ended(self) -> bool:
        """Whether the answer is over: nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the answer is whole as it is, and no free text that goes on."""
        return self._matcher.is_accepting() and (self.ended or not self._marks.free(self._allowed()))

    def forced(self, left: int, most: int) -> list[int]:
        """Takes the tokens that come next whatever the model would say; none where it has a choice.

        Args:
            left: How many tokens the answer may still have.
            most: Take no more than so many.

        Raises:
            ModelError: The grammar has become too complex to go on.
        """
        tokens = self._matcher.compute_ff_tokens()[: min(left, most)]
        if tokens and not self._matcher.consume_tokens(tokens):
            raise self._failure()
        self._left = left - len(tokens)
        return tokens

    def mask(self, logits: Logits) -> None:
        """Sets the logits of all tokens that may not come next to minus infinity, in place.

        Raises:
            ModelError: The grammar has become too complex to go on.
        """
        bits = np.frombuffer(self._allowed(), np.uint8)
        allowed = np.unpackbits(bits, count=logits.size, bitorder="little").view(np.bool_)
        np.copyto(logits, -np.inf, where=~allowed)

    def accept(self, token: int) -> int:
        """Takes the token that the model has chosen, or one that leads to the end where that is due.

        Returns:
            The token that came.

        Raises:
            ModelError: It may not come here.
        """
        if self._left <= self._look_at or (self._left <= CLOSE and token in self._marks.opening):
            token = self._fitting(token)
        if not self._matcher.consume_token(token):
            raise self._failure()
        return token

    def _fitting(self, token: int) -> int:
        """The token, if the answer can be finished behind it."""
        allowed = self._allowed()
        if self._marks.free(allowed):
            self._look_at = self._left - _LOOK
            return token
        behind = self._matcher.deep_copy()
        behind.consume_token(token)
        spare = self._left - 1 - _shortest(behind, self._marks, self._left)
        self._look_at = self._left - spare // 2 if spare > NEAR else self._left
        return token if spare >= 0 else self._marks.soonest(allowed)

    def _allowed(self) -> Allowed:
        allowed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._failure()
        return allowed

    def _failure(self) -> ModelError:
        # What llguidance says of it may hold the client's schema.
        _log.error("A grammar failed while an answer was generated: %s", self._matcher.stop_reason())
        return ModelError("The model could not be held to the schema any longer. Simplify the schema.")


class _Marks:
    """Tokens that tell where in an answer it is, and that close what is open."""

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[int]) -> None:
        ids: dict[bytes, int] = {}
        for token, piece in enumerate(pieces):
            ids.setdefault(piece, token)
        self._stops = stops
        self.opening = frozenset(token for token, piece in enumerate(pieces) if set(piece) & set(b'[{,"'))

        def known(*texts: bytes) -> list[int]:
            return [ids[text] for text in texts if text in ids]

        self._break, self._letter, self._quote, self._space = known(b"\n"), known(b"z"), known(b'"'), known(b" ")
        self._closers, self._openers = known(b"}", b"]", b","), known(b"{", b"[")
        self._values = known(b"n", b'"', b"0", b"t")  # that need not go deeper; null says least

    def free(self, allowed: Allowed) -> bool:
        """Whether free text goes on here; no place in JSON takes both a line break and a letter."""
        return _first(self._break, allowed) is not None and self._in_string(allowed)

    def soonest(self, allowed: Allowed) -> int:
        """The token that leads to the end of JSON soonest, as far as one can tell without trying."""
        if self._in_string(allowed):
            ways = [*self._stops, *self._quote]
        else:
            deeper = _first(self._openers, allowed) is not None
            ways = [*self._stops, *self._closers, *(self._values if deeper else self._quote), *self._space]
        found = _first(ways, allowed)
        # In its place any other: the last one, for that is a long piece of a string, or a digit that is not zero.
        return int.from_bytes(allowed, "little").bit_length() - 1 if found is None else found

    def _in_string(self, allowed: Allowed) -> bool:
        """Whether a string goes on here; no value in JSON begins with this letter."""
        return _first(self._letter, allowed) is not None


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[int]) -> None:
        names = {token: text.encode() for text, token in tokenizer.control.items()}
        hidden = [token for token, piece in enumerate(tokenizer.pieces) if token in names or not piece]
        self.tokens = list(tokenizer.pieces)
        for token in hidden:
            self.tokens[token] = b"\xff" + names.get(token, b"<%d>" % token)
        self.special_token_ids = hidden
        self.bos_token_id = None
        self.eos_token_id = stops[0] if stops else None
        self._tokenizer = tokenizer
        self._ids = {piece: token for token, piece in enumerate(tokenizer.pieces) if piece}

    def __call__(self, text: bytes) -> list[int]:
        """Ids of a text that the grammar forces: as the model would write it, or any that spell it."""
        ids = self._tokenizer.encode(text.decode())
        first = self._tokenizer.pieces[ids[0]] if ids else b""
        if first.startswith(b" ") and not text.startswith(b" "):  # some vocabularies put one in front
            bare = self._ids.get(first[1:])
            ids[:1] = [] if bare is None else [bare]
        if b"".join(self._tokenizer.pieces[token] for token in ids) == text:
            return ids
        return list(self._spelled(text))

    def _spelled(self, text: bytes) -> Iterator[int]:
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._tokenizer.longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:  # no token begins with this byte, so nothing here was forced
                return
            yield self._ids[text[at:end]]
            at = end


def _first(tokens: Iterable[int], allowed: Allowed) -> int | None:
    return next((token for token in tokens if allowed[token >> 3] >> (token & 7) & 1), None)


def _shortest(matcher: LLMatcher, marks: _Marks, bound: int) -> int:
    """How many tokens it takes to lead an answer to its end or to free text, or the bound; uses up the matcher."""
    used = 0
    while used < bound and not matcher.is_stopped():
        tokens = matcher.compute_ff_tokens()
        if not tokens:
            allowed = matcher.compute_bitmask()
            if marks.free(allowed):
                break
            tokens = [marks.soonest(allowed)]
        used += len(tokens)
        matcher.consume_tokens(tokens)
    return used
