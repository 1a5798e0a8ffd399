"""Paged KV memory: who holds which block.

Block 0 is the null block: it is never handed out, so that padded block tables may point at it. A block is in one of
three states:

    held       reference count > 0; several sequences may share it
    cached     reference count 0, in the free queue, its content still findable in the prefix cache
    empty      reference count 0, in the free queue

Freeing goes from a sequence's last block to its first. Empty blocks go to the front of the queue and cached ones to the
back, so cached content is evicted last, oldest first, and the end of a prefix before its beginning.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from headrace.common.block_hashes import BlockKeys
from headrace.core_service.free_blocks import FreeBlockQueue
from headrace.core_service.prefix_cache import ROOT, PrefixCache, PrefixListener


class BlockManager:
    """Hands out blocks 1 to num_blocks - 1. No torch: block ids only."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is never used); got {num_blocks}")
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._free = FreeBlockQueue(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._cache = PrefixCache(block_size)
        self.caching = enable_prefix_caching
        # Held since before the cache was last emptied: their content, which may be half written, is not shared again.
        self._not_shared: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def find_cached(self, tokens: bytes, num_tokens: int, keys: BlockKeys) -> tuple[list[int], int]:
        """The longest cached prefix (block ids and last prefix node); changes nothing.

        At most num_tokens - 1 tokens count, since the last one must be computed to get its logits.
        """
        if not self.caching:
            return [], ROOT
        return self._cache.match(tokens, (num_tokens - 1) // self.block_size, keys)

    def num_unshared(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, held once by the caller, nobody else holds."""
        return sum(1 for block in blocks if self._references[block] == 1)

    def allocate(self, num_new: int, shared: Sequence[int] = (), *, keep_free: int = 0) -> list[int] | None:
        """Takes a reference to each of `shared` and `num_new` fresh blocks; returns the fresh ones.

        Returns None, and changes nothing, if fewer than `keep_free` blocks would be left.
        """
        references = self._references
        revived = [block for block in shared if not references[block]]
        if num_new + keep_free > len(self._free) - len(revived):
            return None
        self._free.remove(revived)
        for block in shared:
            references[block] += 1
        fresh = self._free.take(num_new)
        for block in fresh:
            references[block] = 1
            self._cache.forget(block)
        if self._not_shared:
            self._not_shared.difference_update(fresh)
        return fresh

    def store(self, block: int, parent: int, extra: bytes, tokens: bytes) -> int | None:
        """Makes a full block findable by its tokens and extra keys; returns its prefix node, or None if it is not
        cached."""
        if not self.caching or block in self._not_shared:
            return None
        return self._cache.store(block, parent, tokens + extra)

    def free(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each block of a sequence (first to last). Raises ValueError on a block not
        held."""
        references, cache = self._references, self._cache
        cached, empty = [], []
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is not held")
            references[block] = left
            if not left:
                if block in cache:
                    cached.append(block)
                else:
                    empty.append(block)
        self._free.append(cached)
        self._free.prepend(empty)

    # -- the prefix cache as a whole -----------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Forgets all cached content; blocks in use stay with their holders but are not shared anew. Returns the
        count."""
        self._stop_sharing_held()
        return self._cache.clear()

    def set_weights_version(self, version: str) -> int:
        """The same, since the weights have changed: other weights start other hash chains. Returns the count."""
        self._stop_sharing_held()
        return self._cache.set_weights_version(version)

    def watch(self, listener: PrefixListener | None) -> None:
        """Tells `listener` what is cached now, and each change from now on; None ends that."""
        self._cache.watch(listener)

    def _stop_sharing_held(self) -> None:
        self._not_shared = {block for block, references in enumerate(self._references) if references}

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless the block lists of `holders` explain every reference, and all else is free."""
        expected = Counter(block for blocks in holders for block in blocks)
        for block in range(1, self.num_usable + 1):
            references = self._references[block]
            if references != expected[block]:
                raise RuntimeError(f"block {block} has {references} references, but {expected[block]} holders")
            if (references == 0) != (block in self._free):
                raise RuntimeError(f"block {block} with {references} references is on the wrong side of the free queue")
            if block in self._not_shared and block in self._cache:
                raise RuntimeError(f"block {block} is shared although it was held when the cache was emptied")
        if expected[0] or self._references[0] or 0 in self._free:
            raise RuntimeError("the null block is in use")
        if sum(1 for _ in self._free) != len(self._free):
            raise RuntimeError("the free queue's length is wrong")
        self._cache.check_integrity()
