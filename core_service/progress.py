"""Health is progress: a core with work that finishes no step is not healthy, however alive its process is."""

from collections import deque
from collections.abc import Callable

STALL_FLOOR_S = 5.0
STALL_FACTOR = 4.0
# A step may take this long for each token before it counts as hung, since the first long prompt has no slower step
# before it to compare with: 20 s for 2,048 tokens, which a busy laptop needs.
STALL_S_PER_TOKEN = 0.01
_RECENT_STEPS = 64


class ProgressWatch:
    """Written by the engine's thread, read by any: each attribute is assigned whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending_since: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._slowest = 0.0
        self._tokens = 0  # of the step under way

    def set_pending(self, pending: bool) -> None:
        """Says whether there is work now."""
        if not pending:
            self._pending_since = None
        elif self._pending_since is None:
            self._pending_since = self._clock()

    def step_started(self, num_tokens: int) -> None:
        """A step with so many tokens begins."""
        self._tokens = num_tokens

    def step_finished(self) -> None:
        """A step ended: what is pending now has waited since this moment."""
        now = self._clock()
        if self._pending_since is not None:
            self._recent.append(now - self._pending_since)
            self._slowest = max(self._recent)
        self._pending_since = now

    @property
    def oldest_pending_s(self) -> float | None:
        """Seconds since the last step, or since work came; None without work."""
        since = self._pending_since
        return None if since is None else self._clock() - since

    @property
    def healthy(self) -> bool:
        """False once nothing has finished for 5 s, four times the slowest recent step, or 10 ms a token of this step,
        whichever is longest.
        """
        pending = self.oldest_pending_s
        allowed = max(STALL_FLOOR_S, STALL_FACTOR * self._slowest, STALL_S_PER_TOKEN * self._tokens)
        return pending is None or pending < allowed
