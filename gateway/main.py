"""The gateway process: from its settings to its exit code."""

import asyncio
import signal

import structlog

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.logging import configure_logging
from headrace.gateway.config import GatewayConfig
from headrace.gateway.server import GatewayServer
from headrace.gateway.version import GATEWAY_VERSION

log = structlog.get_logger(__name__)


def run(config: GatewayConfig) -> int:
    """Serves until SIGTERM or SIGINT, drains, and returns the exit code. Raises StartupError if it cannot serve."""
    configure_logging("gateway", config.logging)
    asyncio.run(_serve(config))
    return 0


async def _serve(config: GatewayConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = GatewayServer(config)
    port = await server.start()
    log.info(
        "gateway listening", host=config.server.host, port=port, version=GATEWAY_VERSION, contract=CONTRACT_VERSION
    )
    work = asyncio.create_task(server.run(), name="gateway")
    stopping = asyncio.create_task(stop.wait(), name="signals")
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await server.drain()
    finally:
        stopping.cancel()
        work.cancel()
        await asyncio.wait({work, stopping})
        await server.close()
    if not work.cancelled():
        work.result()  # it ends only by a fault: StartupError, or one of ours
    log.info("gateway stopped")
