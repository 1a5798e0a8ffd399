"""Sequences that wait to run, in the order of the scheduling policy.

A preempted sequence goes back to its own place, since its key does not change.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from headrace.core_service.request import Sequence

_key = attrgetter("queue_key")


class WaitingQueue:
    """A sorted list: inserting moves pointers only, and thousands of entries fit into a few cache lines."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_tokens = 0  # tokens of all that wait

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place."""
        insort(self._sequences, sequence, key=_key)
        self.num_tokens += sequence.num_tokens

    def first(self) -> Sequence:
        """The next to run. Raises IndexError if nobody waits."""
        return self._sequences[0]

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out. Raises ValueError if it does not wait."""
        position = bisect_left(self._sequences, sequence.queue_key, key=_key)
        if position == len(self._sequences) or self._sequences[position] is not sequence:
            raise ValueError(f"slot {sequence.slot} does not wait")
        del self._sequences[position]
        self.num_tokens -= sequence.num_tokens

    def append_token(self, sequence: Sequence, token: int) -> None:
        """Adds an output token to a sequence that waits: it was drawn while the sequence was preempted."""
        sequence.output = np.append(sequence.output, np.int32(token))
        self.num_tokens += 1
