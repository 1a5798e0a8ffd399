"""Who goes first, and who makes way.

    waiting   priority - wait / ageing: lower goes first. All that wait age alike, so their order never changes, and the
              queue can be sorted once by priority + arrival / ageing.
    running   keep the effective priority that they had when they were admitted: who has waited long is not pushed out
              again by the next one to come. Ageing moves a request up in the queue; it pushes nobody out.

Under `fcfs` priorities are not read.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.core_service.request import QueueKey, Sequence


class Cost(NamedTuple):
    """What preempting a sequence frees, and what it will cost to compute it again."""

    freed_blocks: int  # that nobody else holds
    recomputed_tokens: int  # in those blocks


class SchedulingPolicy:
    """The order of sequences. `ageing_s` is the wait in seconds that counts as one step of priority; 0 switches it
    off."""

    def __init__(self, *, by_priority: bool = True, ageing_s: float = 30.0, cheapest_victim: bool = False) -> None:
        self._by_priority = by_priority
        self._ageing_s = ageing_s
        self._cheapest_victim = cheapest_victim

    def queue_key(self, sequence: Sequence) -> QueueKey:
        """Sorts those that wait; no two are equal. What was taken over from another core goes before all new work."""
        request = sequence.request
        return (not request.resumed, self._aged(request.priority, -request.arrival), *_age_key(sequence))

    def priority_at_admission(self, sequence: Sequence, now: float) -> float:
        """The effective priority that a sequence keeps while it runs, if it is admitted `now`."""
        return self._aged(sequence.request.priority, now - sequence.request.arrival)

    def makes_way_for(self, running: Sequence, waiting: Sequence) -> bool:
        """Whether a running sequence is pushed out so that a more important one can run: once in its life at most."""
        return self._by_priority and not running.made_way and waiting.request.priority < running.kept_priority

    def victim(self, running: Iterable[Sequence], cost: Callable[[Sequence], Cost]) -> Sequence:
        """Who is preempted when blocks run out: the last in order, or the cheapest of the least important ones.

        The first in order is never the cheapest, so it always gets to its end.
        """
        first, *others = sorted(running, key=rank)
        if not self._cheapest_victim or not others:
            return others[-1] if others else first
        # By what clients asked for: with their ages, each would be a class of its own.
        least = max(sequence.request.priority for sequence in others) if self._by_priority else 0
        candidates = [s for s in others if not self._by_priority or s.request.priority == least]

        def cheapness(sequence: Sequence) -> tuple[float, int]:
            freed, recomputed = cost(sequence)
            return (freed / max(recomputed, 1), -recomputed)

        # Of equally cheap ones the last in order, which max() finds first in the reversed list.
        return max(reversed(candidates), key=cheapness)

    def _aged(self, priority: int, wait: float) -> float:
        if not self._by_priority:
            return 0.0
        return priority - wait / self._ageing_s if self._ageing_s else float(priority)


def rank(running: Sequence) -> tuple[float, float, int, int]:
    """Sorts running sequences, the most important first."""
    return (running.kept_priority, *_age_key(running))


def _age_key(sequence: Sequence) -> tuple[float, int, int]:
    return (sequence.request.arrival, sequence.request.serial, sequence.index)
