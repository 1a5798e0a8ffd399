"""Queue of free KV blocks: O(1) at both ends and in the middle.

A block whose content is cached stays in the queue until it is handed out; a cache hit takes it out of the middle. So
this is a doubly linked list over block ids, kept in two plain lists (no object per block, no allocation after
construction).
"""

from collections.abc import Iterator


class FreeBlockQueue:
    """Free blocks in the order in which they will be reused."""

    def __init__(self, block_ids: range) -> None:
        size = block_ids.stop + 1
        self._end = block_ids.stop  # a sentinel: its neighbours are the last and the first block
        self._next = [-1] * size
        self._previous = [-1] * size
        self._next[self._end] = self._previous[self._end] = self._end
        self._length = 0
        for block in block_ids:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def __contains__(self, block: int) -> bool:
        return self._next[block] != -1

    def append(self, block: int) -> None:
        """Puts a block at the end: reused last."""
        self._insert(block, self._previous[self._end], self._end)

    def prepend(self, block: int) -> None:
        """Puts a block at the front: reused first."""
        self._insert(block, self._end, self._next[self._end])

    def pop(self) -> int:
        """Takes the first block. Raises IndexError if there is none."""
        block = self._next[self._end]
        if block == self._end:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Takes a block out, wherever it is. Raises ValueError if it is not free."""
        after = self._next[block]
        if after == -1:
            raise ValueError(f"block {block} is not free")
        before = self._previous[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = -1
        self._length -= 1

    def _insert(self, block: int, before: int, after: int) -> None:
        if self._next[block] != -1:
            raise ValueError(f"block {block} is free already")
        self._next[block], self._previous[block] = after, before
        self._next[before] = self._previous[after] = block
        self._length += 1
