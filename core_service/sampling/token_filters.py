"""Which tokens may be drawn, and the draw, on lists of candidates.

A chunk's candidates lie side by side, sorted by (row, token id); every row has at least one. Filters give masks over
them; nothing is renormalized, since weights are relative to each other anyway. All sums are of whole numbers (see
`headrace.core_service.sampling.token_weights`), so a row's outcome does not depend on the other rows of the chunk.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.core_service.batch import FloatArray, Int32Array, Int64Array, UInt64Array
from headrace.core_service.sampling import token_order
from headrace.core_service.sampling.philox import uniform_below

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens of a chunk that may still be drawn, sorted by (row, id); no other token of the chunk may be."""

    rows: Int64Array  # [n] row in the chunk
    ids: Int64Array  # [n]
    weights: FloatArray  # [n] of `token_weights`, with their fraction

    def only(self, keep: BoolArray) -> "Candidates":
        """The same candidates, those outside `keep` [n] with weight 0: cheaper than leaving them out."""
        return replace(self, weights=np.where(keep, self.weights, np.float32(0)))

    def row_totals(self, num_rows: int) -> Int64Array:
        """Sum of the weights of each row, int64 [num_rows]."""
        starts = np.searchsorted(self.rows, np.arange(num_rows))
        return np.add.reduceat(self.weights.astype(np.int64), starts)


def within_top_p(candidates: Candidates, top_p: FloatArray, total: Int64Array) -> BoolArray:
    """Mask of each row's shortest run of most likely tokens with at least `top_p` of the weight `total`.

    `top_p` (above 0) and `total` are [num_rows]. `total` may count weights that are not among the candidates, as long
    as the candidates are the row's most likely tokens and have that share. The most likely token is always kept.
    """
    # The product is rounded to float64, alike everywhere; as top_p is below 1 by 2**-24 or more, it stays below total.
    wanted = np.where(top_p < 1, np.ceil(top_p.astype(np.float64) * total).astype(np.int64), total)
    keys = token_order.order_keys(candidates.rows, candidates.weights, candidates.ids)
    by_order = np.sort(keys)
    sums = np.cumsum(token_order.positive_values_of(by_order).astype(np.int64))
    starts = token_order.row_starts(by_order, len(top_p))
    sum_before = np.concatenate([[0], sums])[starts[:-1]]
    last = np.searchsorted(sums, sum_before + wanted)  # the first place where the wanted weight is reached
    kept: BoolArray = keys <= by_order[last][candidates.rows]
    return kept


def draw(candidates: Candidates, bits: UInt64Array) -> Int32Array:
    """One token of each row: the first by id whose running sum of weights passes `bits / 2**64` of the row's total.

    `bits` is [num_rows]; so are the drawn ids. A token of weight 0 is never drawn.
    """
    place, _ = _pick(candidates.weights.astype(np.int64), candidates.row_totals(len(bits)), bits)
    drawn: Int32Array = candidates.ids[place].astype(np.int32)
    return drawn


def draw_from_blocks(weights: Tensor, bits: UInt64Array) -> Int32Array:
    """`draw` where every token of the vocabulary may be drawn.

    `weights` is int64 [num_rows, num_blocks, block_size]; token ids run on through the blocks of a row.
    """
    _, num_blocks, block_size = weights.shape
    block_sums = weights.sum(-1).numpy()  # [num_rows, num_blocks]
    block, rest = _pick(block_sums.ravel(), block_sums.sum(-1), bits)
    running = np.cumsum(weights.numpy().reshape(-1, block_size)[block], axis=-1)  # [num_rows, block_size]
    inside = np.count_nonzero(running <= rest[:, None], axis=-1)
    drawn: Int32Array = ((block % num_blocks) * block_size + inside).astype(np.int32)
    return drawn


def _pick(weights: Int64Array, totals: Int64Array, bits: UInt64Array) -> tuple[Int64Array, Int64Array]:
    """For each row of the flat weights, the place where its running sum passes its share, and the share left there."""
    sums = np.cumsum(weights)
    target = np.cumsum(totals) - totals + uniform_below(bits, totals)
    place = np.searchsorted(sums, target, side="right")
    return place, target - (sums[place] - weights[place])
