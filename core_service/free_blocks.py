"""Queue of free KV blocks: constant time a block at both ends and in the middle.

A block whose content is cached stays in the queue until it is handed out; a cache hit takes it out of the middle. So
this is a doubly linked list over block ids, kept in two plain lists (no object per block, no allocation after
construction). Blocks come and go by the sequence, so every method takes several at once.
"""

from collections.abc import Collection, Iterator

_NOT_FREE = -1


class FreeBlockQueue:
    """Free blocks in the order in which they will be reused."""

    def __init__(self, block_ids: range) -> None:
        size = block_ids.stop + 1
        self._end = block_ids.stop  # a sentinel: its neighbours are the last and the first block
        self._next = [_NOT_FREE] * size
        self._previous = [_NOT_FREE] * size  # stale while a block is not free
        self._next[self._end] = self._previous[self._end] = self._end
        self._length = 0
        self.append(block_ids)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _NOT_FREE

    def append(self, blocks: Collection[int]) -> None:
        """Puts blocks at the end, the last one to be reused last. Raises ValueError if one is free already."""
        following, previous, end = self._next, self._previous, self._end
        last = previous[end]
        for block in blocks:
            if following[block] != _NOT_FREE:
                raise ValueError(f"block {block} is free already")
            following[last] = block
            following[block] = end
            previous[block] = last
            last = block
        previous[end] = last
        self._length += len(blocks)

    def prepend(self, blocks: Collection[int]) -> None:
        """Puts one block after the other at the front: the last one is reused first. Raises ValueError as `append`."""
        following, previous, end = self._next, self._previous, self._end
        first = following[end]
        for block in blocks:
            if following[block] != _NOT_FREE:
                raise ValueError(f"block {block} is free already")
            previous[first] = block
            following[block] = first
            previous[block] = end
            first = block
        following[end] = first
        self._length += len(blocks)

    def take(self, count: int) -> list[int]:
        """Takes blocks from the front. Raises IndexError, and takes none, if there are fewer."""
        if count > self._length:
            raise IndexError(f"{count} blocks wanted, {self._length} are free")
        following, end = self._next, self._end
        block = following[end]
        taken = []
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = _NOT_FREE
            block = after
        following[end] = block
        self._previous[block] = end
        self._length -= count
        return taken

    def remove(self, blocks: Collection[int]) -> None:
        """Takes blocks out, wherever they are. Raises ValueError if one is not free."""
        following, previous = self._next, self._previous
        for block in blocks:
            after = following[block]
            if after == _NOT_FREE:
                raise ValueError(f"block {block} is not free")
            before = previous[block]
            following[before] = after
            previous[after] = before
            following[block] = _NOT_FREE
        self._length -= len(blocks)
