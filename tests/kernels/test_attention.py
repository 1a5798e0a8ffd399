"""Paged attention equals plain attention, and its bits depend on nothing but a sequence's own tokens."""

import math

import pytest
import torch
from attention_steps import Sequence, attend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.kernels.layer_kernels import SPLIT_KEYS, LayerKernels

SHAPES = [
    ((4, 2), 64),
    ((9, 3), 64),
    ((3, 3), 80),
    ((6, 1), 8),
    ((2, 1), 96),
    ((4, 1), 128),
    ((1, 1), 256),
    ((2, 2), 20),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
few_examples = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def whole(kernels: LayerKernels, sequence: Sequence, length: int, window: int | None = None) -> torch.Tensor:
    """All its tokens in one chunk, alone."""
    return attend(kernels, [(sequence, 0, length)], window=window)[0]


@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 70])
def test_it_is_attention(
    kernels: LayerKernels, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    sequence = Sequence.random(150, heads, head_dim, dtype, seed=1)
    expected = sequence.attention(window)
    torch.testing.assert_close(
        whole(kernels, sequence, 150, window).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("window", [None, 1100])
def test_splits_add_up(kernels: LayerKernels, dtype: torch.dtype, window: int | None) -> None:
    length = 2 * SPLIT_KEYS + 77
    sequence = Sequence.random(length, (2, 1), 16, dtype, seed=1, scale=2.0)
    firsts = (0, SPLIT_KEYS - 1, SPLIT_KEYS, SPLIT_KEYS + 1, 2 * SPLIT_KEYS - 1, 2 * SPLIT_KEYS, length - 1)
    actual = attend(kernels, [(sequence, first, first + 1) for first in firsts], window=window)
    expected = sequence.attention(window)[list(firsts)]
    torch.testing.assert_close(
        torch.cat(actual).double(), expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype]
    )


@few_examples
@given(data=st.data())
def test_cutting_a_prompt_changes_no_bit(kernels: LayerKernels, dtype: torch.dtype, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 200), "length")
    cuts = sorted(data.draw(st.sets(st.integers(1, 200).filter(lambda cut: cut < length), max_size=5), "cuts"))
    window = data.draw(st.sampled_from([None, 1, 5, 64, 90]), "window")
    sequence = Sequence.random(length, (4, 2), 32, dtype, seed=length)
    expected = whole(kernels, sequence, length, window)
    pieces = [
        attend(kernels, [(sequence, first, end)], window=window)[0]
        for first, end in zip([0, *cuts], [*cuts, length], strict=True)
    ]
    assert torch.equal(torch.cat(pieces), expected)


@few_examples
@given(data=st.data())
def test_neighbours_blocks_and_threads_change_no_bit(
    kernels: LayerKernels, dtype: torch.dtype, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 180), min_size=1, max_size=6), "lengths")
    firsts = [data.draw(st.one_of(st.just(length - 1), st.integers(0, length - 1))) for length in lengths]
    window = data.draw(st.sampled_from([None, 30]), "window")
    block_size = data.draw(st.sampled_from([1, 8, 16, 24, 128]), "block size")
    sequences = [Sequence.random(length, (6, 2), 16, dtype, seed) for seed, length in enumerate(lengths)]
    work = list(zip(sequences, firsts, lengths, strict=True))
    torch.set_num_threads(data.draw(st.sampled_from([1, 2, 3]), "threads"))
    together = attend(kernels, work, window=window, block_size=block_size, seed=data.draw(st.integers(0, 9)))
    torch.set_num_threads(1)
    for item, actual in zip(work, together, strict=True):
        assert torch.equal(actual, attend(kernels, [item], window=window)[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 1030])
def test_long_contexts_are_the_same_alone_in_a_batch_and_with_threads(
    kernels: LayerKernels, dtype: torch.dtype, threads: int, window: int | None
) -> None:
    # Alone and with threads, C++ computes the splits of a decode side by side.
    lengths = [5, SPLIT_KEYS, 2 * SPLIT_KEYS + 9, SPLIT_KEYS + 1, 40]
    sequences = [Sequence.random(length, (9, 3), 64, dtype, seed) for seed, length in enumerate(lengths)]
    work = [(s, length - new, length) for s, length, new in zip(sequences, lengths, (1, 1, 1, 3, 40), strict=True)]
    torch.set_num_threads(1)
    together = attend(kernels, work, window=window)
    torch.set_num_threads(threads)
    for item, expected in zip(work, together, strict=True):
        assert torch.equal(attend(kernels, [item], window=window)[0], expected)


def test_a_query_that_is_not_a_number_stays_so_and_harms_nobody(kernels: LayerKernels, dtype: torch.dtype) -> None:
    bad, good = (Sequence.random(70, (4, 2), 32, dtype, seed) for seed in (1, 2))
    bad.queries[69] = math.nan
    attended = attend(kernels, [(bad, 69, 70), (good, 69, 70)])
    assert attended[0].isnan().all()
    assert torch.equal(attended[1], attend(kernels, [(good, 69, 70)])[0])


def test_huge_scores_do_not_overflow(kernels: LayerKernels, dtype: torch.dtype) -> None:
    sequence = Sequence.random(100, (2, 2), 64, dtype, seed=3, scale=100.0)
    actual = whole(kernels, sequence, 100).double()
    # Nearly all weight is on one key, but not where two scores are as near as their rounding.
    near = (actual - sequence.attention(None)).abs().amax(-1) < 1.0
    assert actual.isfinite().all()
    assert near.double().mean() > 0.97
