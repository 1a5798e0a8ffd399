"""Which block contents are cached, as a tree of prefixes.

A node stands for one full block of tokens after one exact prefix: its key is (parent node, extra key, the block's token
bytes). Keys are compared in full, so unlike with a hash chain two different prefixes can never share a node, and no
hash is computed: looking up a cached block costs one dictionary access. docs/decisions/0002-block-identity.md has the
measurements.

Node ids are never used twice. A node lives as long as some block holds its content; equal content that was computed
twice sits in two blocks of one node.
"""

from dataclasses import dataclass

from headrace.core_service.block_keys import BlockKeys, ExtraKey

ROOT = 0  # parent of every first block
BYTES_PER_TOKEN = 4  # token ids as int32

_Key = tuple[int, ExtraKey, bytes]


@dataclass(eq=False, slots=True)
class _Node:
    id: int
    key: _Key
    blocks: list[int]


class PrefixCache:
    """Maps prefixes to blocks. Knows nothing of reference counts: the block manager owns those."""

    def __init__(self, block_size: int) -> None:
        self._bytes_per_block = block_size * BYTES_PER_TOKEN
        self._nodes: dict[_Key, _Node] = {}
        self._node_of_block: dict[int, _Node] = {}
        self._next_id = ROOT + 1
        self._oldest_valid_id = ROOT + 1

    def __contains__(self, block: int) -> bool:
        return block in self._node_of_block

    def __len__(self) -> int:
        return len(self._node_of_block)

    def match(self, tokens: bytes, max_blocks: int, keys: BlockKeys) -> tuple[list[int], int]:
        """Blocks that hold the longest cached prefix of `tokens` (int32 ids), at most `max_blocks`, and its last
        node."""
        blocks: list[int] = []
        parent = ROOT
        size = self._bytes_per_block
        nodes = self._nodes
        for position in range(max_blocks):
            start = position * size
            node = nodes.get((parent, keys.of_block(position), tokens[start : start + size]))
            if node is None:
                break
            blocks.append(node.blocks[0])
            parent = node.id
        return blocks, parent

    def store(self, block: int, parent: int, extra: ExtraKey, tokens: bytes) -> int | None:
        """Notes that `block` now holds `tokens` after the prefix `parent`; returns the node.

        Returns None if the prefix was forgotten by `clear`: what hangs on it cannot be found any more.
        """
        if parent != ROOT and parent < self._oldest_valid_id:
            return None
        key = (parent, extra, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = _Node(self._next_id, key, [])
            self._next_id += 1
            self._nodes[key] = node
        node.blocks.append(block)
        self._node_of_block[block] = node
        return node.id

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten. Does nothing if it was not cached."""
        node = self._node_of_block.pop(block, None)
        if node is None:
            return
        node.blocks.remove(block)
        if not node.blocks:
            del self._nodes[node.key]

    def clear(self) -> int:
        """Forgets everything; returns the number of blocks forgotten."""
        count = len(self._node_of_block)
        self._nodes.clear()
        self._node_of_block.clear()
        self._oldest_valid_id = self._next_id
        return count

    def check_integrity(self) -> None:
        """Raises RuntimeError if nodes and blocks disagree."""
        held = {block: node for node in self._nodes.values() for block in node.blocks}
        if held != self._node_of_block:
            raise RuntimeError("the prefix tree and its block index disagree")
        if any(not node.blocks for node in self._nodes.values()):
            raise RuntimeError("a prefix node has no block")
