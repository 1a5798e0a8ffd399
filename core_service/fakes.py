"""A model runner that needs no model: for tests, benchmarks of the host side, and people who build on the contract."""

import time
from itertools import accumulate

import numpy as np

from headrace.core_service.batch import (
    Int64Array,
    LogprobRows,
    PromptLogprobRange,
    SamplingColumns,
    ScheduledBatch,
    StepResult,
)


class FakeRunner:
    """Draws token (t + 1) % vocab_size after token t, so every output can be foretold; seeds and filters are not read.

    It checks what it is given: a sequence's tokens must lie in the KV slots that its block table names. What a slot
    holds stands, as in a real cache, for its token and all tokens before it.
    """

    def __init__(self, vocab_size: int, block_size: int, step_time_s: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self.batches: int = 0
        self._block_size = block_size
        self._step_time_s = step_time_s
        self._written: dict[int, int] = {}  # KV slot → `kv_of` the tokens up to the slot's own

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """One step; raises RuntimeError if the batch contradicts itself or reads KV that nobody wrote."""
        self.batches += 1
        self._write_and_check(batch)
        if self._step_time_s:
            time.sleep(self._step_time_s)
        drawn = (batch.token_ids[batch.sample_index] + 1) % self.vocab_size
        return StepResult(
            token_ids=drawn.astype(np.int32),
            logprobs=self._logprobs(drawn, batch.sampling),
            prompt_logprobs=tuple(self._prompt_logprobs(wanted) for wanted in batch.prompt_logprobs),
        )

    def context(self, batch: ScheduledBatch, seq: int) -> list[int]:
        """What the cache holds for each position of a sequence that has been executed: see `kv_of`."""
        return [self._written[slot] for slot in self._slots(batch, seq).tolist()]

    def _write_and_check(self, batch: ScheduledBatch) -> None:
        for seq in range(batch.num_seqs):
            start, end = batch.query_start[seq], batch.query_start[seq + 1]
            length = int(batch.context_lens[seq])
            if end <= start or batch.positions[end - 1] != length - 1:
                raise RuntimeError(f"sequence {seq}: positions do not end at its context length {length}")
            slots = self._slots(batch, seq)
            if (batch.slot_mapping[start:end] != slots[batch.positions[start:end]]).any():
                raise RuntimeError(f"sequence {seq}: slot mapping and block table disagree")
            num_blocks = np.count_nonzero(batch.block_tables[seq])
            if num_blocks * self._block_size < length or batch.block_tables[seq, num_blocks:].any():
                raise RuntimeError(f"sequence {seq}: its block table is too short, or has holes")
            before = slots[: length - int(end - start)].tolist()
            # Whatever shares blocks with a sequence of the same step stands after it.
            if any(slot not in self._written for slot in before):
                raise RuntimeError(f"sequence {seq} reads KV that nobody wrote")
            new = kv_of(batch.token_ids[start:end].tolist(), self._written[before[-1]] if before else 0)
            self._written.update(zip(batch.slot_mapping[start:end].tolist(), new, strict=True))

    def _slots(self, batch: ScheduledBatch, seq: int) -> Int64Array:
        positions = np.arange(int(batch.context_lens[seq]))
        blocks = batch.block_tables[seq, positions // self._block_size].astype(np.int64)
        slots: Int64Array = blocks * self._block_size + positions % self._block_size
        return slots

    def _logprobs(self, drawn: np.ndarray, columns: SamplingColumns) -> LogprobRows | None:
        rows = [i for i, count in enumerate(columns.num_logprobs.tolist()) if count >= 0]
        rows += [i for i in columns.logprob_ids if i not in rows]
        if not rows:
            return None
        entries = []
        for i in sorted(rows):
            extra = columns.logprob_ids[i].tolist() if i in columns.logprob_ids else []
            entries.append([int(drawn[i]), *range(max(int(columns.num_logprobs[i]), 0)), *extra])
        return _rows(sorted(rows), entries)

    def _prompt_logprobs(self, wanted: PromptLogprobRange) -> LogprobRows:
        if not 0 <= wanted.num_logprobs <= self.vocab_size:
            raise ValueError(f"num_logprobs must be between 0 and {self.vocab_size}; got {wanted.num_logprobs}")
        more = [] if wanted.more_ids is None else wanted.more_ids.tolist()
        entries = [[target, *range(wanted.num_logprobs), *more] for target in wanted.target_ids.tolist()]
        return _rows(list(range(len(entries))), entries)


def kv_of(token_ids: list[int], before: int = 0) -> list[int]:
    """For each token, a number for it and all tokens before it; `before` is that of the one before the first."""
    return list(accumulate(token_ids, lambda kv, token: hash((kv, token)), initial=before))[1:]


def _rows(rows: list[int], entries: list[list[int]]) -> LogprobRows:
    """Rank is the place in the row; the log-probability is minus the rank."""
    lengths = [len(entry) for entry in entries]
    ranks = np.array([rank for entry in entries for rank in range(1, len(entry) + 1)], np.int32)
    return LogprobRows(
        rows=np.array(rows, np.int32),
        offsets=np.cumsum([0, *lengths], dtype=np.int32),
        token_ids=np.array([token for entry in entries for token in entry], np.int32),
        values=-ranks.astype(np.float32),
        ranks=ranks,
    )
