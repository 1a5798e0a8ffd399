"""A step between its planning and its result: columns of the sequence table, taken with a constant number of vector
operations and no loop over tokens or sequences.

Planning and launching are apart, since a step can be planned while the one before it computes: the tokens that the
step before draws are not known until then.
"""

from dataclasses import dataclass, replace

import numpy as np

from headrace.core_service.batch import (
    GrammarMasks,
    Int32Array,
    Int64Array,
    PromptLogprobRange,
    SamplingColumns,
    ScheduledBatch,
    TokenHistory,
)
from headrace.core_service.draw_facts import DrawFacts
from headrace.core_service.request import Sequence
from headrace.core_service.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What a step computes and draws. Token ids and masks come with the launch."""

    batch: ScheduledBatch  # without token ids, histories and grammar masks
    rows: Int64Array  # [num_seqs]
    owner_rows: Int64Array  # [num_tokens] row of each token
    draws: DrawFacts
    positions: Int32Array  # [num_samples] of each drawn token in its sequence
    prompt_sequences: tuple[Sequence, ...]  # one for each of batch.prompt_logprobs

    def launch(self, table: SequenceTable, grammar: GrammarMasks | None) -> ScheduledBatch:
        """The batch to compute; every token before it is known now."""
        return replace(
            self.batch,
            token_ids=table.token_ids[self.owner_rows, self.batch.positions],
            sampling=self._with_histories(table, grammar),
        )

    def _with_histories(self, table: SequenceTable, grammar: GrammarMasks | None) -> SamplingColumns:
        sampling = self.batch.sampling
        if grammar is None and not self.draws.edits:
            return sampling
        histories = {}
        for i, edits in self.draws.edits.items():
            if edits.need_history:
                row, start = int(self.draws.rows[i]), int(self.draws.prompt_len[i])
                known = table.token_ids[row, : int(self.positions[i])].copy()
                histories[i] = TokenHistory(prompt_ids=known[:start], output_ids=known[start:])
        return replace(sampling, histories=histories, grammar=grammar)


_NOT_KNOWN = np.empty(0, np.int32)


def plan_step(table: SequenceTable, rows: Int64Array, num_new: Int32Array, block_size: int, step: int) -> PlannedStep:
    """The step that computes the last `num_new[i]` of the tokens that the table counts as computed for `rows[i]`.

    A token is drawn for each row whose last token is among them; the table counts it as planned from now on.
    """
    num_seqs = len(rows)
    context_lens = table.num_computed[rows]
    computed = context_lens - num_new
    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(num_new, out=query_start[1:])
    num_tokens = int(query_start[-1])
    if num_tokens == num_seqs:  # one each
        owner_rows, positions = rows, computed
    else:
        owner = np.repeat(np.arange(num_seqs), num_new)  # [num_tokens] sequence of each token
        owner_rows = rows[owner]
        positions = computed[owner] + (np.arange(num_tokens, dtype=np.int32) - query_start[owner])
    blocks = table.block_table[owner_rows, positions // block_size].astype(np.int64)
    is_sampled = context_lens == table.num_tokens[rows]
    if is_sampled.all():
        sampled_rows, drawn, ends = rows, context_lens, query_start[1:]
    else:
        sampled = np.flatnonzero(is_sampled)
        sampled_rows, drawn, ends = rows[sampled], context_lens[sampled], query_start[1:][sampled]
    draws = table.draw_facts(sampled_rows)
    ranges, prompt_sequences = _prompt_logprobs(table, rows, query_start, computed, context_lens)
    if len(sampled_rows):
        table.plan_tokens(sampled_rows)
    batch = ScheduledBatch(
        step=step,
        query_start=query_start,
        token_ids=_NOT_KNOWN,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        block_tables=table.block_table[rows, : int(table.num_blocks[rows].max())],
        context_lens=context_lens,
        sample_index=ends.astype(np.int64) - 1,
        sampling=_sampling_columns(draws, drawn),
        prompt_logprobs=ranges,
    )
    return PlannedStep(batch, rows, owner_rows, draws, drawn, prompt_sequences)


def _sampling_columns(draws: DrawFacts, positions: Int32Array) -> SamplingColumns:
    output_position = positions - draws.prompt_len
    early: list[int] = []
    if draws.longest_min_output:
        early = np.flatnonzero(output_position < draws.min_output).tolist()
    return SamplingColumns(
        temperature=draws.temperature,
        top_k=draws.top_k,
        top_p=draws.top_p,
        min_p=draws.min_p,
        seed=draws.seed,
        output_position=output_position,
        num_logprobs=draws.num_logprobs,
        forbidden_ids={i: draws.stop_tokens(i) for i in early},
        edits=draws.edits,
        logprob_ids=draws.logprob_ids,
    )


def _prompt_logprobs(
    table: SequenceTable, rows: Int64Array, query_start: Int32Array, computed: Int32Array, context_lens: Int32Array
) -> tuple[tuple[PromptLogprobRange, ...], tuple[Sequence, ...]]:
    """Ranges of new tokens whose logits are needed: token i gives the log-probabilities of prompt position i + 1."""
    if not table.num_wanting_prompt_logprobs:
        return (), ()
    ranges, sequences = [], []
    for seq in np.flatnonzero(table.wants_prompt_logprobs[rows]).tolist():
        sequence = table.sequence(int(rows[seq]))
        request = sequence.request
        first_target = max(int(computed[seq]) + 1, request.prompt_logprobs_sent)
        end_target = min(int(context_lens[seq]) + 1, len(request.prompt))
        if first_target < end_target and request.params.prompt_logprobs is not None:
            more = request.params.prompt_logprob_token_ids
            ranges.append(
                PromptLogprobRange(
                    seq=seq,
                    first=int(query_start[seq]) + first_target - 1 - int(computed[seq]),
                    target_ids=request.prompt[first_target:end_target],
                    first_position=first_target,
                    num_logprobs=request.params.prompt_logprobs,
                    more_ids=np.array(more, np.int32) if more else None,
                )
            )
            sequences.append(sequence)
    return tuple(ranges), tuple(sequences)
