from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from responses_kit import errors
from responses_kit.backends.local.inference.engine import Logits
from responses_kit.backends.local.inference.sampling import Sampler, log_probabilities


def logits(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def draws(sampler: Sampler, *values: float, count: int = 4000) -> Counter[int]:
    return Counter(sampler.sample(logits(*values)) for _ in range(count))


def seeded(**values: float) -> Sampler:
    return Sampler(random=np.random.default_rng(1), **values)  # type: ignore[arg-type]  # all are floats


class AllowOnly:
    """A constraint that allows some tokens, may replace one by another, and records the accepted ones."""

    def __init__(self, *allowed: int, replacements: dict[int, int] | None = None) -> None:
        self.allowed = allowed
        self.replacements = replacements or {}
        self.accepted: list[int] = []

    def mask(self, logits: Logits) -> None:
        saved = logits[list(self.allowed)]
        logits[:] = -np.inf
        logits[list(self.allowed)] = saved

    def accept(self, token: int) -> int:
        self.accepted.append(token)
        return self.replacements.get(token, token)


def test_temperature_zero_is_greedy():
    assert Sampler(temperature=0).sample(logits(1, 3, 2)) == 1


def test_presence_penalty_applies_once_per_token():
    sampler = Sampler(temperature=0, presence_penalty=0.5)
    assert [sampler.sample(logits(3, 2.9, 0)) for _ in range(5)] == [0, 1, 0, 0, 0]


def test_frequency_penalty_applies_per_occurrence():
    sampler = Sampler(temperature=0, frequency_penalty=1)
    assert [sampler.sample(logits(3, 1.5, 0)) for _ in range(5)] == [0, 0, 1, 0, 1]


def test_penalties_are_subtracted_from_logits():
    sampler = Sampler(temperature=0, presence_penalty=2, frequency_penalty=1)
    sampler.sample(logits(5, 0, 0))
    sampler.sample(logits(5, 0, 0))
    values = logits(5, 0, 0)
    sampler.sample(values)
    assert values.tolist() == [5 - 2 - 2 * 1, 0, 0]


def test_negative_penalties_favour_repetition():
    sampler = Sampler(temperature=0, presence_penalty=-2)
    assert [sampler.sample(values) for values in (logits(1, 0), logits(0, 1))] == [0, 0]


def test_zero_penalties_change_nothing():
    sampler = Sampler(temperature=0)
    assert [sampler.sample(logits(3, 2.9)) for _ in range(3)] == [0, 0, 0]


def test_temperature_one_samples_by_probability():
    seen = draws(seeded(), np.log(0.7), np.log(0.2), np.log(0.1))
    assert [seen[token] / 4000 for token in range(3)] == pytest.approx([0.7, 0.2, 0.1], abs=0.03)


def test_temperature_divides_logits():
    seen = draws(seeded(temperature=0.5), np.log(0.6), np.log(0.4))
    assert seen[0] / 4000 == pytest.approx(0.36 / 0.52, abs=0.03)


def test_top_p_keeps_smallest_sufficient_set():
    seen = draws(seeded(top_p=0.75), np.log(0.1), np.log(0.5), np.log(0.1), np.log(0.3))
    assert set(seen) == {1, 3}
    assert seen[1] / 4000 == pytest.approx(0.5 / 0.8, abs=0.03)


def test_top_p_zero_is_greedy():
    assert set(draws(seeded(top_p=0.0), 1, 1.1, 1, count=100)) == {1}


def test_tiny_temperature_is_greedy_without_overflow():
    assert set(draws(seeded(temperature=1e-30), 1, 500, 499, count=100)) == {1}


def test_constraint_masks_before_sampling_and_receives_token():
    constraint = AllowOnly(0, 2)
    sampler = Sampler(temperature=0, constraint=constraint)
    assert sampler.sample(logits(1, 9, 2)) == 2
    assert constraint.accepted == [2]


def test_forced_token_counts_as_sampled():
    sampler = Sampler(temperature=0, presence_penalty=5, constraint=AllowOnly(0, 1, 2, replacements={2: 1}))
    assert [sampler.sample(logits(1, 3, 4)) for _ in range(2)] == [1, 1]  # the penalty applies to the accepted token


@given(
    arrays.arrays(np.float32, st.integers(2, 40), elements=st.floats(-80, 80, width=32)),
    st.data(),
    st.floats(0.01, 2),
    st.floats(0, 1),
)
def test_disallowed_token_is_never_sampled(values: Logits, data: st.DataObject, temperature: float, top_p: float):
    allowed = data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1))
    sampler = Sampler(temperature=temperature, top_p=top_p, constraint=AllowOnly(*allowed))
    assert all(sampler.sample(values.copy()) in allowed for _ in range(5))


@pytest.mark.parametrize("values", [(float("nan"), 1.0), (float("-inf"), float("-inf")), (float("inf"), 0.0)])
def test_non_finite_logits_are_model_error(values: tuple[float, ...]):
    with pytest.raises(errors.ModelError):
        Sampler().sample(logits(*values))


@given(arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-80, 80, width=32)), st.integers(0, 20))
def test_probabilities_sum_to_one(values: Logits, top: int):
    before = values.copy()
    logs, most_likely = log_probabilities(values, top)
    assert (values == before).all()
    assert np.exp(logs).sum() == pytest.approx(1)
    assert len(most_likely) == min(top, len(values))
    assert [logs[token] for token in most_likely] == sorted(logs, reverse=True)[: len(most_likely)]


@pytest.mark.parametrize("values", [(0.0, float("-inf")), (3e38, -3e38), (0.0, float("nan"))])
def test_logprobs_are_finite(values: tuple[float, ...]):
    logs, most_likely = log_probabilities(logits(*values), 2)
    assert np.isfinite(logs).all()
    assert (logs <= 0).all()
    assert len(most_likely) == 2
