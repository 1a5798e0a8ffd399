import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headrace.core_service.sampling.token_order import (
    first_in_row,
    ids_of,
    order_keys,
    positive_values_of,
    ranks_in_row,
    row_starts,
    rows_of,
    top_keys,
)

FEW_VALUES = st.sampled_from([-np.inf, -3.4e38, -1.5, -1.0, -0.0, 0.0, 1e-40, 0.5, 2.0, 3.4e38])


def in_order(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@given(arrays(np.float32, st.integers(1, 40), elements=FEW_VALUES | st.floats(width=32, allow_nan=False)))
@settings(deadline=None)
def test_keys_sort_by_value_then_id(values: np.ndarray) -> None:
    keys = np.sort(order_keys(np.zeros(len(values), np.int64), values, np.arange(len(values))))
    assert ids_of(keys).tolist() == in_order(values)


def test_keys_hold_rows_ids_and_positive_values() -> None:
    rows, ids = np.array([0, 7, 255]), np.array([2**24 - 1, 0, 5])
    values = np.array([0, 1.5, 2**40], np.float32)
    keys = order_keys(rows, values, ids)
    assert rows_of(keys).tolist() == rows.tolist()
    assert ids_of(keys).tolist() == ids.tolist()
    assert positive_values_of(keys).tolist() == values.tolist()
    assert row_starts(keys, 256)[[0, 1, 7, 8, 255, 256]].tolist() == [0, 1, 1, 2, 2, 3]


@given(st.data())
@settings(deadline=None)
def test_top_keys_begin_with_the_top_of_each_row(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 600)))
    values = data.draw(arrays(np.float32, shape, elements=FEW_VALUES, fill=st.just(-1.0)))
    values[:, ::3] += np.float32(0.25) * np.arange(len(values[0, ::3]), dtype=np.float32)[::-1]
    counts = np.array(data.draw(st.lists(st.integers(1, shape[1]), min_size=shape[0], max_size=shape[0])), np.int32)
    keys, places = first_in_row(top_keys(torch.from_numpy(values), counts), counts)
    for row, count in enumerate(counts):
        assert ids_of(keys[rows_of(keys) == row]).tolist() == in_order(values[row])[:count]
        assert places[rows_of(keys) == row].tolist() == list(range(count))


@pytest.mark.parametrize("vocab_size", [640, 49_155])
def test_top_keys_look_at_few_entries(vocab_size: int) -> None:
    values = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    assert len(top_keys(values, np.array([20, 5, 1]))) < 3 * 40


def test_top_keys_leave_out_what_is_too_low() -> None:
    values = torch.full((2, 1000), -torch.inf)
    values[0, 999] = values[0, 3] = 1
    values[1, 5] = 0
    keys = top_keys(values, np.array([50, 50]), lowest=-1e30)
    assert rows_of(keys).tolist() == [0, 0, 1]
    assert ids_of(keys).tolist() == [3, 999, 5]


@given(arrays(np.float32, st.integers(1, 60), elements=FEW_VALUES))
@settings(deadline=None)
def test_ranks_count_larger_values_and_equal_ones_before(values: np.ndarray) -> None:
    every = np.arange(len(values))
    ranks = ranks_in_row(values, every)
    assert ranks[in_order(values)].tolist() == list(range(1, len(values) + 1))
    assert [ranks_in_row(values, every[i : i + 1])[0] for i in range(len(values))] == ranks.tolist()
