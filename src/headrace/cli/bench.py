"""`headrace bench`: measures a running gateway (`serve`), or what this machine's host side costs (`host`)."""

import argparse

from headrace.cli import bench_host, bench_serve

_KINDS = {
    "serve": ("many requests at once, as clients of a gateway see them", bench_serve),
    "host": ("what a step costs besides the model, on this machine", bench_host),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the kinds of benchmark and their flags."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, (summary, module) in _KINDS.items():
        module.add_arguments(kinds.add_parser(kind, help=summary, description=summary, allow_abbrev=False))


def run(arguments: argparse.Namespace) -> int:
    """Measures; returns the exit code."""
    code: int = _KINDS[arguments.kind][1].run(arguments)
    return code
