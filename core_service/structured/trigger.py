"""Waits for a sequence of ids in an output, after which a grammar takes hold."""


class Trigger:
    """Follows one output. An empty sequence has been seen from the start."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._ids = ids
        self._matched = 0  # ids of the sequence that the output ends with
        self._fallback = _fallbacks(ids)

    @property
    def seen(self) -> bool:
        """True once the whole sequence has come."""
        return self._matched == len(self._ids)

    def push(self, token: int) -> None:
        """Takes the next token; must not be called once the sequence has been seen."""
        while self._matched and self._ids[self._matched] != token:
            self._matched = self._fallback[self._matched - 1]
        if self._ids[self._matched] == token:
            self._matched += 1


def _fallbacks(ids: tuple[int, ...]) -> list[int]:
    """For each beginning of the sequence, the length of the longest shorter beginning that it ends with (Knuth, Morris
    and Pratt, Fast pattern matching in strings, 1977)."""
    fallback = [0] * len(ids)
    length = 0
    for end in range(1, len(ids)):
        while length and ids[end] != ids[length]:
            length = fallback[length - 1]
        if ids[end] == ids[length]:
            length += 1
        fallback[end] = length
    return fallback
