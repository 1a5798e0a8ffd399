"""The life of sequences: the one place where they change their state, and where rows and blocks change hands.

add ──▶ HELD ──release──▶ WAITING ──start──▶ RUNNING ──finish──▶ FINISHED
                             ▲                  │
                             └──────preempt─────┘
"""

import numpy as np

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.batch import Int32Array, Int64Array
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.counters import SchedulerCounters
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.prefix_cache import ROOT
from headrace.core_service.request import Request, Sequence, SequenceState
from headrace.core_service.scheduling_policy import Cost, SchedulingPolicy
from headrace.core_service.sequence_table import SequenceTable
from headrace.core_service.timers import RequestTimers
from headrace.core_service.waiting_queue import WaitingQueue

_RowGeneration = tuple[int, int]


class Lifecycle:
    """Every live sequence, wherever it is. `rows` are those of the running ones, in the order of their admission."""

    def __init__(self, blocks: BlockManager, policy: SchedulingPolicy, max_num_seqs: int) -> None:
        self.blocks = blocks
        self.policy = policy
        self.table = SequenceTable(max_num_seqs, blocks.block_size)
        self.rows: Int64Array = np.empty(0, np.int64)
        self.waiting = WaitingQueue()
        self.timers = RequestTimers()
        self.num_held = 0
        self.num_prompt_tokens_held = 0  # of requests whose grammar is not compiled
        self.counters = SchedulerCounters()
        self._serial = 0
        # Preempted while a step was drawing their next token, by the row that they had: the token is still theirs.
        self._owed: dict[_RowGeneration, Sequence] = {}

    # -- entering ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request in: its first sequence waits, the others are held until it has computed the prompt.

        All are held while the request's grammar is not compiled.
        """
        self._serial += 1
        request.serial = self._serial
        request.num_unfinished = len(request.sequences)
        for sequence in request.sequences:
            sequence.state = SequenceState.HELD
            sequence.queue_key = self.policy.queue_key(sequence)
        request.held.extend(request.sequences)
        self.num_held += len(request.sequences)
        self.timers.add(request)
        if request.awaits_grammar:
            self.num_prompt_tokens_held += len(request.prompt)
        else:
            self.release_next(request)

    def grammar_settled(self, request: Request) -> None:
        """The request waits for its grammar no longer, since it is there or nobody needs it any more."""
        if request.awaits_grammar:
            request.awaits_grammar = False
            self.num_prompt_tokens_held -= len(request.prompt)

    def release_next(self, request: Request) -> bool:
        """Lets the next sequence that is held wait for a row; False if there is none."""
        while request.held:
            sequence = request.held.popleft()
            if sequence.state is SequenceState.HELD:
                self.num_held -= 1
                sequence.state = SequenceState.WAITING
                self.waiting.add(sequence)
                return True
        return False

    def fork_held(self, row: int) -> None:
        """The row's sequence is about to have computed its prompt: those that are held share the prompt's full blocks.

        The last prompt token is left out: each must compute it again to get its logits.
        """
        self.table.leads[row] = False
        request = self.table.sequence(row).request
        shared = self.table.blocks_of(row)[: (len(request.prompt) - 1) // self.blocks.block_size]
        for sequence in request.held:
            if sequence.state is SequenceState.HELD:
                self.blocks.allocate(0, shared)
                sequence.held_blocks = list(shared)
        while self.release_next(request):
            pass

    # -- running -------------------------------------------------------------------------------------------------------

    def start(self, sequence: Sequence, now: float, *, keep_free: int, most_new: int | None) -> int | None:
        """Moves a waiting sequence into a row with blocks for its whole input; the caller adds the row to `rows`.

        Returns None, and nothing has changed, if fewer than `keep_free` blocks would be left, or more than `most_new`
        tokens would have to be computed.
        """
        request, held, num_tokens = sequence.request, sequence.held_blocks, sequence.num_tokens
        cached: list[int] = []
        node = ROOT
        if request.reads_prefix_cache:
            tokens = request.prompt.tobytes() + sequence.output.tobytes()
            cached, node = self.blocks.find_cached(tokens, num_tokens, request.block_keys)
        num_computed = max(len(cached), len(held)) * self.blocks.block_size
        if most_new is not None and num_tokens - num_computed > most_new:
            return None
        if len(held) > len(cached):
            # Forked: the leader's blocks are held already, though the cache may not know them (then neither ours).
            cached, node = held, ROOT
            fresh = self.blocks.allocate(self.blocks.blocks_for(num_tokens) - len(held), keep_free=keep_free)
        else:
            fresh = self.blocks.allocate(self.blocks.blocks_for(num_tokens) - len(cached), cached, keep_free=keep_free)
            if fresh is not None:
                self.blocks.free(held)
        if fresh is None:
            return None
        self.waiting.remove(sequence)
        sequence.held_blocks = []
        sequence.state = SequenceState.RUNNING
        sequence.kept_priority = self.policy.priority_at_admission(sequence, now)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
        if not request.started:
            request.started = True
            request.cached_tokens = min(num_computed, len(request.prompt))
            if self.blocks.caching and request.reads_prefix_cache:
                self.counters.prefix_query_tokens += len(request.prompt)
                self.counters.prefix_hit_tokens += request.cached_tokens
        return self.table.add(sequence, [*cached, *fresh], num_computed, node)

    def preempt(self, victim: Sequence) -> None:
        """Takes blocks and row away; everything is computed again later, mostly from the prefix cache."""
        row, table = victim.row, self.table
        if table.num_planned[row]:
            self._owed[row, int(table.generation[row])] = victim
        self._leave_table(victim)
        victim.state = SequenceState.WAITING
        victim.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.add(victim)

    def owed(self, row: int, generation: int) -> Sequence | None:
        """The sequence that was preempted out of a row while its token was drawn; None if it has ended since."""
        sequence = self._owed.get((row, generation))
        return sequence if sequence is not None and sequence.state is not SequenceState.FINISHED else None

    def is_owed(self, sequence: Sequence) -> bool:
        """True while a step still draws a token for a sequence that was preempted."""
        return bool(self._owed) and sequence in self._owed.values()

    def take_owed(self, row: int, generation: int) -> Sequence | None:
        """The same; its token is delivered now."""
        sequence = self.owed(row, generation)
        self._owed.pop((row, generation), None)
        return sequence

    def preemption_cost(self, running: Sequence) -> Cost:
        """What preempting it would free. Blocks that others hold stay, and need not be computed again."""
        own = self.blocks.num_unshared(self.table.blocks_of(running.row))
        last = int(self.table.num_computed[running.row]) % self.blocks.block_size
        size = self.blocks.block_size
        return Cost(own, own * size - (size - last if last and own else 0))

    def running(self) -> list[Sequence]:
        """All that hold a row, in the order of their admission."""
        return [self.table.sequence(row) for row in self.rows.tolist()]

    def store_full_blocks(self, rows: Int64Array, num_known: Int32Array) -> None:
        """Makes the blocks findable that are full once the planned steps ran, and all of whose tokens are known.

        A step writes all its keys and values before it reads any, so another sequence of the very same step may read
        them already. num_known [len(rows)] tokens of each row have known ids.
        """
        table, size = self.table, self.blocks.block_size
        full = np.minimum(table.num_computed[rows], num_known) // size
        for i in np.flatnonzero(full > table.num_stored[rows]).tolist():
            row, end = int(rows[i]), int(full[i])
            self._store(row, end)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def release_one_hold(self, other_than: Sequence | None = None) -> bool:
        """Frees the shared blocks of the last waiting fork that has any; True if there was one."""
        return any(self.release_hold(sequence) for sequence in reversed(self.waiting) if sequence is not other_than)

    def release_hold(self, sequence: Sequence) -> bool:
        """Frees what a waiting fork shares, so that it must compute the prompt again; True if it held anything."""
        held, sequence.held_blocks = sequence.held_blocks, []
        self.blocks.free(held)
        return bool(held)

    def finish(
        self,
        sequence: Sequence,
        reason: "FinishReason.ValueType",
        outputs: EngineOutputs,
        *,
        stop_token_id: int | None = None,
        code: int | None = None,
        message: str | None = None,
        retryable: bool = False,
    ) -> None:
        """Ends a sequence wherever it is: frees what it holds and records its one terminal row. No-op if it has
        ended."""
        if sequence.state is SequenceState.FINISHED:
            return
        request, was = sequence.request, sequence.state
        if was is SequenceState.RUNNING:
            self._leave_table(sequence)
        elif was is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.release_hold(sequence)
        else:
            self.num_held -= 1
        sequence.state = SequenceState.FINISHED
        request.num_unfinished -= 1
        if not request.num_unfinished:
            self.timers.remove(request)
            self.grammar_settled(request)
        elif was is not SequenceState.HELD:
            # If it led and has not computed the prompt, nobody else would.
            self.release_next(request)
        outputs.finish(sequence, reason, stop_token_id=stop_token_id, code=code, message=message, retryable=retryable)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block reference belongs to a live sequence."""
        holders = [self.table.blocks_of(row) for row in self.rows.tolist()]
        holders += [sequence.held_blocks for sequence in self.waiting]
        self.blocks.check_integrity(holders)
        if any(sequence.state is SequenceState.RUNNING for sequence in self._owed.values()):
            raise RuntimeError("a sequence was started while a token that it will get is still being drawn")
        if self.table.num_free_rows + len(self.rows) != self.table.capacity:
            raise RuntimeError("rows of the sequence table were lost")

    def _leave_table(self, sequence: Sequence) -> None:
        row = sequence.row
        self.blocks.free(self.table.blocks_of(row))
        self.table.remove(row)
        self.rows = self.rows[self.rows != row]

    def _store(self, row: int, end: int) -> None:
        table, size = self.table, self.blocks.block_size
        node: int | None = int(table.prefix_node[row])
        keys = table.sequence(row).request.block_keys
        for position in range(int(table.num_stored[row]), end):
            if node is None or (node == ROOT and position > 0):
                break  # its beginning is not in the cache, so nothing after it can be found
            tokens = table.token_ids[row, position * size : (position + 1) * size].tobytes()
            block = int(table.block_table[row, position])
            node = self.blocks.store(block, node, keys.of_block(position), tokens)
        table.prefix_node[row] = ROOT if node is None else node
        table.num_stored[row] = end
