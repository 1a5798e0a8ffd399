"""Deadlines and time limits of live requests, soonest first."""

from bisect import bisect_left, insort

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.request import Request

_Entry = tuple[float, int, "FinishReason.ValueType", Request]


class RequestTimers:
    """A sorted list, so that a request that ends early leaves nothing behind."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Starts the timers that the request has."""
        for entry in _entries(request):
            insort(self._entries, entry, key=_key)

    def remove(self, request: Request) -> None:
        """Stops them; does nothing for those that have gone off."""
        for entry in _entries(request):
            position = bisect_left(self._entries, _key(entry), key=_key)
            if position < len(self._entries) and self._entries[position] == entry:
                del self._entries[position]

    def expired(self, now: float) -> list[tuple[Request, "FinishReason.ValueType"]]:
        """Takes out and returns the requests whose time is over, with the reason to end them for."""
        count = bisect_left(self._entries, now, key=lambda entry: entry[0])
        over = [(request, reason) for _, _, reason, request in self._entries[:count]]
        del self._entries[:count]
        return over


def _entries(request: Request) -> list[_Entry]:
    entries: list[_Entry] = []
    if request.time_limit is not None:
        entries.append((request.time_limit, id(request), FinishReason.FINISH_REASON_TIME_LIMIT, request))
    if request.deadline is not None:
        entries.append((request.deadline, id(request), FinishReason.FINISH_REASON_DEADLINE, request))
    return entries


def _key(entry: _Entry) -> tuple[float, int, int]:
    return entry[:3]
