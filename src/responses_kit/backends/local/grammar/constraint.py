"""Constraints that hold an answer to a grammar, token by token, with llguidance."""

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

__all__ = ["GrammarCompiler", "GrammarConstraint"]

TokenMask = bytes
"""One bit for each token of the vocabulary, the lowest first: whether the token may come next."""

MAX_GRAMMAR_LENGTH = 1_000_000
"""Characters of a grammar above which a request is refused."""

MAX_CACHED_LENGTH = 20_000
"""Characters of a grammar above which the result of `find_problem` is not cached."""

MAX_TRIAL_TOKENS = 512
"""Tokens after which the trial run of a grammar succeeds."""

CHECKED_SLACK = 64
"""Unneeded tokens at or below which each token is checked for whether the answer can still be completed."""

CHECKED_REMAINING = 512
"""Remaining tokens at or below which tokens that may open a value are always checked."""

_FREE_TEXT_CHECK_INTERVAL = 8
"""Tokens of free text between two checks whether the text is still free."""

logger = logging.getLogger("responses_kit")


class GrammarCompiler:
    """A thread-safe compiler of grammars for one model, with a cache, because clients repeat their tools in each turn.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        stop_ids = sorted(tokenizer.stop_ids)
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, stop_ids))
        self._tokenizer = LLTokenizer(vocabulary, eos_token=stop_ids or None)
        self._limits = LLParserLimits(verbose_errors=False)  # verbose errors quote the client's schema
        self._syntax = _SyntaxTokens(tokenizer.token_bytes, stop_ids)
        self._lock = threading.Lock()  # the compilation of a hostile grammar needs much memory
        self._compile_cached = lru_cache(16)(self._compile)
        self._find_problem_cached = lru_cache(256)(self._find_problem)

    def compile(self, grammar: str) -> GrammarConstraint:
        """Return a constraint for a new answer.

        Raises:
            InvalidRequest: The grammar is too large, although each of its schemas is valid.
        """
        if len(grammar) <= MAX_GRAMMAR_LENGTH and not (matcher := self._compile_cached(grammar)).is_error():
            return GrammarConstraint(matcher.deep_copy(), self._syntax)
        raise InvalidRequest("The schemas of the text format and the tools are too large together. Simplify them.")

    def find_problem(self, grammar: str) -> str:
        """Return llguidance's error message about a grammar, or an empty string if the grammar is valid."""
        if len(grammar) <= MAX_CACHED_LENGTH:
            return self._find_problem_cached(grammar)
        return self._find_problem(grammar)

    def _find_problem(self, grammar: str) -> str:
        matcher = self._compile(grammar)
        if not matcher.is_error():
            with self._lock:
                _count_tokens_to_completion(matcher, self._syntax, MAX_TRIAL_TOKENS)
        return matcher.get_error()

    def _compile(self, grammar: str) -> LLMatcher:
        with self._lock:
            return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)


