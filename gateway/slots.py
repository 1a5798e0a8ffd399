"""Slots: the small integers that stand for completions on one stream to one core.

A slot is taken when a request is sent and may be taken again only after its terminal row arrived, so that late tokens
of one completion never reach another.
"""

from collections.abc import Sequence
from typing import cast

from headrace.common.errors import Overloaded
from headrace.gateway.core_client import CompletionSink

MAX_SLOTS = 1_048_576


class SlotTable:
    """Slots 0 to `max_slots` - 1 of one stream. Freed slots are taken again first, so the table stays small."""

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._sinks: list[CompletionSink | None] = []  # by slot; None where it is free
        self._internal_ids: list[str] = []  # by slot; of whoever had it last
        self._free: list[int] = []

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return len(self._sinks) - len(self._free)

    def allocate(self, internal_id: str, sinks: Sequence[CompletionSink]) -> list[int]:
        """One slot per sink. Raises Overloaded, with nothing taken, if there are not enough."""
        if self.num_live + len(sinks) > self._max_slots:
            raise Overloaded(f"all {self._max_slots} slots of the core's stream are in use")
        slots = []
        for sink in sinks:
            if self._free:
                slot = self._free.pop()
            else:
                slot = len(self._sinks)
                self._sinks.append(None)
                self._internal_ids.append("")
            self._sinks[slot], self._internal_ids[slot] = sink, internal_id
            slots.append(slot)
        return slots

    def release(self, slot: int) -> CompletionSink:
        """Frees a slot after its terminal row; returns who held it. Raises KeyError if it is free."""
        (sink,) = self.sinks([slot])
        self._sinks[slot] = None
        self._free.append(slot)
        return sink

    def sinks(self, slots: Sequence[int]) -> list[CompletionSink]:
        """Who holds each of the slots. Raises KeyError if one of them is free."""
        known = self._sinks
        try:
            found = [known[slot] for slot in slots]
        except IndexError:
            found = [None]
        if None in found:
            free = next(slot for slot in slots if slot >= len(known) or known[slot] is None)
            raise KeyError(f"slot {free} is not in use")
        return cast("list[CompletionSink]", found)

    def holds(self, slot: int, internal_id: str) -> bool:
        """True if the slot still stands for this request."""
        in_use = slot < len(self._sinks) and self._sinks[slot] is not None
        return in_use and self._internal_ids[slot] == internal_id

    def snapshot(self) -> "SlotTable":
        """A copy that later changes do not touch, for rows that arrive after their slots may have moved on."""
        copy = SlotTable(self._max_slots)
        copy._sinks = list(self._sinks)
        copy._internal_ids = list(self._internal_ids)
        copy._free = list(self._free)
        return copy

    def clear(self) -> list[CompletionSink]:
        """Frees everything, for a stream that is gone; returns the sinks that were waiting."""
        sinks = [sink for sink in self._sinks if sink is not None]
        self._sinks.clear()
        self._internal_ids.clear()
        self._free.clear()
        return sinks
