"""`headrace gateway`."""

import argparse
from collections.abc import Callable

from headrace.cli.service_process import add_parent_argument, run_service
from headrace.cli.side_config import add_side_arguments
from headrace.common.addresses import Address
from headrace.gateway.config import GatewayConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the gateway's settings."""
    add_side_arguments(parser, GatewayConfig)
    add_parent_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until told to stop."""
    return run_service(
        GatewayConfig,
        arguments,
        drain_grace=lambda config: config.server.drain_grace,
        address=lambda config: Address(config.server.host, config.server.port),
        load=_load,
    )


def _load() -> Callable[[GatewayConfig], int]:
    from headrace.gateway.main import run

    return run
