"""What draws should be distributed like, in float64, and whether they are."""

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from sampling_oracle import FloatRow, RowParams, edited_logits, make_columns

from headrace.core_service.sampling.sampler import Sampler


def expected_probabilities(logits: FloatRow, params: RowParams) -> NDArray[np.float64]:
    """The distribution in float64, filter after filter, each renormalizing what is left."""
    scaled = edited_logits(logits, params).astype(np.float64)
    probabilities = np.exp((scaled - scaled.max()) / params.temperature)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    if params.top_k:
        probabilities[np.argsort(-probabilities)[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        order = np.argsort(-probabilities)
        sums_before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[sums_before >= params.top_p]] = 0
    normalized: NDArray[np.float64] = probabilities / probabilities.sum()
    return normalized


def draw_many(logits: FloatRow, params: RowParams, draws: int, *, vary: str = "seed") -> NDArray[np.int32]:
    """Tokens of one row of logits [vocab] under many seeds, or at many positions of one output."""
    columns = make_columns([params] * draws, len(logits))
    if vary == "seed":
        columns = replace(columns, seed=np.arange(draws, dtype=np.uint64) + np.uint64(2**40))
    else:
        columns = replace(columns, output_position=np.arange(draws, dtype=np.int32))
    return Sampler()(torch.from_numpy(logits).expand(draws, -1), columns)[0]


def assert_drawn_from(tokens: NDArray[np.int32], probabilities: NDArray[np.float64]) -> None:
    """A chi-square test; with fixed seeds it cannot fail by chance once it has passed."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert (counts[probabilities == 0] == 0).all()
    expected = len(tokens) * probabilities
    rare = expected < 8
    counts, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    assert freedom > 0, "there is nothing to choose from"
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # about one in 10,000 by chance
