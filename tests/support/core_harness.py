"""The real core service with the fake runner, in this process over real gRPC, and what a gateway says to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.grpc_server import bind, create_server
from headrace.common.params import ModelLimits
from headrace.common.v1.params_pb2 import SamplingParams
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_api.v1 import engine_core_pb2_grpc as pb_grpc
from headrace.core_service.admission import AdmissionLimits
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.engine import Engine
from headrace.core_service.fakes import FakeRunner
from headrace.core_service.gateway_stream import StreamEnvironment
from headrace.core_service.main import MAX_RECEIVE_BYTES
from headrace.core_service.scheduler import Scheduler
from headrace.core_service.service import CoreService

VOCAB, BLOCK, NUM_BLOCKS = 1000, 16, 64
PATIENCE_S = 20


class Core:
    """A core service on a free port, with a stub for it. Blocks and rows are checked whenever it is idle."""

    def __init__(self, step_time_s: float, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks + 1, BLOCK)
        scheduler = Scheduler(self.blocks, SchedulerConfig(64, 256))
        limits = AdmissionLimits(ModelLimits(VOCAB, 200_000, 20), max_kv_tokens=num_blocks * BLOCK)
        self.blobs = BlobStore(4 << 20)
        runner = FakeRunner(VOCAB, BLOCK, step_time_s)
        self.engine = Engine(scheduler, runner, limits, self.blobs, check_when_idle=True)
        self.info = pb.CoreInfo(contract_version=CONTRACT_VERSION, model="fake", tokenizer_digest="digest")
        self.service = CoreService()
        self.opened = False

    async def start(self) -> None:
        """Binds and serves; every call is UNAVAILABLE until `open`."""
        self.server = create_server(MAX_RECEIVE_BYTES)
        pb_grpc.add_EngineCoreServiceServicer_to_server(self.service, self.server)
        port = await bind(self.server, "127.0.0.1", 0)
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub: Any = pb_grpc.EngineCoreServiceStub(self.channel)

    def open(self) -> None:
        """Starts the engine."""
        self.engine.start(on_death=lambda: None)
        self.service.open(StreamEnvironment(self.engine, self.blobs, self.info), drain_grace_s=5.0)
        self.opened = True

    async def connect(self, **hello: Any) -> Any:
        """A gateway's stream, whose Hello has been written."""
        call = self.stub.Connect()
        hello = {"contract_version": CONTRACT_VERSION, "gateway_epoch": "test", **hello}
        await call.write(pb.ConnectRequest(hello=pb.Hello(**hello)))
        return call

    async def welcomed(self, **hello: Any) -> Any:
        """The same, and it was welcomed."""
        call = await self.connect(**hello)
        assert (await call.read()).WhichOneof("message") == "welcome"
        return call

    async def stop(self) -> None:
        """Ends everything. Fails if the engine has died, as it does where an idle check finds a fault."""
        await self.channel.close()
        await self.server.stop(1)
        if self.opened:
            await asyncio.wrap_future(self.engine.check_integrity())
            assert await asyncio.to_thread(self.engine.stop)


@contextlib.asynccontextmanager
async def running_core(
    step_time_s: float = 0.0, *, num_blocks: int = NUM_BLOCKS, opened: bool = True
) -> AsyncIterator[Core]:
    """A core with `num_blocks` usable blocks of 16 tokens; stopped and checked at the end."""
    core = Core(step_time_s, num_blocks)
    await core.start()
    if opened:
        core.open()
    try:
        yield core
    finally:
        await core.stop()


def add(*requests: pb.EngineCoreRequest) -> pb.ConnectRequest:
    """New requests, as one message."""
    return pb.ConnectRequest(add=pb.AddRequests(requests=requests))


def request(slot: int, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 3) -> pb.EngineCoreRequest:
    """A greedy request with one completion."""
    return pb.EngineCoreRequest(
        internal_id=f"r{slot}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
        children=[pb.Child(slot=slot)],
    )


async def read_until_finished(call: Any, *slots: int) -> tuple[dict[int, list[int]], dict[int, pb.Finished]]:
    """Tokens and terminal rows by slot, once all of `slots` have ended."""
    tokens: dict[int, list[int]] = {}
    finished: dict[int, pb.Finished] = {}
    async with asyncio.timeout(PATIENCE_S):
        while not all(slot in finished for slot in slots):
            message = await call.read()
            assert message is not grpc.aio.EOF, await call.details()
            for slot, token in zip(message.step.slots, message.step.token_ids, strict=True):
                tokens.setdefault(slot, []).append(token)
            finished.update({record.slot: record for record in message.step.finished})
    return tokens, finished


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and details with which a stream ends."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return await call.code(), await call.details()
