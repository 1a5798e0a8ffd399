"""The core process: bind, load, warm up, serve, drain."""

import asyncio
import gc
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from headrace.common.errors import InternalError, Unavailable
from headrace.common.grpc_server import Health, add_standard_services, bind, create_server
from headrace.common.logging import configure_logging
from headrace.core_api.v1 import engine_core_pb2_grpc as pb_grpc
from headrace.core_service.config import CoreConfig
from headrace.core_service.gateway_stream import StreamEnvironment
from headrace.core_service.loading import LoadedCore, find_model, load_core
from headrace.core_service.service import CoreService

SERVICE_NAME = "headrace.core_api.v1.EngineCoreService"
MAX_RECEIVE_BYTES = 1 << 20  # messages of the stream are under 256 KiB, and so are the pieces of blobs
_HEALTH_PERIOD_S = 0.25
_LAST_WRITES_S = 2.0

T = TypeVar("T")

log = structlog.get_logger(__name__)


def run(config: CoreConfig) -> int:
    """Serves until SIGTERM or SIGINT, then drains; returns the exit code. Raises StartupError if it cannot start."""
    configure_logging("core", config.logging)
    return asyncio.run(_serve(config))


async def _serve(config: CoreConfig) -> int:
    server = create_server(MAX_RECEIVE_BYTES)
    service = CoreService()
    pb_grpc.add_EngineCoreServiceServicer_to_server(service, server)
    health = add_standard_services(server, [SERVICE_NAME])
    port = await bind(server, config.server.host, config.server.port)
    stop = _stop_signals()
    await health.start()
    await server.start()
    try:
        loading = asyncio.create_task(_load(config, service))
        await asyncio.wait({loading, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log.info("stopped while loading")
            return 0
        return await _serve_loaded(config, await loading, port, service, health, stop)
    finally:
        await health.shut_down()
        await server.stop(_LAST_WRITES_S)


async def _load(config: CoreConfig, service: CoreService) -> LoadedCore:
    files, tokenizer = await _in_daemon_thread(lambda: find_model(config))
    service.offer_tokenizer(tokenizer)
    return await _in_daemon_thread(lambda: load_core(config, files, tokenizer))


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Unlike a pool's thread, one that the process need not wait for when it is told to stop while loading."""
    future: Future[T] = Future()

    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="loading", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _serve_loaded(
    config: CoreConfig, core: LoadedCore, port: int, service: CoreService, health: Health, stop: asyncio.Event
) -> int:
    loop = asyncio.get_running_loop()

    def on_death() -> None:
        loop.call_soon_threadsafe(stop.set)

    core.engine.start(on_death)
    service.open(StreamEnvironment(core.engine, core.blobs, core.info), config.server.drain_grace)
    # What is loaded now lives as long as the process: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    log.info(
        "serving",
        host=config.server.host,
        port=port,
        model=core.info.model,
        dtype=core.info.dtype,
        kv_blocks=core.info.num_blocks,
        max_model_len=core.info.max_model_len,
        numerics_id=core.info.numerics_id,
    )
    while not stop.is_set():
        await health.set_serving(core.engine.healthy and not service.draining)
        try:
            async with asyncio.timeout(_HEALTH_PERIOD_S):
                await stop.wait()
        except TimeoutError:
            continue
    await health.set_serving(False)
    if not core.engine.alive:
        log.error("the engine has died")
        service.end_streams(InternalError("the core's engine has died", reason="ENGINE_DEAD"))
        return 1
    await service.drain(config.server.drain_grace)
    service.end_streams(Unavailable("the core is going away", reason="DRAINING"))
    await service.wait_for_streams(_LAST_WRITES_S)
    if not await asyncio.to_thread(core.engine.stop):
        log.error("a step has not ended; leaving it behind")
        return 1
    log.info("stopped")
    return 0


def _stop_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            loop.remove_signal_handler(number)
            signal.raise_signal(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
