"""Chi-square tests of each filter, of their combinations, and of both with edits; seeds are fixed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from distributions import assert_drawn_from, draw_many, expected_probabilities
from sampling_oracle import RowParams, normal_logits

DRAWS = 40_000
DRAWS_WITH_EDITS = 10_000  # edits are made row by row
LOGITS = normal_logits(41, scale=0.9, seed=3)

FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
}
COMBINATIONS = {
    " and ".join(names) or "no filter": names
    for names in (tuple(name for i, name in enumerate(FILTERS) if number >> i & 1) for number in range(16))
}
EDITS = {
    "bias": RowParams(bias=((3, 2.5), (9, -1.0), (40, 100.0 / 64))),
    "allowed ids": RowParams(allowed=tuple(range(0, 41, 2))),
    "grammar": RowParams(in_grammar=tuple(range(5, 38))),
    "bad words": RowParams(bad_words=((7,), (1, 2, 8), (2, 9), (5, 10)), output=(0, 1, 2)),
    "min_tokens": RowParams(forbidden=(0, 4)),
    "presence": RowParams(presence=1.1, prompt=(1, 2), output=(2, 2, 3, 17)),
    "frequency": RowParams(frequency=-0.4, prompt=(1, 2), output=(2, 2, 3, 17)),
    "repetition": RowParams(repetition=1.4, prompt=tuple(range(10)), output=(20, 21, 21)),
}
EVERY_EDIT = RowParams(
    bias=((3, 2.5), (9, -1.0)),
    allowed=tuple(range(38)),
    in_grammar=tuple(range(1, 41)),
    bad_words=((7,), (2, 9)),
    forbidden=(4,),
    presence=0.3,
    frequency=0.2,
    repetition=1.2,
    prompt=(1, 2, 30),
    output=(2, 2, 3, 17, 2),
)


def with_filters(params: RowParams, name: str) -> RowParams:
    for filter_ in COMBINATIONS[name]:
        params = replace(params, **FILTERS[filter_])
    return params


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_draws_follow_the_filtered_distribution(name: str, vary: str) -> None:
    params = with_filters(RowParams(), name)
    tokens = draw_many(LOGITS, params, DRAWS, vary=vary)
    assert_drawn_from(tokens, expected_probabilities(LOGITS, params))


@pytest.mark.parametrize("edit", EDITS)
def test_draws_follow_the_edited_distribution(edit: str) -> None:
    tokens = draw_many(LOGITS, EDITS[edit], DRAWS_WITH_EDITS)
    assert_drawn_from(tokens, expected_probabilities(LOGITS, EDITS[edit]))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_draws_follow_the_distribution_of_all_edits_and_filters_together(name: str) -> None:
    params = with_filters(EVERY_EDIT, name)
    tokens = draw_many(LOGITS, params, DRAWS_WITH_EDITS)
    assert_drawn_from(tokens, expected_probabilities(LOGITS, params))


@pytest.mark.parametrize("first_seed", range(5))
def test_the_test_sees_a_distribution_that_is_a_little_off(first_seed: int) -> None:
    params = RowParams(seed=first_seed)
    tokens = draw_many(LOGITS, params, DRAWS)
    with pytest.raises(AssertionError):
        assert_drawn_from(tokens, expected_probabilities(LOGITS, replace(params, temperature=1.05)))


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
def test_draws_over_several_blocks_follow_the_distribution(temperature: float) -> None:
    logits, params = normal_logits(1001, scale=1.0), RowParams(temperature=temperature)
    assert_drawn_from(draw_many(logits, params, DRAWS), expected_probabilities(logits, params))


def test_a_huge_temperature_draws_evenly() -> None:
    tokens = draw_many(normal_logits(16, scale=10.0), RowParams(temperature=1e30), DRAWS)
    assert_drawn_from(tokens, np.full(16, 1 / 16))
