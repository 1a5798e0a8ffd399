"""EngineCoreService: the contract's calls, each a few lines over the engine."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from headrace.common.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    RequestError,
    Unavailable,
    Unimplemented,
    Violation,
)
from headrace.common.params_wire import seconds
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_api.v1 import engine_core_pb2_grpc as pb_grpc
from headrace.core_service.gateway_stream import GatewayStream, StreamEnvironment, read_hello
from headrace.core_service.kv_events import KvEvents

TOKENIZER_CHUNK_BYTES = 64 * 1024
BLOB_CHUNK_BYTES = 256 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
BLOB_ARRIVAL_S = 60.0  # the room of a blob is kept for no longer, whoever sends it
LAST_ROWS_S = 2.0  # for the step under way to end and its rows to be told
_IDLE_POLL_S = 0.02

log = structlog.get_logger(__name__)


class CoreService(pb_grpc.EngineCoreServiceServicer):
    """Answers UNAVAILABLE until `open` is called with a loaded engine."""

    def __init__(self) -> None:
        self._opened: StreamEnvironment | None = None
        self._kv_events: KvEvents | None = None
        self._tokenizer: TokenizerFiles | None = None
        self._drain_grace_s = 0.0
        self._draining = False
        self._streams: set[GatewayStream] = set()

    def offer_tokenizer(self, tokenizer: TokenizerFiles) -> None:
        """From now on GetTokenizer answers, while the weights may still be loading."""
        self._tokenizer = tokenizer

    def open(self, environment: StreamEnvironment, drain_grace_s: float) -> None:
        """From now on the service serves."""
        self._opened = environment
        self._kv_events = KvEvents(environment.engine)
        self._drain_grace_s = drain_grace_s

    # -- the data path -------------------------------------------------------------------------------------------------

    async def Connect(  # type: ignore[override]  # a coroutine that writes, where the stubs know generators only
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any
    ) -> None:
        """A gateway's stream of requests and step outputs."""
        # Read before anything is refused: a stream that ends while its first message is on the way loses its status.
        hello = await read_hello(request_iterator)
        environment = self._environment()
        if self._draining:
            raise Unavailable("this core is draining", reason="DRAINING")
        stream = GatewayStream(environment)
        self._streams.add(stream)
        try:
            await stream.run(hello, request_iterator, context)
        finally:
            self._streams.discard(stream)

    def end_streams(self, error: RequestError) -> None:
        """Ends every stream with a status, after what is still to be written."""
        for stream in self._streams:
            stream.end(error)
        if self._kv_events is not None:
            self._kv_events.end(error)

    async def wait_for_streams(self, timeout_s: float) -> None:
        """Returns when every stream has ended, or the time is over."""
        await self._wait_until(lambda: not self._streams, timeout_s)

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition() and loop.time() < deadline:
            await asyncio.sleep(_IDLE_POLL_S)

    # -- facts ---------------------------------------------------------------------------------------------------------

    async def GetCoreInfo(self, request: pb.GetCoreInfoRequest, context: Any) -> pb.GetCoreInfoResponse:
        """Resolved limits, versions and digests."""
        return pb.GetCoreInfoResponse(info=self._environment().info)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        """Load after the last step."""
        engine = self._environment().engine
        return pb.GetLoadResponse(stats=engine.load(), healthy=engine.healthy, draining=self._draining)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """The tokenizer's files, each in chunks, the last one with the file's digest."""
        if self._tokenizer is None:
            raise _loading()
        for name, data in sorted(self._tokenizer.files.items()):
            for start in range(0, max(len(data), 1), TOKENIZER_CHUNK_BYTES):
                end = start + TOKENIZER_CHUNK_BYTES
                digest = hashlib.sha256(data).hexdigest() if end >= len(data) else ""
                yield pb.GetTokenizerResponse(file_name=name, data=data[start:end], sha256=digest)

    # -- blobs ---------------------------------------------------------------------------------------------------------

    async def PutBlob(self, request_iterator: AsyncIterator[pb.PutBlobRequest], context: Any) -> pb.PutBlobResponse:
        """Stores one payload under the digest of its bytes."""
        blobs = self._environment().blobs
        first = await anext(request_iterator, None)
        if first is None or not _SHA256.fullmatch(first.digest):
            raise InvalidRequest([Violation("digest", "must be a SHA-256 in lower-case hex, with the first piece")])
        if first.digest in blobs:
            return pb.PutBlobResponse(existed=True)
        with blobs.room_for(first.size_bytes):
            try:
                async with asyncio.timeout(BLOB_ARRIVAL_S):
                    data = await _all_bytes(first, request_iterator)
            except TimeoutError:
                raise DeadlineExceeded(f"the blob did not arrive within {BLOB_ARRIVAL_S:g} s") from None
            if hashlib.sha256(data).hexdigest() != first.digest:
                raise DataLoss(f"{len(data)} bytes arrived that are not those of digest {first.digest}")
            blobs.put(bytes(data))
        return pb.PutBlobResponse(existed=False)

    async def GetBlob(self, request: pb.GetBlobRequest, context: Any) -> AsyncIterator[pb.GetBlobResponse]:
        """Reads one payload, once."""
        blobs = self._environment().blobs
        data = blobs.get(request.digest)
        for start in range(0, max(len(data), 1), BLOB_CHUNK_BYTES):
            yield pb.GetBlobResponse(data=data[start : start + BLOB_CHUNK_BYTES])
        blobs.discard(request.digest)

    # -- operations ----------------------------------------------------------------------------------------------------

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Takes the core out of service; returns when nothing is left, or the grace is over."""
        grace_s = seconds(request.grace) if request.HasField("grace") else self._drain_grace_s
        return await self.drain(grace_s)

    async def drain(self, grace_s: float) -> pb.DrainResponse:
        """Refuses new requests, tells the gateways, and waits for the live ones; what is left then is cut."""
        engine = self._environment().engine
        self._draining = True
        engine.refuse_new(Unavailable("this core is draining", reason="DRAINING"))
        live = engine.num_live
        log.info("draining", live_requests=live, grace_s=grace_s)
        for stream in self._streams:
            stream.drain(grace_s)
        await self._wait_until(lambda: not engine.num_live or not engine.alive, grace_s)
        left = engine.num_live
        if left and engine.alive:
            engine.abort_all("the core is going away and its grace is over")
            await self._wait_until(lambda: not engine.num_live or not engine.alive, LAST_ROWS_S)
        log.info("drained", finished=live - left, cut=left)
        return pb.DrainResponse(finished=max(live - left, 0), handed_over=left)

    @property
    def draining(self) -> bool:
        """True once it has been taken out of service."""
        return self._draining

    async def FlushPrefixCache(self, request: pb.FlushPrefixCacheRequest, context: Any) -> pb.FlushPrefixCacheResponse:
        """Forgets all cached prefixes."""
        blocks = await asyncio.wrap_future(self._environment().engine.reset_prefix_cache())
        return pb.FlushPrefixCacheResponse(blocks=blocks)

    async def WatchKvEvents(  # type: ignore[override]  # a coroutine that writes, where the stubs know generators only
        self, request: pb.WatchKvEventsRequest, context: Any
    ) -> None:
        """What the prefix cache holds, and each change of it from then on."""
        if self._kv_events is None:
            raise _loading()
        with self._kv_events.reading() as stream:
            while True:
                await context.write(await stream.next_message())

    # -- what this release does not have -------------------------------------------------------------------------------

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        """Refused: no adapters yet."""
        raise _unimplemented("LoadAdapter")

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        """Refused: no adapters yet."""
        raise _unimplemented("UnloadAdapter")

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Any) -> pb.UpdateWeightsResponse:
        """Refused: weights stay as loaded."""
        raise _unimplemented("UpdateWeights")

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Refused: memory stays allocated."""
        raise _unimplemented("Sleep")

    async def WakeUp(self, request: pb.WakeUpRequest, context: Any) -> pb.WakeUpResponse:
        """Refused: there is no Sleep."""
        raise _unimplemented("WakeUp")

    def _environment(self) -> StreamEnvironment:
        if self._opened is None:
            raise _loading()
        return self._opened


async def _all_bytes(first: pb.PutBlobRequest, rest: AsyncIterator[pb.PutBlobRequest]) -> bytearray:
    data = bytearray(first.data)
    while len(data) <= first.size_bytes:
        piece = await anext(rest, None)
        if piece is None:
            return data
        data += piece.data
    raise InvalidRequest([Violation("data", f"is longer than size_bytes = {first.size_bytes}")])


def _loading() -> Unavailable:
    return Unavailable("the model is still loading", reason="LOADING", retry_delay_s=0.5)


def _unimplemented(call: str) -> Unimplemented:
    return Unimplemented(f"EngineCoreService.{call} is not supported by this release", reason="CALL_NOT_SUPPORTED")
