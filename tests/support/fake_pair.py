"""The real gateway before the real core engine with the fake runner, all in this process over real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway_harness import VOCAB_SIZE, Gateway, model_files, running_gateway, serving

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.grpc_server import bind, create_server
from headrace.common.params import ModelLimits
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_api.v1.engine_core_pb2_grpc import add_EngineCoreServiceServicer_to_server
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

BLOCK = 16


@dataclass
class FakePair:
    """A gateway and the engine behind it."""

    gateway: Gateway
    engine: Engine
    runner: FakeRunner


@contextlib.asynccontextmanager
async def running_fake_pair(
    num_blocks: int = 65, max_model_len: int = 512, step_time_s: float = 0.0, **gateway_limits: int
) -> AsyncIterator[FakePair]:
    """Serves a model that draws the next byte; blocks and rows are checked at the end."""
    files = model_files()
    scheduler = Scheduler(BlockManager(num_blocks, BLOCK), SchedulerConfig(16, 128))
    limits = AdmissionLimits(
        ModelLimits(VOCAB_SIZE, max_model_len, 20), (num_blocks - 1) * BLOCK, max_waiting_requests=256
    )
    blobs = BlobStore(8 << 20)
    runner = FakeRunner(VOCAB_SIZE, BLOCK, step_time_s)
    engine = Engine(scheduler, runner, limits, blobs, check_when_idle=True)
    info = pb.CoreInfo(
        contract_version=CONTRACT_VERSION,
        model="fake",
        tokenizer_digest=files.digest,
        template_digest=files.template_digest,
        numerics_id="fake",
        block_size=BLOCK,
        num_blocks=num_blocks - 1,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        max_logprobs=20,
        eos_token_ids=files.eos_token_ids,
        tasks=["generate"],
    )
    service = CoreService()
    service.offer_tokenizer(files)
    server = create_server(MAX_RECEIVE_BYTES)
    add_EngineCoreServiceServicer_to_server(service, server)
    port = await bind(server, "127.0.0.1", 0)
    await server.start()
    engine.start(on_death=lambda: None)
    service.open(StreamEnvironment(engine, blobs, info), drain_grace_s=5.0)
    try:
        async with running_gateway(f"127.0.0.1:{port}", **gateway_limits) as gateway:
            await serving(gateway.client)
            yield FakePair(gateway, engine, runner)
    finally:
        await server.stop(1)
        await asyncio.wrap_future(engine.check_integrity())
        await asyncio.to_thread(engine.stop)
