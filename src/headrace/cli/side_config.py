"""Settings of a side from parsed arguments and the process environment."""

import argparse
import importlib.util
import os
from typing import TypeVar

from headrace.common.config import Config, variables
from headrace.common.config_flags import add_flags, given_flags
from headrace.common.config_loader import load_config

ConfigType = TypeVar("ConfigType", bound=Config)


def add_side_arguments(parser: argparse.ArgumentParser, tree: type[Config]) -> None:
    """Adds --config and every flag of the tree."""
    add_config_file_argument(parser)
    add_flags(parser, tree)


def add_config_file_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --config."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with keys core and gateway [HEADRACE_CONFIG]")


def load_side(tree: type[ConfigType], arguments: argparse.Namespace) -> ConfigType:
    """The side's settings; ConfigError names every wrong one."""
    return load_config(
        tree,
        given_flags(arguments, tree),
        os.environ,
        config_file=arguments.config,
        foreign_variables=installed_variables(),
    )


def installed_sides() -> tuple[type[Config], ...]:
    """The settings of the sides that are installed here; an image holds only its own."""
    sides: list[type[Config]] = []
    if importlib.util.find_spec("headrace.core_service") is not None:
        from headrace.core_service.config import CoreConfig

        sides.append(CoreConfig)
    if importlib.util.find_spec("headrace.gateway") is not None:
        from headrace.gateway.config import GatewayConfig

        sides.append(GatewayConfig)
    return tuple(sides)


def installed_variables() -> frozenset[str]:
    """Variables of the installed sides, since one environment may serve both."""
    return frozenset().union(*(variables(side) for side in installed_sides()))
