"""Columns written by numpy are what protobuf itself would have written, once parsed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.packed_columns import packed_floats, packed_integers

UINT32 = st.integers(0, 2**32 - 1)
FLOAT = st.floats(width=32, allow_nan=False)
EDGES = [2**bits + d for bits in (7, 14, 21, 28, 31) for d in (-1, 0, 1)]


@given(st.lists(UINT32 | st.sampled_from(EDGES)), st.lists(FLOAT))
def test_a_parsed_column_is_as_if_protobuf_had_written_it(integers, floats):
    data = packed_integers(4, np.array(integers, np.int64)) + packed_floats(5, np.array(floats, np.float32))
    expected = pb.LogprobColumns(token_ids=integers, values=floats)
    parsed = pb.LogprobColumns.FromString(data)
    assert parsed == expected
    assert parsed.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_any_integer_type_will_do(dtype):
    column = packed_integers(4, np.array([0, 1, 300, 2**31 - 1], dtype))
    assert list(pb.LogprobColumns.FromString(column).token_ids) == [0, 1, 300, 2**31 - 1]


def test_infinities_and_quiet_nans_are_kept():
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    parsed = pb.LogprobColumns.FromString(packed_floats(5, values))
    np.testing.assert_array_equal(np.array(parsed.values, np.float32), values)


def test_columns_join_what_is_there():
    message = pb.LogprobColumns(blob_digests=["x"], token_ids=[1])
    message.MergeFromString(packed_integers(4, np.array([2, 3])))
    assert message == pb.LogprobColumns(blob_digests=["x"], token_ids=[1, 2, 3])
