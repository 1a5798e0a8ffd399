"""What one reader of KV events has not been told yet.

Changes that it has not read are merged: a hash that came and went, or went and came back, is not told at all. So what
waits for a reader is never more than what is present, and what it must forget; if that grows too long it is told to
forget everything, and what is present after that.
"""

import asyncio
from collections.abc import Collection, Iterable
from itertools import islice

from headrace.common.block_hashes import wire_hashes
from headrace.core_api.v1 import engine_core_pb2 as pb

MAX_HASHES = 16_384  # in each list of a message


class KvEventReader:
    """Lives on the event loop; `news` is set when there is something to do for it."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._root = b""
        self._restarts = False  # the next message says: forget everything
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def restart(self, root: bytes, digests: Iterable[bytes]) -> None:
        """From now on exactly `digests` are present, in chains that start with `root`."""
        self._root = root
        self._restarts = True
        self._stored = dict.fromkeys(digests)
        self._removed = {}
        self.news.set()

    def change(self, changes: Iterable[tuple[bool, bytes]], present: Collection[bytes]) -> None:
        """Merges (stored, digest) in their order; `present` is what is there after them."""
        for stored, digest in changes:
            added, taken = (self._stored, self._removed) if stored else (self._removed, self._stored)
            if digest in taken:
                del taken[digest]
            else:
                added[digest] = None
        if len(self._removed) > MAX_HASHES:
            self.restart(self._root, present)
        self.news.set()

    def take_message(self) -> pb.WatchKvEventsResponse | None:
        """The next message; None if there is nothing to tell."""
        if not (self._restarts or self._stored or self._removed):
            return None
        stored = list(islice(self._stored, MAX_HASHES))
        for digest in stored:
            del self._stored[digest]
        message = pb.WatchKvEventsResponse(
            cleared=self._restarts,
            root_hash=self._root if self._restarts else b"",
            stored=wire_hashes(stored),
            removed=wire_hashes(list(self._removed)),
        )
        self._restarts, self._removed = False, {}
        return message

    @property
    def is_full(self) -> bool:
        """True if there is enough to tell for a whole message."""
        return len(self._stored) >= MAX_HASHES
