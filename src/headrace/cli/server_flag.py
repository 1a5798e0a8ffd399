"""The --server flag of client commands."""

import argparse
import os

from headrace.common.addresses import parse_address

SERVER_VARIABLE = "HEADRACE_SERVER"
DEFAULT_SERVER = "127.0.0.1:50051"


def add_server_argument(parser: argparse.ArgumentParser, what: str = "gateway to talk to") -> None:
    """Adds --server; `what` says in the help what it may be."""
    parser.add_argument(
        "--server",
        type=_server,
        default=os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER,
        metavar="HOST:PORT",
        help=f"{what} [{SERVER_VARIABLE}; default {DEFAULT_SERVER}]",
    )


def _server(text: str) -> str:
    try:
        return str(parse_address(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
