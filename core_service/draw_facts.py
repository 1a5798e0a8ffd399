"""What stays the same about the rows that draw a token, from step to step, as columns.

In steady decode the same rows draw in every step, so these columns are gathered once and used until a sequence comes
or goes. They also let a step's result be taken in after its rows went to other sequences.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.common.params import RepetitionDetectionParams
from headrace.core_service.batch import FloatArray, Int32Array, Int64Array, LogitEdits, UInt64Array
from headrace.core_service.grammar import Grammar

if TYPE_CHECKING:
    from headrace.core_service.sequence_table import SequenceTable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DrawFacts:
    """Columns [num_samples]; dictionaries hold what few rows have, by position in them."""

    rows: Int64Array
    version: int  # of the table when they were gathered
    generation: Int64Array  # tells a row's sequence from the ones that have the row later
    client: Int32Array
    slot: Int32Array
    prompt_len: Int32Array
    length_limit: Int32Array
    min_output: Int32Array
    primary_eos: Int32Array
    stop_ids: Int32Array  # [num_samples, most stop ids of any row]
    temperature: FloatArray
    top_k: Int32Array
    top_p: FloatArray
    min_p: FloatArray
    seed: UInt64Array
    num_logprobs: Int32Array
    longest_min_output: int
    edits: dict[int, LogitEdits]
    logprob_ids: dict[int, Int32Array]
    grammars: dict[int, Grammar]
    repetition: dict[int, RepetitionDetectionParams]

    @classmethod
    def gather(cls, table: "SequenceTable", rows: Int64Array) -> "DrawFacts":
        """The facts of `rows` [num_samples] as the table has them now."""
        stop_ids = table.stop_ids[rows]
        min_output = table.min_output[rows]
        return cls(
            rows=rows,
            version=table.version,
            generation=table.generation[rows],
            client=table.client[rows],
            slot=table.slot[rows],
            prompt_len=table.prompt_len[rows],
            length_limit=table.length_limit[rows],
            min_output=min_output,
            primary_eos=table.primary_eos[rows],
            stop_ids=stop_ids[:, (stop_ids >= 0).any(axis=0)],
            temperature=table.temperature[rows],
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            min_p=table.min_p[rows],
            seed=table.seed[rows],
            num_logprobs=table.num_logprobs[rows],
            longest_min_output=int(min_output.max(initial=0)),
            edits=_by_position(table.edits, rows),
            logprob_ids=_by_position(table.logprob_ids, rows),
            grammars=_by_position(table.grammars, rows),
            repetition=_by_position(table.repetition, rows),
        )

    def alive(self, table: "SequenceTable") -> NDArray[np.bool_] | None:
        """Mask of the rows that still have their sequences; None if all do."""
        if self.version == table.version:
            return None
        alive: NDArray[np.bool_] = table.generation[self.rows] == self.generation
        return None if alive.all() else alive

    def stop_tokens(self, position: int) -> Int32Array:
        """The ids that end the output at `position` in the columns."""
        ids = np.append(self.stop_ids[position], self.primary_eos[position])
        stops: Int32Array = ids[ids >= 0]
        return stops


def _by_position(of_row: dict[int, T], rows: Int64Array) -> dict[int, T]:
    if not of_row:
        return {}
    return {i: of_row[row] for i, row in enumerate(rows.tolist()) if row in of_row}
