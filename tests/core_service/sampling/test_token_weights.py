import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_service.sampling.token_weights import LARGEST_WEIGHT, rates, weigh_, weigh_few


def weights_of(logits: np.ndarray, temperature: float) -> np.ndarray:
    rate = rates(np.full(len(logits), temperature, np.float32))
    return weigh_few(logits, np.full(len(logits), logits.max()), rate)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 2.0])
def test_weights_are_exponentials(temperature: float) -> None:
    logits = np.linspace(-20 * temperature, 0, 100_001).astype(np.float32)
    wanted = LARGEST_WEIGHT * np.exp(logits.astype(np.float64) / np.float32(temperature))
    # The exponent is rounded to float32: up to 2**-23 of its size, which is at most 20 * log2(e).
    assert np.abs(weights_of(logits, temperature) / wanted - 1).max() < 4e-6
    near = logits > -temperature
    assert np.abs(weights_of(logits, temperature)[near] / wanted[near] - 1).max() < 4e-7


def test_the_most_likely_token_has_exactly_the_largest_weight() -> None:
    for temperature in (1e-30, 0.01, 1.0, 2.0, 1e30):
        assert weights_of(np.array([3.7, -1e30], np.float32), temperature)[0] == LARGEST_WEIGHT


def test_weights_never_decrease_with_the_logit() -> None:
    logits = np.sort(np.random.default_rng(0).uniform(-50, 0, 1_000_000).astype(np.float32))
    assert (np.diff(weights_of(logits, 1.0)) >= 0).all()


def test_hopeless_tokens_weigh_less_than_one() -> None:
    logits = np.array([0, -29, -100, -1e30, np.finfo(np.float32).min, -np.inf], np.float32)
    assert (weights_of(logits, 1.0)[1:] < 1).all()
    assert (weights_of(logits, 1e-30)[1:] < 1).all()


def test_far_apart_logits_do_not_overflow() -> None:
    largest = np.finfo(np.float32).max
    assert weights_of(np.array([largest, -largest], np.float32), 0.01).tolist()[0] == LARGEST_WEIGHT


@given(st.lists(st.floats(-60, 0, width=32), min_size=1, max_size=50), st.floats(0.0625, 2, width=32))
@settings(deadline=None)
def test_a_weight_does_not_depend_on_its_neighbours(logits: list[float], temperature: float) -> None:
    values = np.array([0.0, *logits], np.float32)
    alone = [weights_of(np.array([0.0, x], np.float32), temperature)[1] for x in values]
    assert weights_of(values, temperature).tolist() == alone


def test_rows_have_their_own_rate_and_largest_logit() -> None:
    logits = torch.randn(3, 130, generator=torch.Generator().manual_seed(0))
    largest, rate = logits.amax(-1, keepdim=True), torch.from_numpy(rates(np.array([0.5, 1, 2], np.float32)))[:, None]
    weights = torch.empty(3, 130)
    weigh_(logits.clone(), largest, rate, torch.empty(3, 130), weights)
    for row in range(3):
        few = weigh_few(logits[row].numpy(), largest[row].expand(130).numpy(), rate[row].expand(130).numpy())
        assert (weights[row].numpy() == few).all()
