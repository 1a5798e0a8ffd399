"""What the two service commands share: start-up in the right order, and an end together with the process that asked."""

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.cli.side_config import load_side
from headrace.common.config import Config
from headrace.common.errors import StartupError

ConfigType = TypeVar("ConfigType", bound=Config)
_SLACK_S = 15.0


def add_parent_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the hidden flag by which `headrace up` makes sure that no child outlives it."""
    parser.add_argument("--parent-pipe", type=int, metavar="FD", help=argparse.SUPPRESS)


def run_service(
    tree: type[ConfigType],
    arguments: argparse.Namespace,
    drain_grace: Callable[[ConfigType], float],
    load: Callable[[], Callable[[ConfigType], int]],
) -> int:
    """Reads the settings, imports the service and runs it; returns its exit code.

    `drain_grace` picks that setting (seconds) out of the tree; `load` imports the service's `run`.
    StartupError if what the service needs is not installed.
    """
    config = load_side(tree, arguments)
    if arguments.parent_pipe is not None:
        end_with_parent(arguments.parent_pipe, drain_grace(config))
    try:
        run = load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "headrace":
            raise
        raise StartupError(
            f"the Python package {error.name} is missing; install headrace with its extra: "
            f"pip install 'headrace[{tree.side}]'"
        ) from error
    return run(config)


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
