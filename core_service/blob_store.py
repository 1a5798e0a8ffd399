"""Payloads too big for the data path, by the SHA-256 of their bytes, in a bounded amount of memory.

Incoming blobs (long prompts) stay until the requests that name them have been read, outgoing ones (long
log-probabilities) until they are fetched; both go when they are older than `ttl_s`.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from headrace.common.errors import NotFound, Overloaded


class _Blob(NamedTuple):
    expires: float
    data: bytes
    puts: int  # how often it was put: equal payloads of different requests are one


class BlobStore:
    """Thread-safe: the engine thread and the service's event loop both use it."""

    def __init__(self, max_bytes: int, ttl_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._blobs: OrderedDict[str, _Blob] = OrderedDict()  # oldest first
        self._bytes = 0
        self._arriving = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            self._drop_expired()
            return digest in self._blobs

    @contextmanager
    def room_for(self, size: int) -> Iterator[None]:
        """Keeps room for a payload while it arrives. Raises Overloaded if there is none."""
        with self._lock:
            self._drop_expired()
            if self._bytes + self._arriving + size > self._max_bytes:
                raise Overloaded(
                    f"no room for a blob of {size} bytes: {self._bytes + self._arriving} of {self._max_bytes} bytes "
                    "are in use",
                    reason="BLOB_STORE_FULL",
                )
            self._arriving += size
        try:
            yield
        finally:
            with self._lock:
                self._arriving -= size

    def put(self, data: bytes) -> str:
        """Stores a payload and returns its digest; an equal one that is there already is kept longer and counts
        twice."""
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._drop_expired()
            old = self._blobs.pop(digest, None)
            if old is None:
                self._bytes += len(data)
            puts = 1 if old is None else old.puts + 1
            self._blobs[digest] = _Blob(self._clock() + self._ttl_s, data, puts)
            # The newest always stays; older ones make room.
            while self._bytes > self._max_bytes and len(self._blobs) > 1:
                self._drop_oldest()
        return digest

    def get(self, digest: str) -> bytes:
        """A payload. Raises NotFound if it is not, or no longer, here."""
        with self._lock:
            self._drop_expired()
            entry = self._blobs.get(digest)
        if entry is None:
            raise NotFound(f"no blob {digest}: it was never stored here, or its {self._ttl_s:g} s are over")
        return entry.data

    def discard(self, digest: str) -> None:
        """Forgets a payload, once for each time that it was put."""
        with self._lock:
            entry = self._blobs.get(digest)
            if entry is None:
                return
            if entry.puts > 1:
                self._blobs[digest] = entry._replace(puts=entry.puts - 1)
            else:
                del self._blobs[digest]
                self._bytes -= len(entry.data)

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._blobs and next(iter(self._blobs.values())).expires <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, blob = self._blobs.popitem(last=False)
        self._bytes -= len(blob.data)
