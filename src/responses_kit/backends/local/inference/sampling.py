"""From logits to a token, with the meaning that the OpenAI API gives to each parameter."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import numpy as np

from ....errors import ModelError
from .engine import Logits

__all__ = ["Constraint", "Sampler", "probabilities"]

_LEAST = -9999.0
"""Logarithm of a probability that is as good as none; JSON has no infinity."""


class Constraint(Protocol):
    """What an answer must look like, token by token."""

    def mask(self, logits: Logits) -> None:
        """Sets the logits of all tokens that may not come next to minus infinity, in place."""

    def accept(self, token: int) -> int:
        """Takes a token as the next one, or another one in its place; returns the one that came."""


class Sampler:
    """Chooses the tokens of one answer, and remembers them for the penalties.

    Args:
        temperature: 0 takes the likeliest token; above it, logits are divided by it and a token is drawn.
        top_p: Draws among the likeliest tokens alone that together have this probability.
        presence_penalty: Taken off the logit of each token that the answer holds already.
        frequency_penalty: Taken off as many times as the answer holds the token.
        constraint: Forbids tokens.
        random: Source of chance.
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
        self._penalised = bool(presence_penalty or frequency_penalty)
        self._counts: Counter[int] = Counter()

    def sample(self, logits: Logits) -> int:
        """Chooses the next token. Writes to the logits.

        Raises:
            ModelError: No token is possible: the logits are not numbers, or everything is forbidden.
        """
        if self._counts:
            seen = np.fromiter(self._counts, np.int64, len(self._counts))
            times = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[seen] -= self.presence_penalty + self.frequency_penalty * times
        if self.constraint:
            self.constraint.mask(logits)
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise ModelError("The model gave no usable prediction for the next token.")
        token = best if self.temperature <= 0 else self._draw(logits, float(logits[best]))
        if self.constraint:
            token = self.constraint.accept(token)
        if self._penalised:
            self._counts[token] += 1
        return token

    def _draw(self, logits: Logits, highest: float) -> int:
        weights = np.subtract(logits, highest)  # at most 0, so that no temperature can make it overflow
        with np.errstate(over="ignore", under="ignore"):
            weights /= max(self.temperature, 1e-6)
            np.exp(weights, out=weights)
        if self.top_p >= 1:
            return self._pick(weights)
        total = float(weights.sum())
        # Tokens below this, all together, weigh less than what top_p leaves out: sorting the others is enough.
        kept = np.flatnonzero(weights >= (1 - self.top_p) * total / weights.size)
        descending = np.sort(weights[kept])[::-1]
        cut = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), self.top_p * total))
        kept = kept[weights[kept] >= descending[min(cut, kept.size - 1)]]
        return int(kept[self._pick(weights[kept])])

    def _pick(self, weights: Logits) -> int:
        heights = np.cumsum(weights, dtype=np.float64)
        # Strictly below the top, whatever rounding does: so a token of no weight, such as a forbidden one, never comes.
        point = min(self._random.random() * heights[-1], np.nextafter(heights[-1], 0))
        return int(np.searchsorted(heights, point, side="right"))


def probabilities(logits: Logits, top: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], list[int]]:
    """The model's own view of the next token, before penalties, temperature and constraints.

    Args:
        logits: As the model gave them; they are not changed.
        top: How many of the likeliest tokens to name.

    Returns:
        For each token the natural logarithm of its probability, finite; and the likeliest tokens, likeliest first.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    values = np.clip(np.nan_to_num(values, nan=_LEAST), _LEAST, 0.0)
    if not top:
        return values, []
    likeliest = np.argpartition(values, -top)[-top:] if top < values.size else np.arange(values.size)
    return values, likeliest[np.argsort(-values[likeliest], kind="stable")].tolist()
