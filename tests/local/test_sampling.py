from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from responses_kit import errors
from responses_kit.backends.local.inference.engine import Logits
from responses_kit.backends.local.inference.sampling import Sampler, probabilities


def logits(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def draws(sampler: Sampler, *values: float, count: int = 4000) -> Counter[int]:
    return Counter(sampler.sample(logits(*values)) for _ in range(count))


def seeded(**values: float) -> Sampler:
    return Sampler(random=np.random.default_rng(1), **values)  # type: ignore[arg-type]  # all are floats


class Only:
    """Allows some tokens, and notes which came; may put one in the place of another."""

    def __init__(self, *allowed: int, instead: dict[int, int] | None = None) -> None:
        self.allowed = allowed
        self.instead = instead or {}
        self.came: list[int] = []

    def mask(self, logits: Logits) -> None:
        kept = logits[list(self.allowed)]
        logits[:] = -np.inf
        logits[list(self.allowed)] = kept

    def accept(self, token: int) -> int:
        self.came.append(token)
        return self.instead.get(token, token)


def test_temperature_zero_takes_the_likeliest_token():
    assert Sampler(temperature=0).sample(logits(1, 3, 2)) == 1


def test_presence_penalty_counts_once_however_often_a_token_came():
    sampler = Sampler(temperature=0, presence_penalty=0.5)
    assert [sampler.sample(logits(3, 2.9, 0)) for _ in range(5)] == [0, 1, 0, 0, 0]


def test_frequency_penalty_counts_every_time():
    sampler = Sampler(temperature=0, frequency_penalty=1)
    assert [sampler.sample(logits(3, 1.5, 0)) for _ in range(5)] == [0, 0, 1, 0, 1]


def test_both_penalties_are_subtracted_from_the_logits():
    sampler = Sampler(temperature=0, presence_penalty=2, frequency_penalty=1)
    sampler.sample(logits(5, 0, 0))
    sampler.sample(logits(5, 0, 0))
    values = logits(5, 0, 0)
    sampler.sample(values)
    assert values.tolist() == [5 - 2 - 2 * 1, 0, 0]


def test_negative_penalties_favour_what_came_before():
    sampler = Sampler(temperature=0, presence_penalty=-2)
    assert [sampler.sample(values) for values in (logits(1, 0), logits(0, 1))] == [0, 0]


def test_without_penalties_tokens_are_not_held_against_the_answer():
    sampler = Sampler(temperature=0)
    assert [sampler.sample(logits(3, 2.9)) for _ in range(3)] == [0, 0, 0]


def test_temperature_one_draws_in_proportion_to_the_probabilities():
    seen = draws(seeded(), np.log(0.7), np.log(0.2), np.log(0.1))
    assert [seen[token] / 4000 for token in range(3)] == pytest.approx([0.7, 0.2, 0.1], abs=0.03)


def test_temperature_divides_the_logits():
    seen = draws(seeded(temperature=0.5), np.log(0.6), np.log(0.4))
    assert seen[0] / 4000 == pytest.approx(0.36 / 0.52, abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    seen = draws(seeded(top_p=0.75), np.log(0.1), np.log(0.5), np.log(0.1), np.log(0.3))
    assert set(seen) == {1, 3}
    assert seen[1] / 4000 == pytest.approx(0.5 / 0.8, abs=0.03)


def test_top_p_of_zero_leaves_the_likeliest_token():
    assert set(draws(seeded(top_p=0.0), 1, 1.1, 1, count=100)) == {1}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    assert set(draws(seeded(temperature=1e-30), 1, 500, 499, count=100)) == {1}


def test_a_constraint_masks_before_the_choice_and_hears_of_it():
    constraint = Only(0, 2)
    sampler = Sampler(temperature=0, constraint=constraint)
    assert sampler.sample(logits(1, 9, 2)) == 2
    assert constraint.came == [2]


def test_the_token_that_a_constraint_puts_in_place_is_the_one_that_came():
    sampler = Sampler(temperature=0, presence_penalty=5, constraint=Only(0, 1, 2, instead={2: 1}))
    assert [sampler.sample(logits(1, 3, 4)) for _ in range(2)] == [1, 1]  # and that one is penalised, not the other


@given(
    arrays.arrays(np.float32, st.integers(2, 40), elements=st.floats(-80, 80, width=32)),
    st.data(),
    st.floats(0.01, 2),
    st.floats(0, 1),
)
def test_a_forbidden_token_never_comes(values: Logits, data: st.DataObject, temperature: float, top_p: float):
    allowed = data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1))
    sampler = Sampler(temperature=temperature, top_p=top_p, constraint=Only(*allowed))
    assert all(sampler.sample(values.copy()) in allowed for _ in range(5))


@pytest.mark.parametrize("values", [(float("nan"), 1.0), (float("-inf"), float("-inf")), (float("inf"), 0.0)])
def test_logits_that_say_nothing_are_a_model_error(values: tuple[float, ...]):
    with pytest.raises(errors.ModelError):
        Sampler().sample(logits(*values))


@given(arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-80, 80, width=32)), st.integers(0, 20))
def test_probabilities_are_the_models_own_and_add_up_to_one(values: Logits, top: int):
    before = values.copy()
    logs, likeliest = probabilities(values, top)
    assert (values == before).all()
    assert np.exp(logs).sum() == pytest.approx(1)
    assert len(likeliest) == min(top, len(values))
    assert [logs[token] for token in likeliest] == sorted(logs, reverse=True)[: len(likeliest)]


@pytest.mark.parametrize("values", [(0.0, float("-inf")), (3e38, -3e38), (0.0, float("nan"))])
def test_logarithms_of_probabilities_are_finite(values: tuple[float, ...]):
    logs, likeliest = probabilities(logits(*values), 2)
    assert np.isfinite(logs).all()
    assert (logs <= 0).all()
    assert len(likeliest) == 2
