"""Decides what runs in each step. No torch, no clock of its own, no thread: pure and tested alone.

There are no prefill and decode phases. Each sequence has tokens and, of those, computed tokens; a step gives sequences
new tokens to compute until the token budget is used up:

    running   first, in order; a prompt gets what budget is left (chunked prefill), a decoding sequence its one token
    waiting   then, in order of priority and arrival, as long as a row, the budget and blocks for the whole input are
    there

If a running sequence finds no free block, the last in order gives its blocks up (preemption by recompute) and goes back
to its place in the waiting queue.
"""

from dataclasses import dataclass

import numpy as np

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.batch import Int32Array, ScheduledBatch, StepResult
from headrace.core_service.batch_builder import build_batch
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.engine_outputs import EngineOutputs, PromptLogprobs
from headrace.core_service.prefix_cache import ROOT
from headrace.core_service.request import Request, Sequence, SequenceState
from headrace.core_service.sequence_table import SequenceTable
from headrace.core_service.timers import RequestTimers
from headrace.core_service.waiting_queue import WaitingQueue

NOT_FINITE = "the model's logits for this request are not finite"


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A batch under way, with what is needed to take its result in."""

    batch: ScheduledBatch
    rows: Int32Array  # [num_seqs]
    num_new: Int32Array  # [num_seqs]
    sampled_rows: Int32Array  # [num_samples]


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start."""

    steps: int = 0
    output_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns every live request from its arrival to its end. `now` is the core's monotonic clock in seconds."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.counters = SchedulerCounters()
        self._budget = max_num_batched_tokens
        self._table = SequenceTable(max_num_seqs, blocks.block_size)
        self._running: Int32Array = np.empty(0, np.int32)  # rows, in scheduling order
        self._waiting = WaitingQueue()
        self._timers = RequestTimers()
        self._serial = 0
        self._num_following = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one, or for their leader."""
        return len(self._waiting) + self._num_following

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute, at most, for those that wait."""
        return self._waiting.num_tokens

    @property
    def has_work(self) -> bool:
        """True if a step has something to do."""
        return bool(len(self._running) or len(self._waiting))

    def add(self, request: Request) -> None:
        """Takes a checked request in: its first sequence waits to run, the others follow it."""
        self._serial += 1
        request.serial = self._serial
        leader, *followers = request.sequences
        for sequence in followers:
            sequence.state = SequenceState.FOLLOWING
        request.followers.extend(followers)
        request.num_unfinished = len(request.sequences)
        self._num_following += len(followers)
        self._waiting.add(leader)
        self._timers.add(request)

    def abort(self, sequence: Sequence, outputs: EngineOutputs, *, code: int | None = None, message: str = "") -> None:
        """Ends a sequence wherever it is; does nothing if it has ended. `code` says whose doing it was."""
        self._finish(sequence, FinishReason.FINISH_REASON_ABORT, outputs, code=code, message=message or None)

    def expire(self, now: float, outputs: EngineOutputs) -> None:
        """Ends what has run out of time. Expired work is never scheduled."""
        for request, reason in self._timers.expired(now):
            for sequence in request.sequences:
                self._finish(sequence, reason, outputs)

    def schedule(self, now: float, outputs: EngineOutputs) -> PlannedStep | None:
        """Plans the next step; None if nothing can run. Sequences that ended while planning go to `outputs`."""
        if not self.has_work:
            return None
        preempted = self._make_room_for_running(outputs)
        num_new = self._share_budget()
        if not preempted:
            num_new = self._admit(num_new, now)
        chosen = np.flatnonzero(num_new)
        if not len(chosen):
            return None
        rows, num_new = self._running[chosen], num_new[chosen]
        batch, sampled_rows = build_batch(self._table, rows, num_new, self.blocks.block_size, self.counters.steps + 1)
        return PlannedStep(batch, rows, num_new, sampled_rows)

    def update(self, step: PlannedStep, result: StepResult, now: float, outputs: EngineOutputs) -> None:
        """Takes a step's result in: appends tokens, stores full blocks, ends what is done."""
        table = self._table
        self.counters.steps += 1
        table.num_computed[step.rows] += step.num_new
        unpredictable = self._collect_prompt_logprobs(step, result, outputs)
        self._store_full_blocks(step.rows)
        self._release_followers(step.rows)
        rows, tokens = step.sampled_rows, result.token_ids
        if len(rows):
            outputs.set_tokens(table, rows, result)
            table.append_tokens(rows, tokens)
            self.counters.output_tokens += len(outputs.token_ids)
            self._note_token_times(rows, now)
            self._end_finished(rows, tokens, outputs)
        for sequence in unpredictable:
            self._fail(sequence, outputs)

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes; returns the number of blocks forgotten."""
        return self.blocks.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block reference belongs to a live sequence."""
        holders = [self._table.blocks_of(row) for row in self._running.tolist()]
        holders += [sequence.held_blocks for sequence in self._waiting]
        self.blocks.check_integrity(holders)
        if self._table.num_free_rows + len(self._running) != self._table.capacity:
            raise RuntimeError("rows of the sequence table were lost")

    # -- planning ------------------------------------------------------------------------------------------------------

    def _share_budget(self) -> Int32Array:
        """New tokens for each running sequence, in order, until the budget is used up."""
        need = self._table.num_tokens[self._running] - self._table.num_computed[self._running]
        before = np.cumsum(need) - need
        share: Int32Array = np.clip(self._budget - before, 0, need).astype(np.int32)
        return share

    def _make_room_for_running(self, outputs: EngineOutputs) -> bool:
        """Gives a block to each sequence whose next token needs one, preempting others if it must; True if it did."""
        table, preempted = self._table, False
        rows = self._running
        short = rows[table.num_tokens[rows] > table.num_blocks[rows] * self.blocks.block_size]
        for row in short.tolist():
            sequence = table.sequences[row]
            while sequence is not None and sequence.row == row:
                fresh = self.blocks.allocate(1)
                if fresh is not None:
                    table.append_blocks(row, fresh)
                    break
                if self._release_one_hold():
                    continue
                if len(self._running) == 1:
                    # Alone, and the pool is full: it can never go on.
                    self._finish(sequence, FinishReason.FINISH_REASON_LENGTH, outputs)
                else:
                    self._preempt(max((table.sequence(r) for r in self._running.tolist()), key=lambda s: s.order))
                    preempted = True
        return preempted

    def _admit(self, num_new: Int32Array, now: float) -> Int32Array:
        """Moves waiting sequences into rows while there is room; returns `num_new` with theirs appended."""
        budget = self._budget - int(num_new.sum())
        admitted: list[int] = []
        admitted_new: list[int] = []
        while self._waiting and budget > 0 and self._table.num_free_rows:
            sequence = self._waiting.first()
            row = self._place(sequence)
            if row is None:
                # With nothing running and nothing held there is room for any sequence that was admitted.
                if self._running.size or admitted or not (self._release_one_hold(sequence) or self._release(sequence)):
                    break
                continue
            self._start(sequence, now)
            take = min(budget, int(self._table.num_tokens[row] - self._table.num_computed[row]))
            budget -= take
            admitted.append(row)
            admitted_new.append(take)
        self._running = np.append(self._running, np.array(admitted, np.int32))
        return np.append(num_new, np.array(admitted_new, np.int32))

    def _place(self, sequence: Sequence) -> int | None:
        """A row with blocks for the sequence's whole input; None, and nothing changed, if there is no room."""
        request, held, num_tokens = sequence.request, sequence.held_blocks, sequence.num_tokens
        cached: list[int] = []
        node = ROOT
        if request.reads_prefix_cache:
            tokens = request.prompt.tobytes() + sequence.output.tobytes()
            cached, node = self.blocks.find_cached(tokens, num_tokens, request.block_keys)
        if len(held) > len(cached):
            # Forked: the leader's blocks are held already, though the cache may not know them (then neither ours).
            cached, node = held, ROOT
            fresh = self.blocks.allocate(self.blocks.blocks_for(num_tokens) - len(held))
        else:
            fresh = self.blocks.allocate(self.blocks.blocks_for(num_tokens) - len(cached), cached)
            if fresh is not None:
                self.blocks.free(held)
        if fresh is None:
            return None
        self._waiting.remove(sequence)
        sequence.held_blocks = []
        num_computed = len(cached) * self.blocks.block_size
        if not request.started:
            request.started = True
            request.cached_tokens = min(num_computed, len(request.prompt))
            self.counters.prefix_query_tokens += len(request.prompt)
            self.counters.prefix_hit_tokens += request.cached_tokens
        return self._table.add(sequence, [*cached, *fresh], num_computed, node)

    def _start(self, sequence: Sequence, now: float) -> None:
        sequence.state = SequenceState.RUNNING
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now

    def _preempt(self, victim: Sequence) -> None:
        """Takes blocks and row away; everything is computed again later, mostly from the prefix cache."""
        self._leave_table(victim)
        victim.state = SequenceState.WAITING
        victim.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.add(victim)

    def _release_one_hold(self, other_than: Sequence | None = None) -> bool:
        """Frees the shared blocks of the last waiting fork that has any; True if there was one."""
        return any(self._release(sequence) for sequence in reversed(self._waiting) if sequence is not other_than)

    def _release(self, sequence: Sequence) -> bool:
        """Frees what a waiting fork shares, so that it must compute the prompt again; True if it held anything."""
        held, sequence.held_blocks = sequence.held_blocks, []
        self.blocks.free(held)
        return bool(held)

    # -- taking results in ---------------------------------------------------------------------------------------------

    def _store_full_blocks(self, rows: Int32Array) -> None:
        """Makes blocks that filled up in this step findable for others."""
        table, size = self._table, self.blocks.block_size
        full = table.num_computed[rows] // size
        for row in rows[full > table.num_stored[rows]].tolist():
            end = int(table.num_computed[row]) // size
            node: int | None = int(table.prefix_node[row])
            request = table.sequence(row).request
            for position in range(int(table.num_stored[row]), end):
                if node is None or (node == ROOT and position > 0):
                    break  # its beginning is not in the cache, so nothing after it can be found
                tokens = table.token_ids[row, position * size : (position + 1) * size].tobytes()
                node = self.blocks.store(
                    int(table.block_table[row, position]), node, request.block_keys.of_block(position), tokens
                )
            table.prefix_node[row] = ROOT if node is None else node
            table.num_stored[row] = end

    def _release_followers(self, rows: Int32Array) -> None:
        """Forks the followers of each leader that has computed its prompt: they share the prompt's full blocks."""
        table = self._table
        for row in rows[table.leads[rows] & (table.num_computed[rows] >= table.prompt_len[rows])].tolist():
            table.leads[row] = False
            request = table.sequence(row).request
            # The last prompt token is left out: it must be computed again to get its logits.
            shared = table.blocks_of(row)[: (len(request.prompt) - 1) // self.blocks.block_size]
            while (sequence := self._next_follower(request)) is not None:
                self.blocks.allocate(0, shared)
                sequence.held_blocks = list(shared)
                sequence.state = SequenceState.WAITING
                self._waiting.add(sequence)

    def _next_follower(self, request: Request) -> Sequence | None:
        """Takes the next sequence that still follows; None if there is none."""
        while request.followers:
            sequence = request.followers.popleft()
            if sequence.state is SequenceState.FOLLOWING:
                self._num_following -= 1
                return sequence
        return None

    def _collect_prompt_logprobs(self, step: PlannedStep, result: StepResult, outputs: EngineOutputs) -> list[Sequence]:
        """Passes them on; returns the sequences of which the logits of some prompt token gave no probabilities."""
        failed = []
        for wanted, rows in zip(step.batch.prompt_logprobs, result.prompt_logprobs, strict=True):
            sequence = self._table.sequence(int(step.rows[wanted.seq]))
            request = sequence.request
            if len(rows.rows) < len(wanted.target_ids):
                failed.append(sequence)
                continue
            outputs.prompt_logprobs.append(PromptLogprobs(sequence, wanted.first_position, rows))
            request.prompt_logprobs_sent = wanted.first_position + len(wanted.target_ids)
        return failed

    def _note_token_times(self, rows: Int32Array, now: float) -> None:
        table = self._table
        for row in rows[table.num_tokens[rows] - table.prompt_len[rows] == 1].tolist():
            table.sequence(row).first_token = now
        table.last_token[rows] = now

    def _end_finished(self, rows: Int32Array, tokens: Int32Array, outputs: EngineOutputs) -> None:
        """Stop rules, in this order: end of sequence, stop ids, length. min_tokens works by masking these in the
        draw."""
        table = self._table
        is_eos = tokens == table.primary_eos[rows]
        is_stop = (tokens[:, None] == table.stop_ids[rows]).any(axis=1)
        too_long = table.num_tokens[rows] >= table.length_limit[rows]
        for i in np.flatnonzero(is_eos | is_stop | too_long | (tokens < 0)).tolist():
            sequence = table.sequence(int(rows[i]))
            if tokens[i] < 0:
                self._fail(sequence, outputs)
            elif is_eos[i]:
                self._finish(sequence, FinishReason.FINISH_REASON_STOP, outputs)
            elif is_stop[i]:
                self._finish(sequence, FinishReason.FINISH_REASON_STOP, outputs, stop_token_id=int(tokens[i]))
            else:
                self._finish(sequence, FinishReason.FINISH_REASON_LENGTH, outputs)

    # -- ending --------------------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, outputs: EngineOutputs) -> None:
        """The model gave no probabilities. Siblings without output would draw from the very same logits."""
        no_output = sequence.row < 0 or not len(self._table.output_of(sequence.row)[:-1])
        siblings = [s for s in sequence.request.sequences if s.first_token is None] if no_output else []
        for one in [sequence, *siblings]:
            self._finish(one, FinishReason.FINISH_REASON_ERROR, outputs, message=NOT_FINITE)

    def _finish(
        self,
        sequence: Sequence,
        reason: "FinishReason.ValueType",
        outputs: EngineOutputs,
        *,
        stop_token_id: int | None = None,
        code: int | None = None,
        message: str | None = None,
    ) -> None:
        """The one place where sequences end: frees what it holds and records its one terminal row."""
        if sequence.state is SequenceState.FINISHED:
            return
        request, was = sequence.request, sequence.state
        if was is SequenceState.RUNNING:
            self._leave_table(sequence)
        elif was is SequenceState.WAITING:
            self._waiting.remove(sequence)
            self._release(sequence)
        else:
            self._num_following -= 1
        sequence.state = SequenceState.FINISHED
        request.num_unfinished -= 1
        if not request.num_unfinished:
            self._timers.remove(request)
        elif was is not SequenceState.FOLLOWING and (heir := self._next_follower(request)) is not None:
            # It led and has not computed the prompt, or nobody would follow any more.
            heir.state = SequenceState.WAITING
            self._waiting.add(heir)
        outputs.finish(sequence, reason, stop_token_id=stop_token_id, code=code, message=message)

    def _leave_table(self, sequence: Sequence) -> None:
        row = sequence.row
        self.blocks.free(self._table.blocks_of(row))
        self._table.remove(row)
        self._running = self._running[self._running != row]
