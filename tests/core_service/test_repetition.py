"""Repetition detection against an oracle that compares copies one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.params import MAX_REPETITION_SPAN, RepetitionDetectionParams
from headrace.core_service.repetition import ends_in_repetition


def detects(output, sizes, count):
    smallest, largest = sizes
    return ends_in_repetition(np.array(output, np.int32), RepetitionDetectionParams(smallest, largest, count))


def oracle(output, sizes, count):
    return any(
        size * count <= len(output) and output[len(output) - size * count :] == output[len(output) - size :] * count
        for size in range(sizes[0], sizes[1] + 1)
    )


def test_a_token_that_comes_often_enough_is_a_repetition():
    assert detects([1, 2, 7, 7, 7], (1, 1), 3)


def test_fewer_copies_than_asked_for_are_none():
    assert not detects([1, 2, 7, 7], (1, 1), 3)


def test_a_pattern_of_two_tokens_is_found():
    assert detects([9, 1, 2, 1, 2, 1, 2], (1, 4), 3)
    assert not detects([9, 1, 2, 1, 2, 1, 2], (1, 1), 3)
    assert not detects([9, 1, 2, 1, 2, 1, 2], (3, 4), 2)


def test_a_last_copy_that_is_not_whole_does_not_count():
    assert not detects([1, 2, 3, 1, 2, 3, 1, 2], (3, 3), 3)
    assert not detects([1, 2, 3, 1, 2, 3, 4], (1, 3), 2)


def test_what_repeats_in_the_middle_does_not_count():
    assert not detects([5, 5, 5, 5, 6], (1, 2), 2)


@pytest.mark.parametrize("output", [[], [1]])
def test_an_output_too_short_for_any_pattern_does_not_repeat(output):
    assert not detects(output, (1, 100), 2)


def test_the_longest_pattern_that_is_allowed_is_found():
    half = MAX_REPETITION_SPAN // 2
    pattern = np.random.default_rng(0).integers(0, 50_000, half).tolist()
    assert detects([0, *pattern, *pattern], (1, half), 2)
    assert not detects([0, *pattern, *pattern[:-1]], (1, half), 2)


def test_spans_with_equal_hashes_are_compared_token_by_token():
    # Of the Thue-Morse word and its complement no polynomial hash modulo 2**64 can tell the difference.
    word = [(place.bit_count()) % 2 for place in range(2048)]
    complement = [1 - letter for letter in word]
    assert not detects([*word, *complement], (2048, 2048), 2)
    assert detects([*word, *word], (2048, 2048), 2)


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.integers(0, 6),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(2, 5),
)
def test_it_finds_what_the_oracle_finds(start, pattern, copies, smallest, more, count):
    output = start + pattern * copies
    sizes = (smallest, smallest + more)
    assert detects(output, sizes, count) == oracle(output, sizes, count)
