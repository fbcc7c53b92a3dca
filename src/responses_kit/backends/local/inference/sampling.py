"""Sampling of a token from logits, with the parameters of the OpenAI API."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import numpy as np

from ....errors import ModelError
from .engine import Logits

__all__ = ["Constraint", "Sampler", "log_probabilities"]

_MIN_LOGPROB = -9999.0
"""The lowest log probability that is reported; JSON has no infinity."""


class Constraint(Protocol):
    """A rule for the next token of an answer."""

    def mask(self, logits: Logits) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place."""

    def accept(self, token: int) -> int:
        """Accept a sampled token or replace it, and return the accepted one."""


class Sampler:
    """Samples the tokens of one answer, and counts them for the penalties.

    Args:
        temperature: Divides the logits before a token is drawn; 0 selects the most likely token.
        top_p: The total probability of the most likely tokens from which one is drawn.
        presence_penalty: Subtracted from the logit of each token that the answer contains.
        frequency_penalty: Subtracted from a token's logit once for each occurrence in the answer.
        constraint: Forbids tokens.
        random: The source of random numbers.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        constraint: Constraint | None = None,
        random: np.random.Generator | None = None,
    ) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.presence_penalty = presence_penalty
        self.frequency_penalty = frequency_penalty
        self.constraint = constraint
        self._random = random or np.random.default_rng()
        self._has_penalty = bool(presence_penalty or frequency_penalty)
        self._counts: Counter[int] = Counter()

    def sample(self, logits: Logits) -> int:
        """Sample the next token. The logits are modified.

        Raises:
            ModelError: The logits are not finite, or all tokens are forbidden.
        """
        if self._counts:
            seen = np.fromiter(self._counts, np.int64, len(self._counts))
            times = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[seen] -= self.presence_penalty + self.frequency_penalty * times
        if self.constraint:
            self.constraint.mask(logits)
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise ModelError("The model returned no usable prediction for the next token.")
        token = best if self.temperature <= 0 else self._draw(logits, float(logits[best]))
        if self.constraint:
            token = self.constraint.accept(token)
        if self._has_penalty:
            self._counts[token] += 1
        return token

    def _draw(self, logits: Logits, highest: float) -> int:
        weights = np.subtract(logits, highest)  # at most 0, so that no temperature causes an overflow
        with np.errstate(over="ignore", under="ignore"):
            weights /= max(self.temperature, 1e-6)
            np.exp(weights, out=weights)
        if self.top_p >= 1:
            return self._pick(weights)
        total = float(weights.sum())
        # All tokens below this threshold together weigh less than the tail that top_p cuts off, so only the rest is
        # sorted.
        candidates = np.flatnonzero(weights >= (1 - self.top_p) * total / weights.size)
        descending = np.sort(weights[candidates])[::-1]
        cut = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), self.top_p * total))
        candidates = candidates[weights[candidates] >= descending[min(cut, candidates.size - 1)]]
        return int(candidates[self._pick(weights[candidates])])

    def _pick(self, weights: Logits) -> int:
        cumulative = np.cumsum(weights, dtype=np.float64)
        # The point is strictly below the total in spite of rounding, so a token without weight is never drawn.
        point = min(self._random.random() * cumulative[-1], np.nextafter(cumulative[-1], 0))
        return int(np.searchsorted(cumulative, point, side="right"))


def log_probabilities(logits: Logits, top: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], list[int]]:
    """Return log probabilities of the next token, before penalties, temperature and constraints.

    Args:
        logits: The model's logits, which are not modified.
        top: The number of most likely tokens to return.

    Returns:
        The natural logarithm of each token's probability, finite; and the ids of the most likely tokens in descending
        order.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    values = np.clip(np.nan_to_num(values, nan=_MIN_LOGPROB), _MIN_LOGPROB, 0.0)
    if not top:
        return values, []
    most_likely = np.argpartition(values, -top)[-top:] if top < values.size else np.arange(values.size)
    return values, most_likely[np.argsort(-values[most_likely], kind="stable")].tolist()
