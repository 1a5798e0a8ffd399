"""Decides what runs in each step. No torch, no clock of its own, no thread: pure and tested alone.

There are no prefill and decode phases. Each sequence has tokens and, of those, computed tokens; a step gives sequences
new tokens to compute until the token budget is used up:

    running   first, in order; a prompt gets what budget is left (chunked prefill), a decoding sequence its one token
    waiting   then, in the policy's order, as long as a row, the budget and blocks for the whole input are there

If a running sequence finds no free block, another gives its blocks up (preemption by recompute) and goes back to its
place in the waiting queue.

A step goes through four calls: `schedule` and `launch` before it runs, `take_tokens` and `update` after. The next one
may be scheduled before the result is there; the tokens under way then count as planned.
"""

from enum import Enum

import numpy as np
from google.rpc import code_pb2

from headrace.common.errors import RequestError
from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.batch import GrammarMasks, Int32Array, Int64Array, ScheduledBatch, StepResult
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.counters import SchedulerCounters
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.grammar import CompiledGrammar, GrammarBackend
from headrace.core_service.lifecycle import Lifecycle
from headrace.core_service.planned_step import PlannedStep, plan_step
from headrace.core_service.request import Request, Sequence, SequenceState
from headrace.core_service.scheduling_policy import SchedulingPolicy, rank
from headrace.core_service.step_results import StepResults
from headrace.core_service.timers import Timer


class _Room(Enum):
    """What became of the blocks that running sequences needed."""

    ENOUGH = "each got one"
    PREEMPTED = "some sequences gave theirs up: nobody new is admitted in this step"
    SHORT = "there is none, and one sequence runs alone"


