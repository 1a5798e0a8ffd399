"""Filters and draws on small whole weights, where every boundary can be hit exactly."""

from collections import Counter

import numpy as np
import pytest
import torch

from headrace.core_service.sampling.token_filters import Candidates, draw, draw_from_blocks, within_top_p


def make_candidates(*rows: dict[int, float]) -> Candidates:
    """One dictionary of id and weight for each row."""
    return Candidates(
        rows=np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
        ids=np.array([token for row in rows for token in row]),
        weights=np.array([weight for row in rows for weight in row.values()], np.float32),
    )


def evenly_spaced_bits(count: int) -> np.ndarray:
    """The `count` random numbers i / count, for a power of two."""
    return np.arange(count, dtype=np.uint64) * np.uint64(2**64 // count)


def test_each_token_is_drawn_as_often_as_it_weighs() -> None:
    weights = {3: 0.0, 5: 1.0, 6: 0.0, 10: 2.0, 11: 5.0, 90: 0.0}
    tokens = draw(make_candidates(*[weights] * 8), evenly_spaced_bits(8))
    assert tokens.tolist() == [5, 10, 10, 11, 11, 11, 11, 11]


def test_draws_from_blocks_are_those_from_candidates() -> None:
    weights = np.random.default_rng(0).integers(0, 3, 6 * 4) * np.array([1, 1, 0, 1, 1, 0]).repeat(4)
    weights[-5] += 64 - weights.sum()
    bits = evenly_spaced_bits(64)
    blocks = torch.from_numpy(weights.astype(np.int64).reshape(1, 6, 4)).repeat(64, 1, 1)
    tokens = draw_from_blocks(blocks, bits)
    candidates = make_candidates(*[dict(enumerate(weights.tolist()))] * 64)
    assert tokens.tolist() == draw(candidates, bits).tolist()
    assert Counter(tokens.tolist()) == Counter({i: int(weight) for i, weight in enumerate(weights) if weight})


def test_fractions_of_weights_do_not_count() -> None:
    assert draw(make_candidates({0: 0.99, 1: 1.99, 2: 0.5}), np.array([2**64 - 1], np.uint64)).tolist() == [1]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (2**-149, [7]),
        (0.5, [7]),  # exactly reached by the first
        (0.5 + 2**-20, [3, 7]),
        (0.75, [3, 7]),
        (0.875, [3, 4, 7]),  # of two equal weights the lower id is enough
        (1 - 2**-24, [3, 4, 5, 7]),
        (1.0, [3, 4, 5, 7]),
    ],
)
def test_top_p_keeps_the_shortest_run_that_reaches_it(top_p: float, kept: list[int]) -> None:
    candidates = make_candidates({0: 2.0**40}, {3: 4.0, 4: 2.0, 5: 2.0, 7: 8.0})
    mask = within_top_p(candidates, np.array([0.25, top_p], np.float32), np.array([2**40, 16]))
    assert candidates.ids[1:][mask[1:]].tolist() == kept
    assert mask[0]


def test_top_p_counts_weight_that_is_not_among_the_candidates() -> None:
    candidates = make_candidates({3: 8.0, 4: 4.0})
    mask = within_top_p(candidates, np.array([0.5], np.float32), np.array([20]))
    assert mask.tolist() == [True, True]


def test_candidates_outside_a_mask_weigh_nothing() -> None:
    candidates = make_candidates({1: 5.0, 2: 6.0}, {9: 7.0}).only(np.array([False, True, True]))
    assert candidates.ids.tolist() == [1, 2, 9]
    assert candidates.row_totals(2).tolist() == [6, 7]
