"""`headrace up`: a core and a gateway as two child processes of this one, on this machine."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.cli.pair import Child, Pair
from headrace.cli.service_process import check_free
from headrace.cli.side_config import add_config_file_argument, installed_variables
from headrace.common.addresses import Address, free_port
from headrace.common.config import leaves
from headrace.common.config_flags import add_flags, flag_texts, given_flags
from headrace.common.config_loader import load_config
from headrace.common.errors import ConfigError, StartupError
from headrace.common.model_files import default_model_name
from headrace.core_service.config import CoreConfig
from headrace.gateway.config import GatewayConfig

CORE_HOST = "127.0.0.1"
CORE_PORT_VARIABLE = "HEADRACE_CORE_PORT"
_GATEWAY_OWN = {"host", "port"}  # settings of both sides that in this command are the gateway's


@dataclass(frozen=True, slots=True)
class _Plan:
    """The two services that will run, and the flags that make them so."""

    core: CoreConfig
    core_flags: dict[str, Any]
    core_address: Address
    gateway: GatewayConfig
    gateway_flags: dict[str, Any]
    gateway_address: Address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of both sides; one that both have is set for both, but host and port for the gateway."""
    add_config_file_argument(parser)
    core_port = next(leaf for leaf in leaves(CoreConfig) if leaf.dotted == "server.port")
    parser.add_argument(
        "--core-port",
        metavar="N",
        help=f"port of the core; 0 is any free one [{CORE_PORT_VARIABLE}; default {core_port.default}]",
    )
    add_flags(parser, CoreConfig, skip=_GATEWAY_OWN)
    shared = {leaf.name for leaf in leaves(CoreConfig)} - _GATEWAY_OWN
    add_flags(parser, GatewayConfig, skip={"core", *shared})


def run(arguments: argparse.Namespace) -> int:
    """Prints one line `ready ...` once both serve; Ctrl-C and SIGTERM drain both. 1 if one of them ends by itself."""
    plan = _plan(arguments, os.environ)
    check_free("the core", plan.core_address, "--core-port")
    check_free("the gateway", plan.gateway_address, "--port")
    file_words = [f"--config={arguments.config}"] if arguments.config else []
    pair = Pair(
        core=Child(
            "core",
            _command("core", *file_words, *flag_texts(plan.core_flags, CoreConfig)),
            plan.core_address,
            plan.core.server.drain_grace,
        ),
        gateway=Child(
            "gateway",
            _command("gateway", *file_words, *flag_texts(plan.gateway_flags, GatewayConfig)),
            _reachable(plan.gateway_address),
            plan.gateway.server.drain_grace,
        ),
    )
    model = plan.core.model.served_model_name or default_model_name(plan.core.model.model)
    return asyncio.run(_supervise(pair, f"ready gateway={plan.gateway_address} core={plan.core_address} model={model}"))


async def _supervise(pair: Pair, ready_line: str) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, pair.request_stop)
    failure = await pair.run(on_ready=lambda: print(ready_line, flush=True))
    if failure is not None:
        print(f"headrace up: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


def _plan(arguments: argparse.Namespace, environment: Mapping[str, str]) -> _Plan:
    """The settings of both sides, with ports chosen; one ConfigError names what is wrong with either."""
    problems: list[str] = []
    core: CoreConfig | None = None
    gateway: GatewayConfig | None = None
    foreign = installed_variables()

    core_flags = {name: value for name, value in given_flags(arguments, CoreConfig).items() if name not in _GATEWAY_OWN}
    core_flags["host"] = CORE_HOST
    if wanted_port := arguments.core_port or environment.get(CORE_PORT_VARIABLE):
        core_flags["port"] = wanted_port
    core_environment = {
        name: value for name, value in environment.items() if name not in ("HEADRACE_HOST", "HEADRACE_PORT")
    }
    try:
        core = load_config(
            CoreConfig, core_flags, core_environment, config_file=arguments.config, foreign_variables=foreign
        )
    except ConfigError as error:
        problems += [problem.replace("--port:", "--core-port:", 1) for problem in error.problems]
    core_port = core.server.port if core else 0
    core_flags["port"] = str(core_port or free_port(CORE_HOST))
    core_address = Address(CORE_HOST, int(core_flags["port"]))

    gateway_flags = {**given_flags(arguments, GatewayConfig), "core": str(core_address)}
    try:
        gateway = load_config(
            GatewayConfig, gateway_flags, environment, config_file=arguments.config, foreign_variables=foreign
        )
    except ConfigError as error:
        problems += error.problems
    if core is None or gateway is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    gateway_port = gateway.server.port
    while gateway_port in (0, core_address.port):
        gateway_port = _free_port("gateway", gateway.server.host)
    gateway_flags["port"] = str(gateway_port)
    return _Plan(core, core_flags, core_address, gateway, gateway_flags, Address(gateway.server.host, gateway_port))


def _free_port(name: str, host: str) -> int:
    try:
        return free_port(host)
    except OSError as error:
        raise StartupError(f"the {name} cannot listen on {host}: {error}") from error


def _reachable(address: Address) -> Address:
    """Where this process reaches a server that may listen on every interface."""
    return Address(CORE_HOST, address.port) if address.host in ("0.0.0.0", "::") else address


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace.cli.main", *words]
