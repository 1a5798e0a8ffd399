"""The running sequences as columns: one row a sequence, numpy arrays, no torch.

The scheduler and the batch builder work on whole columns, so a step costs a constant number of vector operations
however many sequences run. Rows are reused; the two wide columns (tokens and blocks) grow to the longest sequence seen.

    token_ids[row]     p p p p p p o o o ? . .      prompt, then output
                       |         ^ prompt_len       ^ num_tokens: planned ones (?) included, which are not known yet
                       |-----------^ num_computed: tokens whose K and V are in the cache, once the planned steps ran
    block_table[row]   b0     b1    b2
"""

from collections.abc import Sequence as AnySequence

import numpy as np
from numpy.typing import NDArray

from headrace.common.params import RepetitionDetectionParams
from headrace.core_service.batch import FloatArray, Int32Array, Int64Array, LogitEdits, UInt64Array
from headrace.core_service.draw_facts import DrawFacts
from headrace.core_service.grammar import Grammar
from headrace.core_service.prefix_cache import ROOT
from headrace.core_service.request import Sequence

NO_TOKEN = -1
_FIRST_WIDTH = 256


class SequenceTable:
    """Rows 0 to capacity - 1; a free row's `sequences` entry is None."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self._block_size = block_size
        self._free_rows = list(range(capacity - 1, -1, -1))
        self.version = 0  # changes whenever a sequence comes or goes
        self.sequences: list[Sequence | None] = [None] * capacity
        self.generation: Int64Array = np.zeros(capacity, np.int64)  # sequences that had the row before
        self.token_ids: Int32Array = np.zeros((capacity, _FIRST_WIDTH), np.int32)
        self.block_table: Int32Array = np.zeros((capacity, _FIRST_WIDTH // block_size), np.int32)
        self.prompt_len: Int32Array = np.zeros(capacity, np.int32)
        self.num_tokens: Int32Array = np.zeros(capacity, np.int32)
        self.num_planned: Int32Array = np.zeros(capacity, np.int32)  # of num_tokens: drawn by steps under way
        self.num_computed: Int32Array = np.zeros(capacity, np.int32)
        self.num_blocks: Int32Array = np.zeros(capacity, np.int32)
        self.num_stored: Int32Array = np.zeros(capacity, np.int32)  # full blocks already known to the prefix cache
        self.prefix_node: Int64Array = np.full(capacity, ROOT, np.int64)  # node of the last stored block
        self.length_limit: Int32Array = np.zeros(capacity, np.int32)  # num_tokens at which the output is too long
        self.min_output: Int32Array = np.zeros(capacity, np.int32)
        self.primary_eos: Int32Array = np.full(capacity, NO_TOKEN, np.int32)
        self.stop_ids: Int32Array = np.full((capacity, 4), NO_TOKEN, np.int32)
        self.temperature: FloatArray = np.zeros(capacity, np.float32)
        self.top_k: Int32Array = np.zeros(capacity, np.int32)
        self.top_p: FloatArray = np.ones(capacity, np.float32)
        self.min_p: FloatArray = np.zeros(capacity, np.float32)
        self.seed: UInt64Array = np.zeros(capacity, np.uint64)
        self.num_logprobs: Int32Array = np.full(capacity, -1, np.int32)
        self.leads: NDArray[np.bool_] = np.zeros(capacity, np.bool_)  # others wait for its prompt
        self.wants_prompt_logprobs: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        # What few rows have, by row.
        self.edits: dict[int, LogitEdits] = {}
        self.logprob_ids: dict[int, Int32Array] = {}
        self.grammars: dict[int, Grammar] = {}
        self.repetition: dict[int, RepetitionDetectionParams] = {}
        self._draw_facts: DrawFacts | None = None
        self.num_wanting_prompt_logprobs = 0  # rows in use
        self.client: Int32Array = np.zeros(capacity, np.int32)
        self.slot: Int32Array = np.zeros(capacity, np.int32)
        self.last_token: NDArray[np.float64] = np.zeros(capacity, np.float64)  # when the last token came

    @property
    def capacity(self) -> int:
        """Most sequences at once."""
        return len(self.sequences)

    @property
    def num_free_rows(self) -> int:
        """Rows that can be taken."""
        return len(self._free_rows)

    def add(self, sequence: Sequence, blocks: AnySequence[int], num_computed: int, prefix_node: int) -> int:
        """Puts a sequence into a free row with its blocks, of which the first hold `num_computed` tokens already."""
        row = self._free_rows.pop()
        self.version += 1
        request = sequence.request
        self.sequences[row] = sequence
        sequence.row = row
        prompt_len, num_tokens = len(request.prompt), sequence.num_tokens
        self._reserve(num_tokens, len(blocks))
        self.token_ids[row, :prompt_len] = request.prompt
        self.token_ids[row, prompt_len:num_tokens] = sequence.output
        self.block_table[row, : len(blocks)] = blocks
        self.block_table[row, len(blocks) :] = 0  # not what a row before it had
        self.prompt_len[row] = prompt_len
        self.num_tokens[row] = num_tokens
        self.num_computed[row] = num_computed
        self.num_blocks[row] = len(blocks)
        self.num_stored[row] = num_computed // self._block_size
        self.prefix_node[row] = prefix_node
        self.num_planned[row] = 0
        self.leads[row] = bool(request.held)
        self.last_token[row] = sequence.last_token
        self._set_sampling(row, sequence)
        return row

    def remove(self, row: int) -> None:
        """Frees a row; its output goes back into the sequence. The caller has taken care of the blocks."""
        sequence = self.sequences[row]
        if sequence is None:
            raise ValueError(f"row {row} is free already")
        sequence.output = self.output_of(row).copy()
        sequence.last_token = float(self.last_token[row])
        sequence.row = -1
        self.sequences[row] = None
        self.num_wanting_prompt_logprobs -= int(self.wants_prompt_logprobs[row])
        self.version += 1
        self.generation[row] += 1
        for of_row in (self.edits, self.logprob_ids, self.grammars, self.repetition):
            of_row.pop(row, None)
        self._free_rows.append(row)

    def sequence(self, row: int) -> Sequence:
        """The sequence in a row that is in use."""
        sequence = self.sequences[row]
        if sequence is None:
            raise ValueError(f"row {row} is free")
        return sequence

    def blocks_of(self, row: int) -> list[int]:
        """Block ids of a row, first to last."""
        blocks: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        return blocks

    def output_of(self, row: int) -> Int32Array:
        """The output tokens of a row that are known (a view)."""
        return self.token_ids[row, self.prompt_len[row] : self.num_tokens[row] - self.num_planned[row]]

    def append_blocks(self, row: int, blocks: AnySequence[int]) -> None:
        """Adds blocks at the end of a row's block table."""
        have = int(self.num_blocks[row])
        self._reserve(0, have + len(blocks))
        self.block_table[row, have : have + len(blocks)] = blocks
        self.num_blocks[row] = have + len(blocks)

    def plan_tokens(self, rows: Int64Array) -> None:
        """Makes room for one more output token of each of `rows`, which is not known yet."""
        self.num_tokens[rows] += 1
        self.num_planned[rows] += 1
        self._reserve(int(self.num_tokens[rows].max()), 0)

    def set_planned(self, rows: Int64Array, positions: Int32Array, tokens: Int32Array) -> None:
        """The planned tokens of `rows` at `positions` are known now."""
        self.token_ids[rows, positions] = tokens
        self.num_planned[rows] -= 1

    def draw_facts(self, rows: Int64Array) -> DrawFacts:
        """What stays the same about `rows`; gathered anew only if they are others than the last time."""
        facts = self._draw_facts
        if facts is None or facts.version != self.version or not np.array_equal(facts.rows, rows):
            facts = self._draw_facts = DrawFacts.gather(self, rows)
        return facts

    def _set_sampling(self, row: int, sequence: Sequence) -> None:
        request = sequence.request
        params = request.params
        self.length_limit[row] = request.length_limit
        self.min_output[row] = min(params.min_tokens, request.length_limit)
        eos = request.eos_token_ids
        self.primary_eos[row] = eos[0] if eos else NO_TOKEN
        stops = tuple(dict.fromkeys((*eos[1:], *params.stop_token_ids)))
        if len(stops) > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, len(stops), NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stops)] = stops
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = sequence.seed
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        wants = params.prompt_logprobs is not None and request.prompt_logprobs_sent < len(request.prompt)
        self.wants_prompt_logprobs[row] = wants
        self.num_wanting_prompt_logprobs += wants
        if params.logprob_token_ids:
            self.logprob_ids[row] = np.array(params.logprob_token_ids, np.int32)
        if request.edits is not None:
            self.edits[row] = request.edits
        if sequence.grammar is not None:
            self.grammars[row] = sequence.grammar
        if params.repetition_detection is not None:
            self.repetition[row] = params.repetition_detection
        self.client[row] = request.client
        self.slot[row] = sequence.slot

    def _reserve(self, num_tokens: int, num_blocks: int) -> None:
        if num_tokens > self.token_ids.shape[1]:
            self.token_ids = _widened(self.token_ids, num_tokens, 0)
        if num_blocks > self.block_table.shape[1]:
            self.block_table = _widened(self.block_table, num_blocks, 0)


def _widened(array: Int32Array, width: int, fill: int) -> Int32Array:
    """A copy with at least `width` columns; doubling keeps the copying rare."""
    wider = np.full((array.shape[0], max(width, 2 * array.shape[1])), fill, np.int32)
    wider[:, : array.shape[1]] = array
    return wider
