"""Finds the stop string that ends an output.

Matching is on text, so a stop string may begin and end inside tokens. The match that completes first wins; of two that
complete at the same character, the one listed first.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string and where it lies: characters from the start of the output, `end` excluded."""

    stop: str
    start: int
    end: int


class StopStringMatcher:
    """Searches an output that arrives in pieces; each character is looked at a bounded number of times."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: at least one, none empty; ValueError otherwise, since requests are checked before."""
        if not stops or not all(stops):
            raise ValueError(f"stop strings must be non-empty, and at least one; got {list(stops)!r}")
        self._stops = [(stop, len(stop)) for stop in stops]
        # A match in a new piece starts at most this many characters before the piece.
        self.reach = max(map(len, stops)) - 1
        self._window = ""  # the last `reach` characters that came
        self._num_seen = 0

    def push(self, piece: str, *, may_stop: bool = True) -> StopMatch | None:
        """Takes the next piece; the first match that completes inside it, or None.

        With `may_stop=False` nothing completes inside this piece, but a match may begin in it.
        """
        old = len(self._window)
        text = self._window + piece
        best: StopMatch | None = None
        for stop, length in self._stops if may_stop else ():
            # No earlier start: such a match would complete in the window, which has been searched.
            start = text.find(stop, old - length + 1 if old >= length else 0)
            if start >= 0:
                end = start + length + self._num_seen - old
                if best is None or end < best.end:
                    best = StopMatch(stop, end - length, end)
        self._num_seen += len(piece)
        self._window = text[-self.reach :] if self.reach else ""
        return best
