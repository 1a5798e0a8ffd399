"""A core without a model, for tests and demonstrations of the gateway: it speaks the contract over real gRPC.

The next token is a function of the last one (or comes from a script), so every output is known beforehand. Slots,
aborts, terminal rows, blobs, heartbeats and load behave as a real core's do, and a breach of the slot law by the
gateway is recorded.
"""

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.errors import FailedPrecondition, InvalidRequest, NotFound, Unavailable, Unimplemented, Violation
from headrace.common.grpc_server import add_standard_services, bind, create_server
from headrace.common.params_wire import duration, seconds
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_api.v1.engine_core_pb2_grpc import (
    EngineCoreServiceServicer,
    add_EngineCoreServiceServicer_to_server,
)
from headrace.gateway.fake_stream import FakeBehaviour, FakeStream

CHUNK_BYTES = 64 * 1024
__all__ = ["FakeBehaviour", "FakeCore", "fake_core_info", "serve_fake_core"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["EngineCoreService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class FakeCore(EngineCoreServiceServicer):
    """The servicer. It remembers what came in (`requests`, `aborted` internal ids) and what broke the slot law."""

    def __init__(self, files: TokenizerFiles, info: pb.CoreInfo, behaviour: FakeBehaviour) -> None:
        self.files = files
        self.info = info
        self.behaviour = behaviour
        self.requests: list[pb.EngineCoreRequest] = []
        self.hellos: list[pb.Hello] = []
        self.aborted: list[str] = []
        self.tokenizer_fetches = 0
        self.breaches: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.streams: list[FakeStream] = []
        self.draining = False

    @property
    def stats(self) -> pb.SchedulerStats:
        """Load over all streams; each live completion holds the blocks of its tokens."""
        live = [completion for stream in self.streams for completion in stream.live.values()]
        used = sum(-(-(len(one.request.prompt_token_ids) + len(one.output)) // self.info.block_size) for one in live)
        return pb.SchedulerStats(running=len(live), free_blocks=self.info.num_blocks - used)

    async def Connect(self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Context) -> None:  # type: ignore[override]
        """Hello, Welcome, then requests in and steps out until either side ends it."""
        hello = (await anext(request_iterator)).hello
        if self.behaviour.loading:
            raise Unavailable("the fake core is still loading")
        self.hellos.append(hello)
        if hello.tokenizer_digest and hello.tokenizer_digest != self.info.tokenizer_digest:
            raise FailedPrecondition(f"tokenizer digest is {self.info.tokenizer_digest}", reason="TOKENIZER_MISMATCH")
        await context.write(pb.ConnectResponse(welcome=pb.Welcome(info=self.info)))
        stream = FakeStream(self, context)
        self.streams.append(stream)
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            await stream.write()
        finally:
            reader.cancel()
            self.streams.remove(stream)

    async def GetCoreInfo(self, request: pb.GetCoreInfoRequest, context: Context) -> pb.GetCoreInfoResponse:
        """The facts given."""
        return pb.GetCoreInfoResponse(info=self.info)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Load now."""
        return pb.GetLoadResponse(stats=self.stats, healthy=self.behaviour.healthy, draining=self.draining)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """The files in pieces."""
        self.tokenizer_fetches += 1
        for name, contents in self.files.files.items():
            for start in range(0, max(len(contents), 1), CHUNK_BYTES):
                last = start + CHUNK_BYTES >= len(contents)
                yield pb.GetTokenizerResponse(
                    file_name=name,
                    data=contents[start : start + CHUNK_BYTES],
                    sha256=hashlib.sha256(contents).hexdigest() if last else "",
                )

    async def PutBlob(self, request_iterator: AsyncIterator[pb.PutBlobRequest], context: Context) -> pb.PutBlobResponse:
        """Keeps a payload for ever."""
        pieces = [piece async for piece in request_iterator]
        payload = b"".join(piece.data for piece in pieces)
        digest = hashlib.sha256(payload).hexdigest()
        if digest != pieces[0].digest or len(payload) != pieces[0].size_bytes:
            raise InvalidRequest([Violation("digest", "is not that of the bytes")])
        existed = digest in self.blobs
        self.blobs[digest] = payload
        return pb.PutBlobResponse(existed=existed)

    async def GetBlob(self, request: pb.GetBlobRequest, context: Context) -> AsyncIterator[pb.GetBlobResponse]:
        """A payload in pieces."""
        if request.digest not in self.blobs:
            raise NotFound(f"no blob {request.digest}")
        payload = self.blobs[request.digest]
        for start in range(0, len(payload), CHUNK_BYTES):
            yield pb.GetBlobResponse(data=payload[start : start + CHUNK_BYTES])

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Starts draining; does not wait."""
        self.drain(seconds(request.grace))
        return pb.DrainResponse()

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        """There is no cache."""
        return pb.FlushPrefixCacheResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """There are no weights."""
        raise Unimplemented("a fake core has no weights")

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """There are no weights."""
        raise Unimplemented("a fake core has no weights")

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:
        """There are no weights."""
        raise Unimplemented("a fake core has no weights")

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        """There are no weights."""
        raise Unimplemented("a fake core has no weights")

    async def WakeUp(self, request: pb.WakeUpRequest, context: Context) -> pb.WakeUpResponse:
        """There are no weights."""
        raise Unimplemented("a fake core has no weights")

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        """There is no cache, so there is one empty snapshot."""
        yield pb.WatchKvEventsResponse(cleared=True)

    def drain(self, grace_s: float) -> None:
        """Tells every gateway that the core is going away."""
        self.draining = True
        for stream in self.streams:
            stream.send(pb.ConnectResponse(draining=pb.Draining(grace=duration(grace_s))))

    def break_streams(self) -> None:
        """Ends every stream with UNAVAILABLE, as a dying core does."""
        for stream in self.streams:
            stream.broken.set()

    def put(self, payload: bytes) -> str:
        """Keeps a payload of the core's own; returns its digest."""
        digest = hashlib.sha256(payload).hexdigest()
        self.blobs[digest] = payload
        return digest


def fake_core_info(files: TokenizerFiles, model: str = "fake", **changes: Any) -> pb.CoreInfo:
    """Facts of a small core that uses this tokenizer."""
    facts: dict[str, Any] = {
        "contract_version": CONTRACT_VERSION,
        "core_version": "0.0",
        "instance_id": uuid.uuid4().hex,
        "model": model,
        "tokenizer_digest": files.digest,
        "template_digest": files.template_digest,
        "numerics_id": "fake-numerics",
        "block_size": 16,
        "num_blocks": 1000,
        "max_model_len": 512,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "vocab_size": files.build_tokenizer().get_vocab_size(),
        "max_logprobs": 20,
        "eos_token_ids": files.eos_token_ids,
        "tasks": ["generate"],
    }
    return pb.CoreInfo(**(facts | changes))


@contextlib.asynccontextmanager
async def serve_fake_core(core: FakeCore, port: int = 0) -> AsyncIterator[str]:
    """Serves on loopback and gives the address; leaving ends all streams at once, as a killed process would."""
    server = create_server(max_receive_bytes=4 << 20)
    add_EngineCoreServiceServicer_to_server(core, server)
    health = add_standard_services(server, [SERVICE_NAME])
    await health.start()
    bound = await bind(server, "127.0.0.1", port)
    await server.start()
    await health.set_serving(True)
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)
