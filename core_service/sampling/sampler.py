"""Draws one token for each sampled row.

The law: a token is a pure function of (logits, sampling parameters, seed, output position). A row's token is the same
alone, in any batch and with any number of threads.

    edits  ->  greedy: the largest logit, lowest id first
           ->  / temperature  ->  min-p  ->  top-k  ->  top-p  ->  draw

- edits (`headrace.core_service.sampling.logit_edits`): grammar, allowed ids, bad words, bias, penalties.
- min-p keeps tokens at least `min_p` times as likely as the most likely one.
- top-k keeps the first k of all tokens in the order of `headrace.core_service.sampling.token_order`.
- top-p keeps the shortest run of most likely tokens, in the same order, with that share of what min-p and top-k left.

A token is drawn by inverting the running sum of the kept weights, taken in order of token id, at one random number
(`headrace.core_service.sampling.philox`). One number a row is enough, where the Gumbel trick needs one for each
token; and since weights are whole numbers (`headrace.core_service.sampling.token_weights`), the running sum is exact,
so neither threads nor blocks nor a kernel on another device can move a draw.

Each row pays only for what it asks: greedy rows neither exponentials nor a sort, rows without filters and with min-p no
sort, top-k a look at the largest logit of each group of tokens, top-p a sort of the tokens that can matter. Rows with
edits are worked on after those without, and rows with a grammar last of all, when its masks are most likely there.

A row without a finite largest logit (one is NaN or +inf, or all are -inf) gets `NOT_FINITE`, one whose edits leave no
token `NOTHING_ALLOWED`, and the engine ends that request with an error. Other rows are not touched by it.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core_service.batch import (
    NOT_FINITE,
    FloatArray,
    GrammarMasks,
    Int32Array,
    Int64Array,
    LogprobRows,
    SamplingColumns,
)
from headrace.core_service.sampling import token_filters, token_order, token_weights
from headrace.core_service.sampling.logit_edits import edit_logits_, edited_rows
from headrace.core_service.sampling.logprobs import sample_logprob_rows
from headrace.core_service.sampling.philox import RandomStream, random_bits
from headrace.core_service.sampling.sampling_chunk import LogitEdit, SamplingBuffers, SamplingChunk
from headrace.core_service.sampling.token_filters import Candidates

_PIECE_ENTRIES = 2**15
_LOWEST_FINITE = float(np.finfo(np.float32).min)


class Sampler:
    """Draws tokens from logits in host memory; holds nothing but work buffers (about 10 MB)."""

    def __init__(self) -> None:
        self._buffers: SamplingBuffers | None = None

    def __call__(self, logits: Tensor, columns: SamplingColumns) -> tuple[Int32Array, LogprobRows | None]:
        """Draw a token for each row of float32 `logits` [num_samples, vocab], which are left as they were.

        Returns int32 tokens [num_samples] (`NOT_FINITE` or `NOTHING_ALLOWED` where none can be drawn) and the
        log-probabilities that were asked for (None if none were). Raises ValueError if shape, dtype or vocabulary size
        do not fit, also those of the grammars' masks.
        """
        num_samples = len(columns.temperature)
        if logits.dtype != torch.float32 or logits.dim() != 2 or len(logits) != num_samples:
            raise ValueError(f"logits must be float32 [{num_samples}, vocab]; got {logits.dtype} {list(logits.shape)}")
        tokens = np.zeros(num_samples, dtype=np.int32)
        edited = edited_rows(columns)
        in_grammar = np.zeros(num_samples, dtype=np.bool_)
        if columns.grammar is not None:
            in_grammar[columns.grammar.rows] = True
        as_they_are = ~(edited | in_grammar)
        taken = as_they_are & (columns.temperature == 0)
        _take_largest(logits, np.flatnonzero(taken), tokens)
        self._draw(logits, columns, as_they_are & ~taken, None, tokens)
        self._draw(logits, columns, edited & ~in_grammar, partial(edit_logits_, columns=columns), tokens)
        if columns.grammar is not None:
            self._draw(logits, columns, in_grammar, _MaskedEdit(columns, columns.grammar, logits.shape[1]), tokens)
        return tokens, sample_logprob_rows(logits, tokens, columns)

    def _draw(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        wanted: NDArray[np.bool_],
        edit: LogitEdit | None,
        tokens: Int32Array,
    ) -> None:
        """Fill in the tokens of the rows in `wanted` [num_samples], after `edit` where there is one."""
        if not wanted.any():
            return
        if self._buffers is None or self._buffers.vocab_size != logits.shape[1]:
            self._buffers = SamplingBuffers(logits.shape[1])
        buffers = self._buffers
        bits = random_bits(columns.seed, columns.output_position, RandomStream.TOKEN)
        greedy = columns.temperature == 0
        top_k = ~greedy & (columns.top_k > 0)
        top_p = ~greedy & ~top_k & (columns.top_p < 1)
        min_p = ~greedy & ~top_k & ~top_p & (columns.min_p > 0)
        for rows_of_kind, draw_chunk in (
            (greedy, _take_largest_edited),
            (top_k, _draw_from_top_k),
            (top_p, _draw_from_top_p),
            (min_p, _draw_from_min_p),
            (~(greedy | top_k | top_p | min_p), _draw_from_all),
        ):
            for rows in buffers.cut(np.flatnonzero(rows_of_kind & wanted)):
                chunk = buffers.load(logits, columns, rows, bits, edit)
                tokens[rows] = np.where(chunk.fault == 0, draw_chunk(chunk, buffers), chunk.fault)


class _MaskedEdit:
    """The edits of rows with a grammar. Made when the other rows are done, since it waits for the masks."""

    def __init__(self, columns: SamplingColumns, grammar: GrammarMasks, vocab_size: int) -> None:
        self._columns = columns
        self._rows = grammar.rows
        self._masks = grammar.wait()
        shape = (len(self._rows), -(-vocab_size // 32))
        if self._masks.shape != shape or self._masks.dtype != np.int32:
            raise ValueError(f"masks must be int32 {shape}; got {self._masks.dtype} {self._masks.shape}")

    def __call__(self, work: Tensor, rows: Int64Array) -> None:
        edit_logits_(work, rows, self._columns, self._masks[np.searchsorted(self._rows, rows)])


def _take_largest(logits: Tensor, rows: Int64Array, tokens: Int32Array) -> None:
    """Greedy tokens of rows whose logits are not edited."""
    values = logits.numpy()
    if len(rows) == len(values):
        found = values.argmax(-1)
    else:  # row by row: gathering the rows would copy more than argmax reads
        found = np.fromiter((values[row].argmax() for row in rows), dtype=np.int64, count=len(rows))
    tokens[rows] = np.where(np.isfinite(values[rows, found]), found, NOT_FINITE)  # argmax stops at a NaN


def _take_largest_edited(chunk: SamplingChunk, _: SamplingBuffers) -> Int32Array:
    found: Int32Array = chunk.logits.numpy().argmax(-1).astype(np.int32)
    return found


def _draw_from_all(chunk: SamplingChunk, buffers: SamplingBuffers) -> Int32Array:
    return token_filters.draw_from_blocks(buffers.in_blocks(buffers.weigh(chunk)), chunk.bits)


def _draw_from_top_k(chunk: SamplingChunk, _: SamplingBuffers) -> Int32Array:
    """Rows with top-k, and perhaps min-p and top-p: only the top k tokens are weighed."""
    width = chunk.logits.shape[1]
    wanted = np.minimum(chunk.top_k, width)
    keys = token_order.top_keys(chunk.logits, wanted, lowest=_LOWEST_FINITE)
    keys = token_order.first_in_row(keys, wanted)[0]
    places = np.sort(token_order.rows_of(keys) * width + token_order.ids_of(keys))
    rows, ids = np.divmod(places, width)
    weights = token_weights.weigh_few(chunk.logits.numpy()[rows, ids], chunk.largest.numpy()[rows], chunk.rate[rows])
    candidates = Candidates(rows, ids, weights).only(weights >= _min_p_bound(chunk.min_p)[rows])
    if (chunk.top_p < 1).any():
        total = candidates.row_totals(chunk.num_rows)
        candidates = candidates.only(token_filters.within_top_p(candidates, chunk.top_p, total))
    return token_filters.draw(candidates, chunk.bits)


def _draw_from_min_p(chunk: SamplingChunk, buffers: SamplingBuffers) -> Int32Array:
    """Rows with min-p as their only filter."""
    tokens = np.empty(chunk.num_rows, dtype=np.int32)
    for piece, candidates in _candidates_above(buffers.weigh(chunk), _min_p_bound(chunk.min_p)):
        tokens[piece] = token_filters.draw(candidates, chunk.bits[piece])
    return tokens


def _draw_from_top_p(chunk: SamplingChunk, buffers: SamplingBuffers) -> Int32Array:
    """Rows with top-p, and perhaps min-p, but without top-k.

    With min-p, what it leaves is sorted. Without it, tokens whose weight is below (1 - top_p) * total / vocab are left
    out of the sort: all of them together weigh less than 1 - top_p of the total, so the others reach top_p without
    them, and the result is that of sorting all.
    """
    tokens = np.empty(chunk.num_rows, dtype=np.int32)
    weights = buffers.weigh(chunk)
    totals = buffers.in_blocks(weights).sum((1, 2)).numpy()
    spare = (1 - chunk.top_p.astype(np.float64)) * totals / weights.shape[1]
    # A little lower, since these floats and the share that is wanted are rounded; but 1 is the least that counts.
    top_p_bound = np.maximum((spare - 2) * (1 - 2**-20), 1).astype(np.float32)
    with_min_p = chunk.min_p > 0
    bound = np.where(with_min_p, _min_p_bound(chunk.min_p), top_p_bound)
    for piece, candidates in _candidates_above(weights, bound):
        total = np.where(with_min_p[piece], candidates.row_totals(len(totals[piece])), totals[piece])
        candidates = candidates.only(token_filters.within_top_p(candidates, chunk.top_p[piece], total))
        tokens[piece] = token_filters.draw(candidates, chunk.bits[piece])
    return tokens


def _min_p_bound(min_p: FloatArray) -> FloatArray:
    """The least weight that min-p keeps, [num_rows]; below 1 nothing is ever drawn."""
    bound: FloatArray = np.maximum(min_p * np.float32(token_weights.LARGEST_WEIGHT), np.float32(1))
    return bound


def _candidates_above(weights: Tensor, bound: FloatArray) -> Iterator[tuple[slice, Candidates]]:
    """Tokens of weights [num_rows, padded vocab] with at least their row's bound, for slices of rows one by one.

    A slice has one row, or several as long as their candidates are few: large temporary arrays are slow to get.
    """
    values = weights.numpy()
    ids = [np.flatnonzero(row >= least) for row, least in zip(values, bound, strict=True)]
    first = 0
    while first < len(ids):
        last, size = first + 1, len(ids[first])
        while last < len(ids) and size + len(ids[last]) <= _PIECE_ENTRIES:
            size += len(ids[last])
            last += 1
        yield (
            slice(first, last),
            Candidates(
                rows=np.repeat(np.arange(last - first), [len(found) for found in ids[first:last]]),
                ids=np.concatenate(ids[first:last]),
                weights=np.concatenate([values[row, ids[row]] for row in range(first, last)]),
            ),
        )
        first = last
