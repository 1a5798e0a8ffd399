"""The gateway put together: services, cores, health, and the way down."""

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from headrace.common.errors import Unavailable
from headrace.common.grpc_server import add_standard_services, bind, create_server
from headrace.common.model_files import Wanted, resolve_model
from headrace.common.tokenizer_files import load_tokenizer_files
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.admin_service import AdminService
from headrace.gateway.config import GatewayConfig
from headrace.gateway.generation_service import GenerationService, OutputLimits
from headrace.gateway.input_processor import InputProcessor
from headrace.gateway.live_requests import LiveRequests
from headrace.gateway.model_catalog import ModelCatalog, fetch_tokenizer_files
from headrace.gateway.model_service import ModelService
from headrace.gateway.remote_core import Expectations, RemoteCore
from headrace.gateway.router import Router
from headrace.gateway.text_tools import TextTools
from headrace.gateway_api.v1 import admin_pb2, generation_pb2, models_pb2
from headrace.gateway_api.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from headrace.gateway_api.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from headrace.gateway_api.v1.models_pb2_grpc import add_ModelServiceServicer_to_server

SERVICE_NAMES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (generation_pb2, "GenerationService"),
        (models_pb2, "ModelService"),
        (admin_pb2, "AdminService"),
    )
)
# A core that falls silent sends no event, so readiness is looked at this often too.
HEALTH_PERIOD_S = 0.25
CLOSING_GRACE_S = 1.0

log = structlog.get_logger(__name__)


class GatewayServer:
    """`start`, then `run` until told otherwise, then `drain`, then `close`."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._epoch = uuid.uuid4().hex
        self._core_changed = asyncio.Event()
        self._pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._models = ModelCatalog(config.limits.max_message_bytes)
        self._cores = [
            RemoteCore(address, self._expectations, self._prepare, self._admit, self._update, self._core_changed.set)
            for address in config.cores
        ]
        self._router = Router(self._cores)
        self._live = LiveRequests(config.limits.max_live_requests)
        self._server = create_server(config.limits.max_message_bytes)
        self._health = add_standard_services(self._server, SERVICE_NAMES)
        inputs = InputProcessor(self._pool, self._epoch)
        limits = OutputLimits(config.limits.slow_reader_timeout, config.limits.max_unsent_bytes)
        add_GenerationServiceServicer_to_server(
            GenerationService(self._models, inputs, self._router, self._live, limits), self._server
        )
        add_ModelServiceServicer_to_server(
            ModelService(self._models, self._router, self._live, config.limits.max_message_bytes), self._server
        )
        add_AdminServiceServicer_to_server(AdminService(), self._server)

    async def start(self) -> int:
        """Alive and listening, not ready; returns the port. Raises StartupError if the port is taken."""
        port = await bind(self._server, self._config.server.host, self._config.server.port)
        await self._health.start()
        await self._server.start()
        return port

    async def run(self) -> None:
        """Keeps the cores connected and health true. Raises StartupError if the configured tokenizer is no good."""
        if self._config.tokenizer is not None:
            self._models.use_tools(await asyncio.to_thread(_load_tools, self._config))
        async with asyncio.TaskGroup() as tasks:
            for core in self._cores:
                tasks.create_task(core.run(), name=f"core {core.address}")
            tasks.create_task(self._watch_health(), name="health")

    async def drain(self) -> None:
        """NOT_SERVING, no new requests, and what runs may end within the grace; health answers all the while."""
        grace_s = self._config.server.drain_grace
        log.info("draining", live_requests=len(self._live), grace_s=grace_s)
        self._live.drain()
        await self._health.shut_down()
        if not await self._live.wait_until_none(grace_s):
            log.warning("grace is over", live_requests=len(self._live))
            self._live.fail_all(Unavailable("the gateway is shutting down", reason="DRAINING"))
            await self._live.wait_until_none(CLOSING_GRACE_S)

    async def close(self) -> None:
        """Cuts off what is left; `run` must have ended."""
        await self._server.stop(CLOSING_GRACE_S)
        for core in self._cores:
            await core.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._models.close()

    async def _watch_health(self) -> None:
        while True:
            await self._health.set_serving(self._router.has_serving_core())
            self._core_changed.clear()
            try:
                async with asyncio.timeout(HEALTH_PERIOD_S):
                    await self._core_changed.wait()
            except TimeoutError:
                continue

    def _expectations(self) -> Expectations:
        return Expectations(self._epoch, self._models.name, self._models.tokenizer_digest)

    async def _prepare(self, core: RemoteCore) -> None:
        await self._models.prefetch(lambda: fetch_tokenizer_files(core.bulk))

    async def _admit(self, core: RemoteCore, info: core_pb.CoreInfo) -> None:
        await self._models.admit(core.address, info, lambda: fetch_tokenizer_files(core.bulk))

    def _update(self, core: RemoteCore, info: core_pb.CoreInfo) -> None:
        self._models.update(core.address, info)


def _load_tools(config: GatewayConfig) -> TextTools:
    files = resolve_model(config.tokenizer or "", config.tokenizer_revision, Wanted.TOKENIZER)
    return TextTools.from_files(load_tokenizer_files(Path(files.path)))
