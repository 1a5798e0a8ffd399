"""Some rows of a batch, copied aside to be edited and weighed.

Work on a few rows at a time keeps the passes over the vocabulary inside the processor's caches and bounds the memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core_service.batch import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    FloatArray,
    Int32Array,
    Int64Array,
    SamplingColumns,
    UInt64Array,
)
from headrace.core_service.sampling import token_order, token_weights

_BLOCK_SIZE = 128
_CHUNK_ENTRIES = 2**19


# Edits the copied logits [num_rows, padded vocab] of some rows of the batch, int64 [num_rows].
LogitEdit = Callable[[Tensor, Int64Array], None]


@dataclass(frozen=True, slots=True)
class SamplingChunk:
    """Rows that are drawn in the same way; `logits` and `weights` are work buffers of the next chunk too."""

    logits: Tensor  # [num_rows, padded vocab] float32, edited; padding is -inf
    largest: Tensor  # [num_rows] float32, largest logit
    fault: Int32Array  # [num_rows] NOT_FINITE, NOTHING_ALLOWED or 0; logits of rows with a fault are harmless ones
    rate: FloatArray  # [num_rows] of `token_weights.rates`; without meaning for greedy rows
    top_k: Int32Array  # [num_rows]
    top_p: FloatArray  # [num_rows]
    min_p: FloatArray  # [num_rows]
    bits: UInt64Array  # [num_rows] random

    @property
    def num_rows(self) -> int:
        """Rows in this chunk."""
        return len(self.bits)


class SamplingBuffers:
    """Work space for chunks of rows of one vocabulary size, kept from step to step."""

    def __init__(self, vocab_size: int) -> None:
        if not 0 < vocab_size <= token_weights.MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size must be between 1 and {token_weights.MAX_VOCAB_SIZE}; got {vocab_size}")
        self.vocab_size = vocab_size
        width = -(-vocab_size // _BLOCK_SIZE) * _BLOCK_SIZE
        self._num_rows = min(max(_CHUNK_ENTRIES // width, 1), token_order.MAX_CHUNK_ROWS)
        self._logits, self._scratch, self._weights = (torch.empty(self._num_rows, width) for _ in range(3))
        self._whole_weights = torch.empty(self._num_rows, width, dtype=torch.int64)

    def cut(self, rows: Int64Array) -> Iterator[Int64Array]:
        """Row numbers in pieces that fit."""
        for first in range(0, len(rows), self._num_rows):
            yield rows[first : first + self._num_rows]

    def load(
        self, logits: Tensor, columns: SamplingColumns, rows: Int64Array, bits: UInt64Array, edit: LogitEdit | None
    ) -> SamplingChunk:
        """Copy rows of the batch and edit their logits; `bits` are those of the whole batch."""
        work = self._logits[: len(rows)]
        side_by_side = rows[-1] - rows[0] == len(rows) - 1
        work[:, : self.vocab_size] = logits[rows[0] : rows[-1] + 1] if side_by_side else logits[torch.from_numpy(rows)]
        work[:, self.vocab_size :] = -torch.inf
        largest = work.amax(-1)
        fault = np.zeros(len(rows), dtype=np.int32)
        _find_faults_(work, largest, fault, NOT_FINITE)  # before the edits, which might hide a NaN
        if edit is not None:
            edit(work, rows)
            largest = work.amax(-1)
            _find_faults_(work, largest, fault, NOTHING_ALLOWED)
        temperature = columns.temperature[rows]
        return SamplingChunk(
            logits=work,
            largest=largest,
            fault=fault,
            rate=token_weights.rates(np.where(temperature == 0, np.float32(1), temperature)),
            top_k=columns.top_k[rows],
            top_p=columns.top_p[rows],
            min_p=columns.min_p[rows],
            bits=bits[rows],
        )

    def weigh(self, chunk: SamplingChunk) -> Tensor:
        """Weights of every token of the chunk, float32 [num_rows, padded vocab]; uses up its logits."""
        weights = self._weights[: chunk.num_rows]
        token_weights.weigh_(
            chunk.logits,
            chunk.largest[:, None],
            torch.from_numpy(chunk.rate)[:, None],
            self._scratch[: chunk.num_rows],
            weights,
        )
        return weights

    def in_blocks(self, weights: Tensor) -> Tensor:
        """Whole parts of weights [num_rows, padded vocab] as int64 [num_rows, num_blocks, block size]."""
        whole = self._whole_weights[: len(weights)]
        whole.copy_(weights)
        return torch.unflatten(whole, 1, (-1, _BLOCK_SIZE))


def _find_faults_(work: Tensor, largest: Tensor, fault: Int32Array, kind: int) -> None:
    """Marks rows of `work` [num_rows, padded vocab] whose `largest` logit is not finite, and makes both harmless."""
    unusable = ~largest.isfinite()
    if unusable.any():
        found = unusable.numpy()
        fault[found & (fault == 0)] = kind
        work[unusable] = 0
        largest[unusable] = 0
