"""Moments at which live requests end unless something happens before; soonest first."""

from bisect import bisect_left, insort
from enum import IntEnum

from headrace.core_service.request import Request


class Timer(IntEnum):
    """What a moment means for its request."""

    DEADLINE = 1  # nobody waits for it any longer
    TIME_LIMIT = 2  # what there is will do
    QUEUE_LIMIT = 3  # it has waited too long without having been scheduled


_Entry = tuple[float, int, Timer, Request]


class RequestTimers:
    """A sorted list, so that a request that ends early leaves nothing behind."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next_at(self) -> float | None:
        """When the next one goes off; None if there is none."""
        return self._entries[0][0] if self._entries else None

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

    def expired(self, now: float) -> list[tuple[Request, Timer]]:
        """Takes out and returns the requests whose time is over, with what that means."""
        count = bisect_left(self._entries, now, key=lambda entry: entry[0])
        over = [(request, timer) for _, _, timer, request in self._entries[:count]]
        del self._entries[:count]
        return over


def _entries(request: Request) -> list[_Entry]:
    moments = (
        (request.deadline, Timer.DEADLINE),
        (request.time_limit, Timer.TIME_LIMIT),
        (request.queue_limit, Timer.QUEUE_LIMIT),
    )
    return [(at, id(request), timer, request) for at, timer in moments if at is not None]


def _key(entry: _Entry) -> tuple[float, int, int]:
    return entry[:3]
