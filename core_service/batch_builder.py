"""Builds a step's arrays from the sequence table: whole columns at a time, no loop over tokens or sequences."""

import numpy as np

from headrace.core_service.batch import (
    Int32Array,
    PromptLogprobRange,
    SamplingColumns,
    ScheduledBatch,
)
from headrace.core_service.sequence_table import NO_TOKEN, SequenceTable


def build_batch(
    table: SequenceTable, rows: Int32Array, num_new: Int32Array, block_size: int, step: int
) -> tuple[ScheduledBatch, Int32Array]:
    """The batch that computes the next `num_new[i]` tokens of `rows[i]`, and the rows that it draws a token for.

    A token is drawn for each row whose last known token is computed in this step.
    """
    computed = table.num_computed[rows]
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_new, out=query_start[1:])
    owner = np.repeat(np.arange(len(rows), dtype=np.int32), num_new)  # [num_tokens] sequence of each token
    within = np.arange(query_start[-1], dtype=np.int32) - query_start[owner]
    positions = computed[owner] + within
    owner_rows = rows[owner]
    blocks = table.block_table[owner_rows, positions // block_size].astype(np.int64)
    context_lens = computed + num_new
    sampled = np.flatnonzero(context_lens == table.num_tokens[rows])
    sampled_rows = rows[sampled]
    batch = ScheduledBatch(
        step=step,
        query_start=query_start,
        token_ids=table.token_ids[owner_rows, positions],
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        block_tables=table.block_table[rows, : int(table.num_blocks[rows].max())],
        context_lens=context_lens,
        sample_index=query_start[1:][sampled].astype(np.int64) - 1,
        sampling=_sampling_columns(table, sampled_rows),
        prompt_logprobs=_prompt_logprobs(table, rows, query_start, computed, context_lens),
    )
    return batch, sampled_rows


def _sampling_columns(table: SequenceTable, rows: Int32Array) -> SamplingColumns:
    output_len = table.num_tokens[rows] - table.prompt_len[rows]
    return SamplingColumns(
        temperature=table.temperature[rows],
        top_k=table.top_k[rows],
        top_p=table.top_p[rows],
        min_p=table.min_p[rows],
        seed=table.seed[rows],
        output_position=output_len,
        num_logprobs=table.num_logprobs[rows],
        forbidden_ids={
            int(i): _stop_tokens(table, int(rows[i])) for i in np.flatnonzero(output_len < table.min_output[rows])
        },
        logprob_ids=(
            {i: table.logprob_ids[row] for i, row in enumerate(rows.tolist()) if row in table.logprob_ids}
            if table.logprob_ids
            else {}
        ),
    )


def _stop_tokens(table: SequenceTable, row: int) -> Int32Array:
    ids = np.append(table.stop_ids[row], table.primary_eos[row])
    stops: Int32Array = ids[ids != NO_TOKEN]
    return stops


def _prompt_logprobs(
    table: SequenceTable, rows: Int32Array, query_start: Int32Array, computed: Int32Array, context_lens: Int32Array
) -> tuple[PromptLogprobRange, ...]:
    """Ranges of new tokens whose logits are needed: token i gives the log-probabilities of prompt position i + 1."""
    if not table.wants_prompt_logprobs[rows].any():
        return ()
    ranges = []
    for seq in np.flatnonzero(table.wants_prompt_logprobs[rows]).tolist():
        row = int(rows[seq])
        request = table.sequence(row).request
        first_target = max(int(computed[seq]) + 1, request.prompt_logprobs_sent)
        end_target = min(int(context_lens[seq]) + 1, len(request.prompt))
        if first_target < end_target and request.params.prompt_logprobs is not None:
            ranges.append(
                PromptLogprobRange(
                    seq=seq,
                    first=int(query_start[seq]) + first_target - 1 - int(computed[seq]),
                    target_ids=request.prompt[first_target:end_target],
                    first_position=first_target,
                    num_logprobs=request.params.prompt_logprobs,
                )
            )
    return tuple(ranges)
