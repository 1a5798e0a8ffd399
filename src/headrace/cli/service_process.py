"""What the two service commands share: start-up in the right order, and an end together with the process that asked."""

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.cli.side_config import load_side
from headrace.common.addresses import Address, is_port_taken
from headrace.common.config import Config, with_flag_names
from headrace.common.errors import ConfigError, StartupError

ConfigType = TypeVar("ConfigType", bound=Config)
_SLACK_S = 15.0


def add_parent_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the hidden flag by which `headrace up` makes sure that no child outlives it."""
    parser.add_argument("--parent-pipe", type=int, metavar="FD", help=argparse.SUPPRESS)


def run_service(
    tree: type[ConfigType],
    arguments: argparse.Namespace,
    drain_grace: Callable[[ConfigType], float],
    address: Callable[[ConfigType], Address],
    load: Callable[[], Callable[[ConfigType], int]],
) -> int:
    """Reads the settings, imports the service and runs it; returns its exit code.

    `drain_grace` (seconds) and `address` pick settings out of the tree; `load` imports the service's `run`.
    StartupError if the port is taken, or what the service needs is not installed.
    """
    config = load_side(tree, arguments)
    if arguments.parent_pipe is not None:
        end_with_parent(arguments.parent_pipe, drain_grace(config))
    check_free(f"the {tree.side}", address(config), "--port")
    try:
        run = load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "headrace":
            raise
        raise StartupError(
            f"the Python package {error.name} is missing; install headrace with its extra: "
            f"pip install 'headrace[{tree.side}]'"
        ) from error
    try:
        return run(config)
    except ConfigError as error:
        raise ConfigError(with_flag_names(tree, error.problems)) from error


def check_free(name: str, address: Address, flag: str) -> None:
    """StartupError if something listens at the service's address, or it is not ours; `flag` chooses another port."""
    try:
        taken = address.port != 0 and is_port_taken(address)
    except OSError as error:
        raise StartupError(f"{name} cannot listen on {address}: {error}") from error
    if taken:
        raise StartupError(
            f"{name}'s port {address.port} on {address.host} is taken; choose another with {flag}, 0 is any free one"
        )


def end_with_parent(pipe: int, drain_grace_s: float) -> None:
    """Ends this process when the other end of the pipe closes: the kernel does that however the parent dies.

    First as SIGTERM would, then, if that takes longer than the grace and some slack, at once.
    """

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain_grace_s + _SLACK_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
