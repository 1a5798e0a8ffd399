"""The `headrace` command: finds the subcommand, imports its module only, runs it.

Each module of this package that is a command has `add_arguments(parser)` and `run(arguments) -> exit code`.
"""

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import headrace
from headrace.common.errors import StartupError

COMMANDS = {
    "up": "start a core and a gateway on this machine",
    "core": "start a core (token ids in, token ids out)",
    "gateway": "start a gateway (text in, text out) in front of cores",
    "generate": "send one prompt and print what comes back",
    "chat": "talk to the model",
    "tokenize": "turn text into token ids, or ids into text",
    "health": "ask a server whether it serves",
    "bench": "measure a running gateway",
    "doctor": "show versions, devices, ports and the model cache",
}
# Their values are free text, which may begin with a dash.
TEXT_FLAGS = ("--text", "--token-ids", "--ids", "--stop", "--stop-token-ids", "--system")
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0 done, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an answer may hold characters that the terminal cannot show
            stream.reconfigure(errors="replace")
    name = next((word for word in arguments if not word.startswith("-")), None)
    try:
        module = importlib.import_module(f"headrace.cli.{name}") if name in COMMANDS else None
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing not in ("headrace.core_service", "headrace.gateway"):
            raise
        print(f"headrace {name}: this installation holds no {missing.partition('.')[2]}", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(prog="headrace", description=headrace.__doc__)
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, summary in COMMANDS.items():
        subparser = commands.add_parser(command, help=summary, description=summary, allow_abbrev=False)
        if module is not None and command == name:
            module.add_arguments(subparser)
    parsed = parser.parse_args(_joined_text_flags(arguments))
    if module is None:
        raise RuntimeError(f"command {parsed.command} has no module")
    try:
        code: int = module.run(parsed)
    except StartupError as error:
        print(f"headrace {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as in `headrace generate | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _joined_text_flags(words: list[str]) -> list[str]:
    """Writes `--text VALUE` as `--text=VALUE`, since argparse takes a separate value with a dash for a flag."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in TEXT_FLAGS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


if __name__ == "__main__":
    sys.exit(main())
