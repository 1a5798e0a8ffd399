"""Messages on their way from the engine's thread to one stream's writer: bounded, with one wake-up a burst."""

import asyncio
import threading
from collections import deque

from headrace.core_api.v1 import engine_core_pb2 as pb


class Outbox:
    """Filled by any thread, emptied by one task of the event loop that created it.

    A gateway that does not read lets it grow; past `max_bytes` it takes no more, and `overflowed` is set.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._messages: deque[tuple[int, pb.ConnectResponse]] = deque()  # with their sizes
        self._bytes = 0
        self._lock = threading.Lock()
        self._closed = False
        self.overflowed = asyncio.Event()

    def offer(self, message: pb.ConnectResponse) -> None:
        """Adds a message; drops it if the outbox has overflowed or its stream has ended."""
        if self._closed:
            return
        size = message.ByteSize()
        with self._lock:
            fits = self._bytes + size <= self._max_bytes
            if fits:
                self._bytes += size
                self._messages.append((size, message))
        if not fits:
            self._wake(self.overflowed)
            self.close()
            return
        # Cleared by the loop only while there is nothing to take, so this may wake it once too often, never too seldom.
        if not self._ready.is_set():
            self._wake(self._ready)

    def close(self) -> None:
        """The stream has ended: nothing is kept any more."""
        self._closed = True
        self._messages.clear()

    async def take(self, timeout_s: float) -> pb.ConnectResponse | None:
        """The next message; None if there is none within `timeout_s`."""
        if not self._messages:
            self._ready.clear()
            if not self._messages:  # else it came between the two lines
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._ready.wait()
                except TimeoutError:
                    return None
        if not self._messages:
            return None
        with self._lock:
            size, message = self._messages.popleft()
            self._bytes -= size
        return message

    def _wake(self, event: asyncio.Event) -> None:
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:  # the event loop has ended, and with it the stream
            self.close()
