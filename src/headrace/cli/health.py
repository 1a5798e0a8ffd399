"""`headrace health`: does a server serve?"""

import argparse

from headrace.cli.server_flag import add_server_argument
from headrace.client import Client
from headrace.common.errors import NotFound, RequestError, Unimplemented
from headrace.gateway_api.v1 import models_pb2

_DEFAULT_TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds server flags."""
    add_server_argument(parser, "gateway or core to ask")
    parser.add_argument("--service", default="", metavar="NAME", help="one service of the server (default: all of it)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"most seconds to wait for the answer [default {_DEFAULT_TIMEOUT_S:g}]",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the state, and that of each core if the server is a gateway; 0 exactly if it is SERVING."""
    with Client(arguments.server) as client:
        try:
            state = client.health(arguments.service, timeout_s=arguments.timeout)
        except NotFound:
            print(f"NOT_FOUND {arguments.server}: it has no service {arguments.service}")
            return 1
        except RequestError as error:
            reason = error.message.removeprefix(f"cannot reach {arguments.server}: ")
            print(f"UNREACHABLE {arguments.server}: {reason}")
            return 1
        print(f"{state} {arguments.server}")
        try:
            load = client.get_load()
        except Unimplemented:  # a core: it has no public services
            load = models_pb2.GetLoadResponse()
        except RequestError as error:
            print(f"  load unknown: {error.message}")
            load = models_pb2.GetLoadResponse()
    for core in load.cores:
        core_state = models_pb2.CoreState.Name(core.state).removeprefix("CORE_STATE_")
        print(
            f"  core {core.address} {core_state} running={core.running} waiting={core.waiting} "
            f"free_blocks={core.free_blocks}/{core.num_blocks}"
        )
    return 0 if state == "SERVING" else 1