class GrammarConstraint:
    """The constraint of one answer.

    A small model may continue a string or a list until it is cut off, which makes the answer useless. Therefore, if a
    sampled token would leave too few tokens to complete an answer in JSON, a token that shortens the answer replaces
    it. Free text is never shortened.
    """

    def __init__(self, matcher: LLMatcher, syntax: _SyntaxTokens) -> None:
        self._matcher = matcher
        self._syntax = syntax
        self._remaining = 0
        self._check_from: float = float("inf")  # remaining tokens at or below which the next token is checked

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def is_complete(self) -> bool:
        """Whether the answer is valid as it is, and not free text that may continue."""
        return self._matcher.is_accepting() and (self.is_finished or not self._syntax.is_free_text(self._mask()))

    def accept_forced(self, remaining: int, limit: int) -> list[int]:
        """Accept the next tokens as long as the grammar leaves no choice, and return them.

        Args:
            remaining: The number of tokens that the answer may still have.
            limit: The maximum number of tokens to accept.

        Raises:
            ModelError: The grammar became too complex.
        """
        tokens = self._matcher.compute_ff_tokens()[: min(remaining, limit)]
        if tokens and not self._matcher.consume_tokens(tokens):
            raise self._failure()
        self._remaining = remaining - len(tokens)
        return tokens

    def mask(self, logits: Logits) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place.

        Raises:
            ModelError: The grammar became too complex.
        """
        bits = np.frombuffer(self._mask(), np.uint8)
        allowed = np.unpackbits(bits, count=logits.size, bitorder="little").view(np.bool_)
        np.copyto(logits, -np.inf, where=~allowed)

    def accept(self, token: int) -> int:
        """Accept a sampled token, or one that shortens the answer if few tokens remain.

        Returns:
            The accepted token.

        Raises:
            ModelError: The grammar forbids the token, or became too complex.
        """
        if self._remaining <= self._check_from or (
            self._remaining <= CHECKED_REMAINING and token in self._syntax.openers
        ):
            token = self._replace_if_too_long(token)
        if not self._matcher.consume_token(token):
            raise self._failure()
        return token

    def _replace_if_too_long(self, token: int) -> int:
        """Return the token if the answer can be completed after it, or else one that shortens the answer."""
        mask = self._mask()
        if self._syntax.is_free_text(mask):
            self._check_from = self._remaining - _FREE_TEXT_CHECK_INTERVAL
            return token
        trial = self._matcher.deep_copy()
        trial.consume_token(token)
        slack = self._remaining - 1 - _count_tokens_to_completion(trial, self._syntax, self._remaining)
        self._check_from = self._remaining - slack // 2 if slack > CHECKED_SLACK else self._remaining
        return token if slack >= 0 else self._syntax.choose_closing_token(mask)

    def _mask(self) -> TokenMask:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._failure()
        return mask

    def _failure(self) -> ModelError:
        # llguidance's own message may quote the client's schema.
        logger.error("a grammar failed during generation: %s", self._matcher.stop_reason())
        return ModelError("The model's output could not be held to the schema. Simplify the schema.")


class _SyntaxTokens:
    """Tokens with a role in JSON, which identify the position in an answer and shorten it.

    Attributes:
        openers: Tokens that contain a character which may open or continue a nested value.
    """

    def __init__(self, token_bytes: Sequence[bytes], stop_ids: Sequence[int]) -> None:
        ids: dict[bytes, int] = {}
        for token, data in enumerate(token_bytes):
            ids.setdefault(data, token)
        self._stop_ids = stop_ids
        self.openers = frozenset(token for token, data in enumerate(token_bytes) if set(data) & set(b'[{,"'))

        def known(*texts: bytes) -> list[int]:
            return [ids[text] for text in texts if text in ids]

        self._line_break, self._letter = known(b"\n"), known(b"z")
        self._quote, self._space = known(b'"'), known(b" ")
        self._closing_brackets, self._opening_brackets = known(b"}", b"]", b","), known(b"{", b"[")
        self._flat_values = known(b"n", b'"', b"0", b"t")  # beginnings of values without nesting; null is the shortest

    def is_free_text(self, mask: TokenMask) -> bool:
        """Return whether free text may continue; no position in JSON allows both a line break and a letter."""
        return _first_allowed(self._line_break, mask) is not None and self._is_in_string(mask)

    def choose_closing_token(self, mask: TokenMask) -> int:
        """Return the allowed token that probably completes JSON with the fewest tokens."""
        if self._is_in_string(mask):
            candidates = [*self._stop_ids, *self._quote]
        else:
            may_nest = _first_allowed(self._opening_brackets, mask) is not None
            values = self._flat_values if may_nest else self._quote
            candidates = [*self._stop_ids, *self._closing_brackets, *values, *self._space]
        token = _first_allowed(candidates, mask)
        # Otherwise any allowed token: the last one is a long piece of a string, or a digit other than zero.
        return int.from_bytes(mask, "little").bit_length() - 1 if token is None else token

    def _is_in_string(self, mask: TokenMask) -> bool:
        """Return whether a string may continue; no value in JSON begins with this letter."""
        return _first_allowed(self._letter, mask) is not None


class _Vocabulary:
    """A tokenizer in the form that llguidance requires."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        control_texts = {token: text.encode() for text, token in tokenizer.control_tokens.items()}
        special = [token for token, data in enumerate(tokenizer.token_bytes) if token in control_texts or not data]
        self.tokens = list(tokenizer.token_bytes)
        for token in special:
            self.tokens[token] = b"\xff" + control_texts.get(token, b"<%d>" % token)
        self.special_token_ids = special
        self.bos_token_id = None
        self.eos_token_id = stop_ids[0] if stop_ids else None
        self._tokenizer = tokenizer
        self._ids = {data: token for token, data in enumerate(tokenizer.token_bytes) if data}

    def __call__(self, text: bytes) -> list[int]:
        """Return the ids of a text that the grammar forces, as the model would write it if possible."""
        ids = self._tokenizer.encode(text.decode())
        first = self._tokenizer.token_bytes[ids[0]] if ids else b""
        if first.startswith(b" ") and not text.startswith(b" "):  # SentencePiece adds a space
            without_space = self._ids.get(first[1:])
            ids[:1] = [] if without_space is None else [without_space]
        if b"".join(self._tokenizer.token_bytes[token] for token in ids) == text:
            return ids
        return list(self._encode_greedily(text))

    def _encode_greedily(self, text: bytes) -> Iterator[int]:
        position = 0
        while position < len(text):
            ends = range(min(len(text), position + self._tokenizer.max_token_length), position, -1)
            end = next((end for end in ends if text[position:end] in self._ids), None)
            if end is None:  # no token begins with this byte, so the grammar cannot have forced it
                return
            yield self._ids[text[position:end]]
            position = end


def _first_allowed(tokens: Iterable[int], mask: TokenMask) -> int | None:
    return next((token for token in tokens if mask[token >> 3] >> (token & 7) & 1), None)


def _count_tokens_to_completion(matcher: LLMatcher, syntax: _SyntaxTokens, limit: int) -> int:
    """Return the number of tokens that complete an answer or lead to free text.

    Args:
        matcher: The state of the answer, which is modified.
        syntax: The tokens of JSON's syntax.
        limit: The number of tokens at which the count stops.
    """
    count = 0
    while count < limit and not matcher.is_stopped():
        tokens = matcher.compute_ff_tokens()
        if not tokens:
            mask = matcher.compute_bitmask()
            if syntax.is_free_text(mask):
                break
            tokens = [syntax.choose_closing_token(mask)]
        count += len(tokens)
        matcher.consume_tokens(tokens)
    return count
