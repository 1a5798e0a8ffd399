"""Slots: the small integers that stand for completions on one stream to one core.

A slot is taken when a request is sent and may be taken again only after its terminal row arrived, so that late tokens
of one completion never reach another.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.common.errors import Overloaded
from headrace.gateway.core_client import CompletionSink

MAX_SLOTS = 1_048_576


class Occupant(NamedTuple):
    """Who holds a slot."""

    internal_id: str
    sink: CompletionSink


class SlotTable:
    """Slots 0 to `max_slots` - 1 of one stream. Freed slots are taken again first, so the table stays small."""

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._occupants: list[Occupant | None] = []
        self._free: list[int] = []

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return len(self._occupants) - len(self._free)

    def allocate(self, internal_id: str, sinks: Sequence[CompletionSink]) -> list[int]:
        """One slot per sink. Raises Overloaded, with nothing taken, if there are not enough."""
        if self.num_live + len(sinks) > self._max_slots:
            raise Overloaded(f"all {self._max_slots} slots of the core's stream are in use")
        slots = []
        for sink in sinks:
            if self._free:
                slot = self._free.pop()
            else:
                slot = len(self._occupants)
                self._occupants.append(None)
            self._occupants[slot] = Occupant(internal_id, sink)
            slots.append(slot)
        return slots

    def release(self, slot: int) -> None:
        """Frees a slot after its terminal row. Raises KeyError if it is free."""
        self.occupant(slot)
        self._occupants[slot] = None
        self._free.append(slot)

    def occupant(self, slot: int) -> Occupant:
        """Who holds the slot. Raises KeyError if it is free."""
        found = self._occupants[slot] if slot < len(self._occupants) else None
        if found is None:
            raise KeyError(f"slot {slot} is not in use")
        return found

    def holds(self, slot: int, internal_id: str) -> bool:
        """True if the slot still stands for this request."""
        found = self._occupants[slot] if slot < len(self._occupants) else None
        return found is not None and found.internal_id == internal_id

    def snapshot(self) -> "SlotTable":
        """A copy that later changes do not touch, for rows that arrive after their slots may have moved on."""
        copy = SlotTable(self._max_slots)
        copy._occupants = list(self._occupants)
        copy._free = list(self._free)
        return copy

    def clear(self) -> list[CompletionSink]:
        """Frees everything, for a stream that is gone; returns the sinks that were waiting."""
        sinks = [occupant.sink for occupant in self._occupants if occupant is not None]
        self._occupants.clear()
        self._free.clear()
        return sinks
