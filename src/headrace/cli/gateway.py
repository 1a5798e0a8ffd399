"""`headrace gateway`."""

import argparse
from collections.abc import Callable

from headrace.cli.service_process import add_parent_argument, run_service
from headrace.cli.side_config import add_side_arguments
from headrace.gateway.config import GatewayConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the gateway's settings."""
    add_side_arguments(parser, GatewayConfig)
    add_parent_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until told to stop."""
    return run_service(GatewayConfig, arguments, lambda config: config.server.drain_grace, _load)


def _load() -> Callable[[GatewayConfig], int]:
    from headrace.gateway.main import run

    return run
