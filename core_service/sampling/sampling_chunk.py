"""Some rows of a batch, copied aside to be edited and weighed.

Work on a few rows at a time keeps the passes over the vocabulary inside the processor's caches and bounds the memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core_service.batch import FloatArray, Int32Array, Int64Array, SamplingColumns, UInt64Array
from headrace.core_service.sampling import token_order, token_weights

_BLOCK_SIZE = 128
_CHUNK_ENTRIES = 2**19


@dataclass(frozen=True, slots=True)
class SamplingChunk:
    """Rows that are drawn in the same way; `logits` and `weights` are work buffers of the next chunk too."""

    logits: Tensor  # [num_rows, padded vocab] float32, edited; padding is -inf
    largest: Tensor  # [num_rows] float32, largest logit
    usable: NDArray[np.bool_]  # [num_rows]; the logits of other rows are replaced by harmless ones
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

    def load(self, logits: Tensor, columns: SamplingColumns, rows: Int64Array, bits: UInt64Array) -> SamplingChunk:
        """Copy rows of the batch and edit their logits; `bits` are those of the whole batch."""
        work = self._logits[: len(rows)]
        side_by_side = rows[-1] - rows[0] == len(rows) - 1
        work[:, : self.vocab_size] = logits[rows[0] : rows[-1] + 1] if side_by_side else logits[torch.from_numpy(rows)]
        work[:, self.vocab_size :] = -torch.inf
        largest = work.amax(-1)
        usable = largest.isfinite()  # seen before the edits, which might hide a NaN
        if _edit(work, columns, rows):
            largest = work.amax(-1)
            usable &= largest.isfinite()
        if not usable.all():
            work[~usable] = 0
            largest[~usable] = 0
        temperature = columns.temperature[rows]
        return SamplingChunk(
            logits=work,
            largest=largest,
            usable=usable.numpy(),
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


def edited_rows(columns: SamplingColumns) -> NDArray[np.bool_]:
    """Mask [num_samples] of the rows whose logits are changed before anything is drawn."""
    edited = np.zeros(len(columns.temperature), dtype=np.bool_)
    edited[list(columns.forbidden_ids)] = True
    return edited


def _edit(work: Tensor, columns: SamplingColumns, rows: Int64Array) -> bool:
    """Apply the batch's edits to the copied logits [num_rows, padded vocab] of `rows`; False if there are none."""
    places = [(i, ids) for i, row in enumerate(rows.tolist()) if (ids := columns.forbidden_ids.get(row)) is not None]
    for i, ids in places:
        work[i, torch.from_numpy(ids).long()] = -torch.inf
    return bool(places)
