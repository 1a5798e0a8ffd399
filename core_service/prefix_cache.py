"""Which block contents are cached, as a tree of prefixes.

A node stands for one full block of tokens after one exact prefix: it is found by (parent node, the block's content),
where content is the token bytes and the extra keys. Contents are compared in full, so unlike with a hash chain two
different prefixes can never share a node, and no hash is computed: looking up a cached block costs one dictionary
access. docs/decisions/0002-block-identity.md has the measurements.

Node ids are never used twice. A node lives as long as some block holds its content; equal content that was computed
twice sits in two blocks of one node.
"""

from dataclasses import dataclass, field
from typing import Protocol

from headrace.common.block_hashes import BlockKeys, root_hash

ROOT = 0  # id of the node that is the parent of every first block


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A cached block content. `id`, `parent` and `content` never change, so any thread may read them."""

    id: int
    parent: int
    content: bytes
    blocks: tuple[int, ...] = ()
    children: dict[bytes, "PrefixNode"] = field(default_factory=dict)


class PrefixListener(Protocol):
    """Is told each change of the tree, on the thread that makes it."""

    def tree_is(self, root: bytes, nodes: list[PrefixNode]) -> None:
        """From now on the tree is this, parents before children; `root` is the hash that its chains start with."""
        ...

    def node_stored(self, node: PrefixNode) -> None:
        """A node came into being; its parent is there."""
        ...

    def node_removed(self, node: PrefixNode) -> None:
        """The last block of a node is gone; it has no children."""
        ...

    def check_integrity(self, nodes: list[PrefixNode]) -> None:
        """Raises RuntimeError unless what the listener was told adds up to this tree."""
        ...


class PrefixCache:
    """Maps prefixes to blocks. Knows nothing of reference counts: the block manager owns those."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = PrefixNode(ROOT, ROOT, b"")
        self._root_hash = root_hash("")
        self._nodes: dict[int, PrefixNode] = {ROOT: self._root}
        self._node_of_block: dict[int, PrefixNode] = {}
        self._next_id = ROOT + 1
        self._listener: PrefixListener | None = None

    def __contains__(self, block: int) -> bool:
        return block in self._node_of_block

    def match(self, tokens: bytes, max_blocks: int, keys: BlockKeys) -> tuple[list[int], int]:
        """Blocks that hold the longest cached prefix of `tokens` (int32 ids), at most `max_blocks`, and its last
        node."""
        blocks: list[int] = []
        node = self._root
        for content in keys.contents(tokens, self._block_size, max_blocks):
            child = node.children.get(content)
            if child is None:
                break
            node = child
            blocks.append(node.blocks[0])
        return blocks, node.id

    def store(self, block: int, parent: int, content: bytes) -> int | None:
        """Notes that `block` now holds `content` after the prefix `parent`; returns the node.

        Returns None if the prefix is not in the tree any more: what hangs on it could not be found.
        """
        parent_node = self._nodes.get(parent)
        if parent_node is None:
            return None
        node = parent_node.children.get(content)
        if node is None:
            node = PrefixNode(self._next_id, parent, content)
            self._next_id += 1
            self._nodes[node.id] = parent_node.children[content] = node
            if self._listener is not None:
                self._listener.node_stored(node)
        node.blocks += (block,)
        self._node_of_block[block] = node
        return node.id

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten. Does nothing if it was not cached."""
        node = self._node_of_block.pop(block, None)
        if node is None:
            return
        if len(node.blocks) > 1:
            node.blocks = tuple(other for other in node.blocks if other != block)
            return
        del self._nodes[node.id]
        del self._nodes[node.parent].children[node.content]
        if self._listener is not None:
            self._listener.node_removed(node)

    def clear(self) -> int:
        """Forgets everything; returns the number of blocks forgotten."""
        count = len(self._node_of_block)
        self._root = PrefixNode(ROOT, ROOT, b"")
        self._nodes = {ROOT: self._root}
        self._node_of_block = {}
        self._tell_all()
        return count

    def set_weights_version(self, version: str) -> int:
        """Forgets everything, since it was computed with other weights; returns the number of blocks forgotten."""
        self._root_hash = root_hash(version)
        return self.clear()

    def watch(self, listener: PrefixListener | None) -> None:
        """Tells `listener` the tree as it is, and each change from now on; None ends that."""
        self._listener = listener
        self._tell_all()

    def check_integrity(self) -> None:
        """Raises RuntimeError if nodes, blocks and the listener disagree, or a node cannot be found from the root."""
        held = {block: node for node in self._nodes.values() for block in node.blocks}
        if held != self._node_of_block:
            raise RuntimeError("the prefix tree and its block index disagree")
        for node in self._all_nodes():
            if not node.blocks or len(set(node.blocks)) != len(node.blocks):
                raise RuntimeError(f"prefix node {node.id} has the blocks {node.blocks}")
            parent = self._nodes.get(node.parent)
            if parent is None or parent.children.get(node.content) is not node:
                raise RuntimeError(f"prefix node {node.id} cannot be found from the root")
        if sum(len(node.children) for node in self._nodes.values()) != len(self._nodes) - 1:
            raise RuntimeError("a prefix node that is gone can still be found")
        if self._listener is not None:
            self._listener.check_integrity(self._all_nodes())

    def _tell_all(self) -> None:
        if self._listener is not None:
            self._listener.tree_is(self._root_hash, self._all_nodes())

    def _all_nodes(self) -> list[PrefixNode]:
        """Parents before children, since a node is younger than its parent."""
        nodes = list(self._nodes.values())
        return nodes[1:]