class Scheduler:
    """Owns every live request from its arrival to its end. `now` is the core's monotonic clock in seconds."""

    def __init__(self, blocks: BlockManager, config: SchedulerConfig, grammars: GrammarBackend | None = None) -> None:
        self.blocks = blocks
        self._config = config
        self._grammars = grammars
        self._policy = SchedulingPolicy(
            by_priority=config.policy == "priority",
            ageing_s=config.priority_ageing,
            cheapest_victim=config.preemption_victim == "cheapest",
        )
        self._life = Lifecycle(blocks, self._policy, config.max_num_seqs)
        self._results = StepResults(self._life)
        self._watermark_blocks = int(config.watermark * blocks.num_usable)
        self._num_planned_steps = 0

    @property
    def counters(self) -> SchedulerCounters:
        """What happened so far."""
        return self._life.counters

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._life.rows)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one, for their leader or for their grammar."""
        return len(self._life.waiting) + self._life.num_held

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute, at most, for those that wait for a row or a grammar."""
        return self._life.waiting.num_tokens + self._life.num_prompt_tokens_held

    @property
    def has_work(self) -> bool:
        """True if a step has something to do."""
        return bool(len(self._life.rows) or len(self._life.waiting))

    @property
    def next_expiry(self) -> float | None:
        """When `expire` has something to do next; None: never."""
        return self._life.timers.next_at

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a checked request in. With `awaits_grammar` it is held until `grammar_ready` or `grammar_failed`."""
        if self._config.max_waiting_time:
            request.queue_limit = request.received + self._config.max_waiting_time
        self._life.add(request)

    def grammar_ready(self, request: Request, compiled: CompiledGrammar, outputs: EngineOutputs) -> None:
        """The request's grammar is there: it goes into the queue, unless its generated tokens do not fit."""
        self._life.grammar_settled(request)
        for sequence in request.sequences:
            if sequence.state is SequenceState.HELD:
                try:
                    sequence.grammar = compiled.start(sequence.output)
                except RequestError as error:
                    self._refuse(sequence, error, outputs)
        self._life.release_next(request)

    def grammar_failed(self, request: Request, error: RequestError, outputs: EngineOutputs) -> None:
        """The request's grammar does not compile: that ends the request, and nothing else."""
        for sequence in request.sequences:
            self._refuse(sequence, error, outputs)

    def abort(self, sequence: Sequence, outputs: EngineOutputs, *, code: int | None = None, message: str = "") -> None:
        """Ends a sequence wherever it is; does nothing if it has ended. `code` says whose doing it was."""
        self._life.finish(sequence, FinishReason.FINISH_REASON_ABORT, outputs, code=code, message=message or None)

    def expire(self, now: float, outputs: EngineOutputs) -> None:
        """Ends what has run out of time. Expired work is never scheduled."""
        for request, timer in self._life.timers.expired(now):
            if timer is Timer.QUEUE_LIMIT:
                if not request.started:
                    self._give_up_waiting(request, outputs)
                continue
            deadline = timer is Timer.DEADLINE
            reason = FinishReason.FINISH_REASON_DEADLINE if deadline else FinishReason.FINISH_REASON_TIME_LIMIT
            for sequence in request.sequences:
                self._life.finish(sequence, reason, outputs)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def schedule(self, now: float, outputs: EngineOutputs) -> PlannedStep | None:
        """Plans the next step; None if nothing can run. Sequences that ended while planning go to `outputs`."""
        if not self.has_work:
            return None
        life = self._life
        if len(life.waiting):
            self._make_way()
        made_room = self._make_room_for_running(outputs)
        longest = self._longest_chunk()
        num_new = self._share_budget(made_room, longest)
        self._count_as_computed(life.rows, num_new)
        if len(life.waiting) and made_room is not _Room.PREEMPTED:
            num_new = self._admit(num_new, longest, now)
        rows = life.rows
        if not num_new.all():
            chosen = np.flatnonzero(num_new)
            rows, num_new = rows[chosen], num_new[chosen]
        if not len(rows):
            return None
        self._num_planned_steps += 1
        return plan_step(life.table, rows, num_new, self.blocks.block_size, self._num_planned_steps)

    def launch(self, step: PlannedStep) -> ScheduledBatch:
        """The batch to compute, once `take_tokens` has seen the result of the step before."""
        masks: GrammarMasks | None = None
        if step.draws.grammars and self._grammars is not None:
            open_ = {i: grammar for i, grammar in step.draws.grammars.items() if not grammar.exhausted}
            masks = self._grammars.begin_masks(np.fromiter(open_, np.int32, len(open_)), list(open_.values()))
        return step.launch(self._life.table, masks)

    def take_tokens(self, step: PlannedStep, result: StepResult) -> None:
        """Fills a step's tokens in where the next step reads them."""
        self._results.take_tokens(step, result)

    def update(self, step: PlannedStep, result: StepResult, now: float, outputs: EngineOutputs) -> None:
        """Takes in what else the step's result means: what goes out, and who is done."""
        self._results.update(step, result, now, outputs)

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes; returns the number of blocks forgotten."""
        return self.blocks.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block reference belongs to a live sequence."""
        self._life.check_integrity()

    # -- planning ------------------------------------------------------------------------------------------------------

    def _make_way(self) -> None:
        """Pushes less important sequences out for waiting ones, if that gives these what they need."""
        life = self._life
        if not life.rows.size or not self._anyone_makes_way():
            return
        by_importance = sorted(life.running(), key=rank)
        free_rows, free_blocks = life.table.num_free_rows, self.blocks.num_free
        longest = self._longest_chunk()
        left = self._config.max_num_batched_tokens - sum(self._share_of(one, longest) for one in by_importance)
        for num_placed, waiting in enumerate(list(life.waiting)):
            need, victims = self.blocks.blocks_for(waiting.num_tokens), []
            while True:
                keep_free = self._watermark_blocks if by_importance or num_placed else 0
                if free_rows >= 1 and free_blocks >= need + keep_free and left >= 1:
                    break
                if not by_importance or not self._policy.makes_way_for(by_importance[-1], waiting):
                    return
                victim = by_importance.pop()
                victims.append(victim)
                free_rows += 1
                free_blocks += life.preemption_cost(victim).freed_blocks
                left += self._share_of(victim, longest)
            for victim in victims:
                victim.made_way = True
                life.preempt(victim)
            free_rows -= 1
            free_blocks -= need
            left -= min(waiting.num_tokens, longest, left)

    def _share_of(self, running: Sequence, longest: int) -> int:
        """Tokens of the budget that a running sequence would take."""
        table, row = self._life.table, running.row
        return min(int(table.num_tokens[row] - table.num_computed[row]), longest)

    def _anyone_makes_way(self) -> bool:
        first = self._life.waiting.first()
        return any(self._policy.makes_way_for(running, first) for running in self._life.running())

    def _make_room_for_running(self, outputs: EngineOutputs) -> "_Room":
        """Gives a block to each sequence whose next token needs one, preempting others if it must."""
        life, room = self._life, _Room.ENOUGH
        table, rows = life.table, life.rows
        tokens = table.num_tokens[rows]
        short = rows[(tokens > table.num_blocks[rows] * self.blocks.block_size) & (tokens < table.length_limit[rows])]
        for row in short.tolist():
            sequence = table.sequences[row]
            while sequence is not None and sequence.row == row:
                fresh = self.blocks.allocate(1)
                if fresh is not None:
                    table.append_blocks(row, fresh)
                    break
                if life.release_one_hold():
                    continue
                if len(life.rows) > 1:
                    life.preempt(self._policy.victim(life.running(), life.preemption_cost))
                    room = _Room.PREEMPTED
                elif table.num_planned[row]:
                    return _Room.SHORT  # what is being drawn for it must come out first
                else:
                    # Alone, and the pool is full: it can never go on.
                    life.finish(sequence, FinishReason.FINISH_REASON_LENGTH, outputs)
        return room

    def _share_budget(self, room: "_Room", longest: int) -> Int32Array:
        """New tokens for each running sequence, in order, until the budget is used up.

        A sequence whose last allowed token is being drawn has nothing more to compute.
        """
        table, rows = self._life.table, self._life.rows
        if room is _Room.SHORT:
            return np.zeros(len(rows), np.int32)
        tokens = table.num_tokens[rows]
        need = np.where(tokens < table.length_limit[rows], tokens - table.num_computed[rows], 0)
        need = np.minimum(need, longest)
        ends = np.cumsum(need)
        if len(ends) and ends[-1] > self._config.max_num_batched_tokens:
            need = np.clip(self._config.max_num_batched_tokens - (ends - need), 0, need)
        share: Int32Array = need.astype(np.int32)
        return share

    def _longest_chunk(self) -> int:
        """Most new tokens of one sequence in a step.

        A prompt may always have its even share of the budget, so one that is alone is not held back.
        """
        budget, threshold = self._config.max_num_batched_tokens, self._config.long_prefill_token_threshold
        return max(threshold, budget // max(self.num_running + self.num_waiting, 1)) if threshold else budget

    def _count_as_computed(self, rows: Int64Array, num_new: Int32Array) -> None:
        """Counts new tokens as computed, so that others can share them in the same step."""
        life, table = self._life, self._life.table
        table.num_computed[rows] += num_new
        life.store_full_blocks(rows, table.num_tokens[rows] - table.num_planned[rows])
        leading = table.leads[rows]
        if leading.any():
            for row in rows[leading & (table.num_computed[rows] >= table.prompt_len[rows])].tolist():
                life.fork_held(row)

    def _admit(self, num_new: Int32Array, longest: int, now: float) -> Int32Array:
        """Moves waiting sequences into rows while there is room; returns `num_new` with theirs appended."""
        life, table = self._life, self._life.table
        budget = self._config.max_num_batched_tokens - int(num_new.sum())
        admitted: list[int] = []
        taken: list[int] = []
        while life.waiting and budget > 0 and table.num_free_rows:
            sequence = life.waiting.first()
            if life.is_owed(sequence):
                break  # started now, it would draw the same token again
            something_runs = bool(life.rows.size or admitted)
            row = life.start(
                sequence,
                now,
                keep_free=self._watermark_blocks if something_runs else 0,
                most_new=None if self._config.enable_chunked_prefill else budget,
            )
            if row is None:
                # With nothing running and nothing held there is room for any sequence that was admitted.
                if something_runs or not (life.release_one_hold(sequence) or life.release_hold(sequence)):
                    break
                continue
            take = min(budget, longest, int(table.num_tokens[row] - table.num_computed[row]))
            budget -= take
            admitted.append(row)
            taken.append(take)
            self._count_as_computed(np.array([row]), np.array([take], np.int32))
        life.rows = np.append(life.rows, np.array(admitted, np.int64))
        return np.append(num_new, np.array(taken, np.int32))

    # -- ending --------------------------------------------------------------------------------------------------------

    def _give_up_waiting(self, request: Request, outputs: EngineOutputs) -> None:
        for sequence in request.sequences:
            self._life.finish(
                sequence,
                FinishReason.FINISH_REASON_ERROR,
                outputs,
                code=code_pb2.RESOURCE_EXHAUSTED,
                message=f"waited {self._config.max_waiting_time:g} s to be scheduled, this core's max_waiting_time",
                retryable=True,
            )

    def _refuse(self, sequence: Sequence, error: RequestError, outputs: EngineOutputs) -> None:
        self._life.finish(
            sequence,
            FinishReason.FINISH_REASON_ERROR,
            outputs,
            code=error.code.value[0],
            message=error.message,
        )
