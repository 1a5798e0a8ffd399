"""From the engine's thread, where the prefix tree changes, to the event loop, where changes are hashed for readers.

    engine's thread                           event loop
    tree_is, node_stored, node_removed ──▶ queue ──▶ hash_some ──▶ every reader

The engine only puts what changed into a queue, about a microsecond a block. Hashing takes longer, and that of a whole
tree (0.14 s for 100,000 blocks) longer than a step, so it is done in slices: neither the event loop nor, through the
interpreter's lock, the engine waits long for one (docs/log.md). Nobody watching, there is no feed.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from headrace.common.block_hashes import chained
from headrace.core_service.kv_event_reader import KvEventReader
from headrace.core_service.prefix_cache import ROOT, PrefixNode

SLICE = 512  # changes hashed at once: less than a millisecond
MAX_QUEUED = 65_536  # changes, besides those of a snapshot

_Change = PrefixNode | int  # stored, or the id of one that was removed


class KvEventFeed:
    """A prefix listener for the engine, and the present hashes for readers on one event loop."""

    def __init__(self, wake: Callable[[], None], *, max_queued: int = MAX_QUEUED) -> None:
        """`wake` is called on the engine's thread when there is something to hash, or the queue overflowed."""
        self.readers: set[KvEventReader] = set()
        self._wake = wake
        self._max_queued = max_queued
        self._lock = threading.Lock()
        # Under the lock.
        self._queue: deque[_Change] = deque()
        self._room = 0
        self._new_root: bytes | None = None  # the queue starts with a new tree, and its chains with this hash
        self._tree_number = 0
        self._lost = False
        self._asked = False  # for the tree, after the loss
        # Changed by the event loop, under the lock.
        self._root: bytes | None = None
        self._digests: dict[int, bytes] = {}  # by node

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def tree_is(self, root: bytes, nodes: list[PrefixNode]) -> None:
        """A new beginning: what was queued does not matter any more."""
        with self._lock:
            self._queue = deque(nodes)
            self._room = len(nodes) + self._max_queued
            self._new_root = root
            self._tree_number += 1
            self._lost = self._asked = False
        self._wake()

    def node_stored(self, node: PrefixNode) -> None:
        """Queues it."""
        self._put(node)

    def node_removed(self, node: PrefixNode) -> None:
        """Queues it."""
        self._put(node.id)

    def check_integrity(self, nodes: list[PrefixNode]) -> None:
        """Raises RuntimeError unless what is hashed and what is queued make up exactly these nodes."""
        with self._lock:
            if self._lost:
                return
            present = set() if self._new_root is not None else set(self._digests)
            for change in self._queue:
                if isinstance(change, int):
                    present.remove(change)
                else:
                    present.add(change.id)
        if present != {node.id for node in nodes}:
            raise RuntimeError("the KV event feed and the prefix tree disagree")

    def _put(self, change: _Change) -> None:
        with self._lock:
            if self._lost:
                return
            wake = not self._queue  # else it has been woken, and is not through yet
            self._queue.append(change)
            if len(self._queue) > self._room:
                self._queue.clear()
                self._new_root = None
                self._lost = wake = True
        if wake:
            self._wake()

    # -- the event loop ------------------------------------------------------------------------------------------------

    def ask_for_tree(self) -> bool:
        """True, once, if the queue has overflowed, so that the tree must be told anew."""
        with self._lock:
            ask = self._lost and not self._asked
            self._asked = self._lost
        return ask

    def add_reader(self, reader: KvEventReader) -> None:
        """Tells a reader all that is present, now or once it is known, and each change from then on."""
        self.readers.add(reader)
        if self._root is not None:
            reader.restart(self._root, self._digests.values())

    def hash_some(self) -> bool:
        """Hashes the next changes and tells the readers; False if there was nothing to do."""
        with self._lock:
            new_root, tree_number = self._new_root, self._tree_number
            changes = list(islice(self._queue, SLICE))
        if new_root is None and not changes:
            return False
        root = self._root if new_root is None else new_root
        assert root is not None, "a queue begins with a tree"
        hashed = _hashed(changes, root, self._digests if new_root is None else {})
        with self._lock:
            if self._lost or tree_number != self._tree_number:
                return True  # overtaken while hashing
            for _ in changes:
                self._queue.popleft()
            if new_root is not None:
                self._root, self._new_root, self._digests = new_root, None, {}
            stored_or_removed = self._commit(changes, hashed)
        for reader in self.readers:
            if new_root is not None:
                reader.restart(new_root, ())
            reader.change(stored_or_removed, self._digests.values())
        return True

    def _commit(self, changes: list[_Change], hashed: dict[int, bytes]) -> list[tuple[bool, bytes]]:
        """Notes the changes; returns them as (stored, digest), in order."""
        told = []
        for change in changes:
            if isinstance(change, int):
                told.append((False, self._digests.pop(change)))
            else:
                digest = self._digests[change.id] = hashed[change.id]
                told.append((True, digest))
        return told


def _hashed(changes: list[_Change], root: bytes, known: Mapping[int, bytes]) -> dict[int, bytes]:
    """The digests of the nodes stored by `changes`, by id; parents come first or are known."""
    digests: dict[int, bytes] = {}
    for node in changes:
        if not isinstance(node, int):
            parent = root if node.parent == ROOT else digests.get(node.parent) or known[node.parent]
            digests[node.id] = chained(parent, node.content)
    return digests
