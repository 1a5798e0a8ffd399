"""The requests that are being served now: at most one of each id, a bounded number in all, none new while draining."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.common.errors import AlreadyExists, Overloaded, RequestError, Unavailable
from headrace.gateway.request_stream import RequestStream


class LiveRequests:
    """`enter` around each request; draining is waited for with `wait_until_none`."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._streams: dict[str, RequestStream | None] = {}  # by request id; None until it has gone to a core
        self._draining = False
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def enter(self, request_id: str) -> Iterator[str]:
        """Holds the id (a fresh one if it is empty) for the life of a request.

        Raises AlreadyExists if a live request has it, Overloaded if there are too many, Unavailable while draining.
        """
        if self._draining:
            raise Unavailable("the gateway is shutting down", reason="DRAINING")
        if len(self._streams) >= self._max_requests:
            raise Overloaded(f"{self._max_requests} requests are live, which is this gateway's limit")
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._streams:
            raise AlreadyExists(f"a live request has the id {request_id!r}")
        self._streams[request_id] = None
        self._none_left.clear()
        try:
            yield request_id
        finally:
            del self._streams[request_id]
            if not self._streams:
                self._none_left.set()

    def attach(self, request_id: str, stream: RequestStream) -> None:
        """Lets `fail_all` reach the request."""
        self._streams[request_id] = stream

    def drain(self) -> None:
        """Takes no new requests from now on."""
        self._draining = True

    async def wait_until_none(self, timeout_s: float) -> bool:
        """True once none is left, False if that takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: RequestError) -> None:
        """Ends what is left."""
        for stream in self._streams.values():
            if stream is not None:
                stream.fail(error)
