"""The one order of tokens: larger value first, and of equal values the lower id first.

Ranks, top-k lists and filters all use it. An entry of a chunk of rows is written as a single whole number that sorts in
that order, so any sort gives the same result:

    bits 63..56   row in the chunk
    bits 55..24   value, mapped so that larger floats give smaller numbers
    bits 23..0    token id
"""

import numpy as np
import torch
from torch import Tensor

from headrace.core_service.batch import FloatArray, Int32Array, Int64Array, UInt64Array

MAX_CHUNK_ROWS = 2**8
_ID_BITS = np.uint64(24)
_ROW_SHIFT = np.uint64(56)
_ID_MASK = np.uint64(2**24 - 1)
_SIGN = np.uint32(0x80000000)
_ALL_BUT_SIGN = np.uint32(0x7FFFFFFF)

_GROUP_SIZE = 64
_GROUPS_PER_WANTED = 8
_MANY_IDS = 16


def order_keys(rows: Int64Array, values: FloatArray, ids: Int64Array) -> UInt64Array:
    """Keys [n] that sort as (row, value descending, id); rows below `MAX_CHUNK_ROWS`, ids below 2**24, no NaN."""
    bits = (values + np.float32(0)).view(np.uint32)  # adding 0 turns -0.0 into 0.0, which it equals
    descending = np.where(bits & _SIGN, bits, bits ^ _ALL_BUT_SIGN)
    keys: UInt64Array = descending.astype(np.uint64) << _ID_BITS
    return (rows.astype(np.uint64) << _ROW_SHIFT) | keys | ids.astype(np.uint64)


def rows_of(keys: UInt64Array) -> Int64Array:
    """The rows in `order_keys`."""
    return (keys >> _ROW_SHIFT).astype(np.int64)


def ids_of(keys: UInt64Array) -> Int64Array:
    """The token ids in `order_keys`."""
    return (keys & _ID_MASK).astype(np.int64)


def positive_values_of(keys: UInt64Array) -> FloatArray:
    """The values in `order_keys` that were made of positive values."""
    return ((keys >> _ID_BITS).astype(np.uint32) ^ _ALL_BUT_SIGN).view(np.float32)


def row_starts(keys: UInt64Array, num_rows: int) -> Int64Array:
    """Where each row begins in sorted keys, and their end: int64 [num_rows + 1]."""
    # Rows and not keys are searched: with 256 rows the end would not fit into a key.
    return np.searchsorted(keys >> _ROW_SHIFT, np.arange(num_rows + 1, dtype=np.uint64)).astype(np.int64)


def top_keys(values: Tensor, counts: Int32Array | Int64Array, lowest: float = -np.inf) -> UInt64Array:
    """Sorted keys of entries at least `lowest`, among them the first `counts[i]` of each row i; usually few more.

    `values` is float32 [num_rows, vocab] in host memory without NaN; each count is between 1 and vocab.

    No row is sorted. Each row is cut into groups: if c groups have a largest value of at least b, then c entries have
    a value of at least b. So the c-th largest of the groups' largest values bounds the wanted entries from below, and
    only groups that reach it are looked into.
    """
    num_rows, vocab_size = values.shape
    size = min(_GROUP_SIZE, vocab_size // (_GROUPS_PER_WANTED * int(counts.max())))
    if size < 2:  # most of the row is wanted
        rows, ids = np.nonzero(values.numpy() >= lowest)
        return np.sort(order_keys(rows, values.numpy()[rows, ids], ids))
    num_groups = vocab_size // size
    grouped = torch.unflatten(values[:, : num_groups * size], 1, (num_groups, size))
    group_largest = grouped.amax(-1).numpy()  # [num_rows, num_groups]
    bound = np.sort(group_largest, axis=-1)[np.arange(num_rows), num_groups - counts]
    bound = np.maximum(bound, np.float32(lowest))
    hit_rows, hit_groups = np.nonzero(group_largest >= bound[:, None])
    hit_values = grouped.numpy()[hit_rows, hit_groups]  # [num_hits, size]
    hits, within = np.nonzero(hit_values >= bound[hit_rows, None])
    keys = order_keys(hit_rows[hits], hit_values[hits, within], hit_groups[hits] * size + within)
    rest = values[:, num_groups * size :].numpy()
    rest_rows, rest_ids = np.nonzero(rest >= bound[:, None])
    rest_keys = order_keys(rest_rows, rest[rest_rows, rest_ids], rest_ids + num_groups * size)
    return np.sort(np.concatenate([keys, rest_keys]))


def first_in_row(sorted_keys: UInt64Array, counts: Int32Array | Int64Array) -> tuple[UInt64Array, Int64Array]:
    """The first `counts[i]` of sorted keys of each row i, and the place of each in its row, from 0."""
    starts = row_starts(sorted_keys, len(counts))
    lengths = np.diff(starts)
    places = np.arange(len(sorted_keys)) - np.repeat(starts[:-1], lengths)
    first = places < np.repeat(counts, lengths)
    return sorted_keys[first], places[first]


def ranks_in_row(values: FloatArray, ids: Int32Array | Int64Array) -> Int32Array:
    """Rank of each id in a row of values [vocab] without NaN; 1 is the first in the order."""
    if len(ids) <= _MANY_IDS:
        ahead = [
            np.count_nonzero(values[:i] >= values[i]) + np.count_nonzero(values[i + 1 :] > values[i])
            for i in ids.tolist()
        ]
        return np.array(ahead, dtype=np.int32) + np.int32(1)
    one_row = np.zeros(1, dtype=np.int64)
    every = np.sort(order_keys(one_row, values, np.arange(len(values))))
    found = np.searchsorted(every, order_keys(one_row, values[ids], ids.astype(np.int64)))
    return (found + 1).astype(np.int32)
