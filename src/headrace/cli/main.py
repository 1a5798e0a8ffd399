"""The `headrace` command: finds the subcommand, imports its module only, runs it.

Each module of this package that is a command has `add_arguments(parser)` and `run(arguments) -> exit code`.
"""

import argparse
import contextlib
import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import headrace
from headrace.cli.side_config import installed_variables
from headrace.common.config_loader import unknown_variables
from headrace.common.errors import StartupError

COMMANDS = {
    "up": "start a core and a gateway on this machine",
    "core": "start a core (token ids in, token ids out)",
    "gateway": "start a gateway (text in, text out) in front of cores",
    "generate": "send one prompt and print what comes back",
    "chat": "talk to the model",
    "tokenize": "turn text into token ids, or ids into text",
    "health": "ask a server whether it serves",
    "bench": "measure a running gateway, or this machine",
    "doctor": "show versions, devices, ports and the model cache",
}
CLIENT_COMMANDS = ("generate", "chat", "tokenize", "health", "bench")
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
    words = _joined_text_flags(arguments)
    for command, summary in COMMANDS.items():
        subparser = commands.add_parser(command, help=summary, description=summary, allow_abbrev=False)
        if module is not None and command == name:
            module.add_arguments(subparser)
    subparser = _check_flags(parser, words)
    parsed, rest = parser.parse_known_args(words)
    if rest:
        subparser.error(f"unexpected: {' '.join(rest)}")
    if name in CLIENT_COMMANDS and (typos := list(unknown_variables(os.environ, installed_variables()))):
        print(f"headrace {name}: {'; '.join(typos)}", file=sys.stderr)
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


def _check_flags(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """The parser of the subcommand in the words; ends with its usage and the flag that was meant if one is unknown.

    argparse itself would show the main usage, and name a missing flag rather than the one with a typing error.
    """
    for word in words:
        if word in ("--", "-h", "--help"):
            break
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in parser._option_string_actions:
            close = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.7)
            parser.error(f"unknown flag {flag}" + (f" (did you mean {close[0]}?)" if close else ""))
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
    return parser


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
