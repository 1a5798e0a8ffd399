"""WatchKvEvents: the prefix cache's changes for everybody who reads them."""

import asyncio
import contextlib
from collections.abc import Iterator

from headrace.common.errors import EngineDeadError, Overloaded, RequestError
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.engine import Engine
from headrace.core_service.kv_event_feed import KvEventFeed
from headrace.core_service.kv_event_reader import KvEventReader

MAX_READERS = 64


class KvEvents:
    """Attaches a feed to the engine while somebody reads. Lives on one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._feed: KvEventFeed | None = None
        self._ended_by: RequestError | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator["KvEventStream"]:
        """A new reader's stream. Raises Overloaded if there are too many, and what `end` was given after that."""
        if self._ended_by is not None:
            raise self._ended_by
        feed = self._feed or self._attach()
        if len(feed.readers) >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} readers watch this core's KV events already, which is the limit")
        reader = KvEventReader()
        feed.add_reader(reader)
        try:
            yield KvEventStream(self, feed, reader)
        finally:
            feed.readers.discard(reader)
            if not feed.readers:
                self._detach()

    @property
    def ended_by(self) -> RequestError | None:
        """Why all streams end, if they do."""
        return self._ended_by

    def end(self, error: RequestError) -> None:
        """Ends every stream with a status."""
        self._ended_by = error
        self._wake_readers()

    def tell_tree(self, feed: KvEventFeed) -> None:
        """Lets the engine tell the whole tree, and each change from then on."""
        self._engine.watch_prefix_cache(feed)

    def _attach(self) -> KvEventFeed:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it every reader
                loop.call_soon_threadsafe(self._wake_readers)

        feed = KvEventFeed(wake)
        self.tell_tree(feed)
        self._feed = feed
        return feed

    def _detach(self) -> None:
        self._feed = None
        with contextlib.suppress(EngineDeadError):  # then it tells nothing any more
            self._engine.watch_prefix_cache(None)

    def _wake_readers(self) -> None:
        for reader in self._feed.readers if self._feed is not None else ():
            reader.news.set()


class KvEventStream:
    """One reader's messages, in order."""

    def __init__(self, events: KvEvents, feed: KvEventFeed, reader: KvEventReader) -> None:
        self._events = events
        self._feed = feed
        self._reader = reader

    async def next_message(self) -> pb.WatchKvEventsResponse:
        """Waits for the next message; the first one starts a snapshot. Raises what `KvEvents.end` was given."""
        while True:
            if self._events.ended_by is not None:
                raise self._events.ended_by
            self._reader.news.clear()
            if self._feed.ask_for_tree():
                self._events.tell_tree(self._feed)
            # Whoever reads does the hashing, for all readers.
            while not self._reader.is_full and self._feed.hash_some():
                await asyncio.sleep(0)
            message = self._reader.take_message()
            if message is not None:
                return message
            await self._reader.news.wait()
