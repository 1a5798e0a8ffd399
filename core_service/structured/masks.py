"""Fills the masks of a step on other threads, while the model computes."""

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np

from headrace.core_service.batch import Int32Array
from headrace.core_service.structured.output_grammar import OutputGrammar

# Fewer rows are not worth another thread: one takes some 20 us.
MIN_ROWS_PER_TASK = 16


class PendingMasks:
    """Masks that are being filled."""

    def __init__(self, rows: Int32Array, masks: Int32Array, tasks: "list[Future[None]]") -> None:
        self._rows = rows
        self._masks = masks
        self._tasks = tasks

    @property
    def rows(self) -> Int32Array:
        """Positions in the samples, [num_rows], rising."""
        return self._rows

    def wait(self) -> Int32Array:
        """Bit masks, int32 [num_rows, ceil(vocab_size / 32)]. Blocks until they are there."""
        for task in self._tasks:
            task.result()
        return self._masks


def begin_filling(
    pool: Executor, rows: Int32Array, grammars: Sequence[OutputGrammar], mask_words: int, num_threads: int
) -> PendingMasks:
    """Starts filling one mask for each grammar on the pool's threads; returns at once."""
    masks = np.empty((len(grammars), mask_words), np.int32)
    size = max(MIN_ROWS_PER_TASK, -(-len(grammars) // num_threads))
    tasks = [
        pool.submit(_fill, grammars[start : start + size], masks[start : start + size])
        for start in range(0, len(grammars), size)
    ]
    return PendingMasks(rows, masks, tasks)


def _fill(grammars: Sequence[OutputGrammar], masks: Int32Array) -> None:
    for grammar, mask in zip(grammars, masks, strict=True):
        grammar.fill(mask)
