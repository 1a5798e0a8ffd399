"""Log-probabilities and ranks of chosen, most likely and asked-for tokens.

Values are natural logarithms of the softmax of the model's raw logits in float32. Ranks follow the order of
`headrace.core_service.sampling.token_order`, so that the k most likely tokens have ranks 1 to k even where logits are
equal, and a token has the same rank wherever in a row's list it stands. Rows are worked on a few at a time: memory
stays bounded however long a prompt is.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.core_service.batch import FloatArray, Int32Array, Int64Array, LogprobRows, SamplingColumns
from headrace.core_service.sampling import token_order

_CHUNK_ENTRIES = 2**19  # rows x vocabulary


def sample_logprob_rows(logits: Tensor, tokens: Int32Array, columns: SamplingColumns) -> LogprobRows | None:
    """The rows that `columns` asks for, of float32 logits [num_samples, vocab]; None if none is asked for.

    `tokens` [num_samples] are the drawn ones. A row without a token (negative) is left out.
    """
    wanted = columns.num_logprobs >= 0
    wanted[list(columns.logprob_ids)] = True
    if not wanted.any():
        return None
    rows = np.flatnonzero(wanted & (tokens >= 0))
    return _logprob_rows(logits, rows, tokens[rows], np.maximum(columns.num_logprobs[rows], 0), columns.logprob_ids)


def prompt_logprob_rows(
    logits: Tensor, target_ids: Int32Array, num_logprobs: int, more_ids: Int32Array | None = None
) -> LogprobRows:
    """Log-probabilities of the prompt tokens `target_ids` [n] under float32 logits [n, vocab] of the positions before.

    Each row has the target, the `num_logprobs` (at least 0) most likely tokens and those of `more_ids` [k]. A row whose
    logits hold a NaN or +inf, or nothing but -inf, is left out: the result then has fewer than n rows.
    """
    if len(logits) != len(target_ids) or num_logprobs < 0:
        raise ValueError(f"got {len(logits)} rows of logits, {len(target_ids)} targets, num_logprobs {num_logprobs}")
    counts = np.full(len(target_ids), num_logprobs, dtype=np.int32)
    more = {} if more_ids is None else dict.fromkeys(range(len(target_ids)), more_ids)
    return _logprob_rows(logits, np.arange(len(target_ids)), target_ids, counts, more)


def _logprob_rows(
    logits: Tensor, rows: Int64Array, chosen: Int32Array, counts: Int32Array, more_ids: Mapping[int, Int32Array]
) -> LogprobRows:
    """Rows `rows` of logits; `chosen` and `counts` (of most likely tokens) are [len(rows)]."""
    counts = np.minimum(counts, logits.shape[1])
    step = min(max(_CHUNK_ENTRIES // max(logits.shape[1], 1), 1), token_order.MAX_CHUNK_ROWS)
    chunks = [
        _chunk_entries(logits, rows[i : i + step], chosen[i : i + step], counts[i : i + step], more_ids)
        for i in range(0, len(rows), step)
    ]
    entries = [np.concatenate(column) for column in zip(_NO_ENTRIES, *chunks, strict=True)]
    entry_rows, token_ids, values, ranks = entries
    present, first = np.unique(entry_rows, return_index=True)
    return LogprobRows(
        rows=present.astype(np.int32),
        offsets=np.append(first, len(entry_rows)).astype(np.int32),
        token_ids=token_ids.astype(np.int32),
        values=values,
        ranks=ranks.astype(np.int32),
    )


# Columns of flat entries: row of the batch, token id, log-probability, rank.
_Entries = tuple[Int64Array, Int64Array, FloatArray, Int64Array]
_NO_ENTRIES: _Entries = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64))


def _chunk_entries(
    logits: Tensor, rows: Int64Array, chosen: Int32Array, counts: Int32Array, more_ids: Mapping[int, Int32Array]
) -> _Entries:
    """Entries of a few rows, in the order of `LogprobRows`."""
    side_by_side = rows[-1] - rows[0] == len(rows) - 1
    raw = logits[rows[0] : rows[-1] + 1] if side_by_side else logits[torch.from_numpy(rows)]  # [len(rows), vocab]
    logprobs = torch.log_softmax(raw, -1)
    usable = ~logprobs[:, 0].isnan().numpy()  # one NaN or +inf makes the whole row NaN
    if not usable.all():
        raw, logprobs = raw[torch.from_numpy(usable)], logprobs[torch.from_numpy(usable)]
        rows, chosen, counts = rows[usable], chosen[usable], counts[usable]
        if not usable.any():
            return _NO_ENTRIES
    top_rows, top_ids, top_ranks = _most_likely(raw, counts)
    chosen_ranks = _ranks_of_chosen(raw, chosen, top_rows, top_ids, top_ranks)
    places, ids, ranks = [np.arange(len(rows)), top_rows], [chosen.astype(np.int64), top_ids], [chosen_ranks, top_ranks]
    for place, row in enumerate(rows.tolist()):
        if (more := more_ids.get(row)) is not None:
            places.append(np.full(len(more), place))
            ids.append(more.astype(np.int64))
            ranks.append(token_order.ranks_in_row(raw[place].numpy(), more).astype(np.int64))
    entry_place, entry_id, entry_rank = np.concatenate(places), np.concatenate(ids), np.concatenate(ranks)
    by_row = np.argsort(entry_place, kind="stable")  # keeps chosen, most likely, asked for in this order
    entry_place, entry_id, entry_rank = entry_place[by_row], entry_id[by_row], entry_rank[by_row]
    return rows[entry_place], entry_id, logprobs.numpy()[entry_place, entry_id], entry_rank


def _most_likely(raw: Tensor, counts: Int32Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Row, token id and rank of the first `counts[i]` tokens of each row i, row by row in order of rank."""
    if not counts.any():
        none = np.empty(0, np.int64)
        return none, none, none
    keys, places = token_order.first_in_row(token_order.top_keys(raw, np.maximum(counts, 1)), counts)
    return token_order.rows_of(keys), token_order.ids_of(keys), places + 1


def _ranks_of_chosen(
    raw: Tensor, chosen: Int32Array, top_rows: Int64Array, top_ids: Int64Array, top_ranks: Int64Array
) -> Int64Array:
    """Rank of each row's chosen token [num_rows]; a row is scanned only where it is not among the most likely."""
    ranks = np.zeros(len(chosen), dtype=np.int64)
    listed = top_ids == chosen[top_rows]
    ranks[top_rows[listed]] = top_ranks[listed]
    for row in np.flatnonzero(ranks == 0).tolist():
        ranks[row] = token_order.ranks_in_row(raw[row].numpy(), chosen[row : row + 1])[0]
    return ranks
