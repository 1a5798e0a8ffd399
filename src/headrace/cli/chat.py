"""`headrace chat`: a conversation in the terminal, or with questions from a pipe, one a line."""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator

from headrace.cli.completions import Completions
from headrace.cli.sampling_flags import add_sampling_arguments, fill_sampling
from headrace.cli.server_flag import add_server_argument
from headrace.client import Client, chat_prompt
from headrace.common.errors import InvalidRequest, RequestError, Violation
from headrace.gateway_api.v1 import generation_pb2 as pb

_DEFAULT_MAX_TOKENS = 512
_SHOWN_NOWHERE = ("n", "logprobs", "prompt_logprobs")  # fields that change nothing in what a conversation prints
_COMMAND = re.compile(r"/\w*")  # a path or a sentence that begins with a slash is a question


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds server and sampling flags."""
    add_server_argument(parser)
    add_sampling_arguments(parser, max_tokens=_DEFAULT_MAX_TOKENS, skip=_SHOWN_NOWHERE)
    parser.add_argument("--model", default="", help="served model; not needed where there is only one")
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning")


def run(arguments: argparse.Namespace) -> int:
    """Answers until /exit or the end of the input; 1 if a request failed for another reason than what it asked."""
    history: list[tuple[str, str]] = [("system", arguments.system)] if arguments.system else []
    with Client(arguments.server) as client:
        try:
            client.get_model(arguments.model)  # before the user writes a question in vain
        except RequestError as error:
            print(f"headrace chat: {error.message}", file=sys.stderr)
            return 1
        for line in _lines():
            if line == "/exit":
                break
            if not line:
                continue
            if _COMMAND.fullmatch(line):
                print(f"/exit ends; unknown command {line}", file=sys.stderr)
                continue
            history.append(("user", line))
            try:
                answer = _answer(client, arguments, history)
            except InvalidRequest as error:  # such as a conversation that is too long: the user can do something
                print(f"refused: {error.message}", file=sys.stderr)
                history.pop()
                continue
            except RequestError as error:
                print(f"headrace chat: {error.message}", file=sys.stderr)
                return 1
            history.append(("assistant", answer))
    return 0


def _lines() -> Iterator[str]:
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and a history
        print("/exit or Ctrl-D ends, Ctrl-C stops an answer", file=sys.stderr)
    while True:
        try:
            yield input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return


def _answer(client: Client, arguments: argparse.Namespace, history: list[tuple[str, str]]) -> str:
    """Prints the answer as it arrives and returns it; Ctrl-C ends it early and keeps what there is."""
    try:
        prompt = chat_prompt(history)
    except UnicodeEncodeError as error:  # such as bytes of another encoding on a pipe
        raise InvalidRequest([Violation("prompt.chat", "is not valid UTF-8")]) from error
    request = pb.GenerateRequest(model=arguments.model, prompt=prompt)
    fill_sampling(request, arguments)
    completions = Completions(request.output_kind)
    messages = client.generate(request)
    try:
        for message in messages:
            print(completions.add(message).get(0, ""), end="", flush=True)
    except KeyboardInterrupt:
        messages.close()
    print()
    return completions.outputs[0].text if completions.outputs else ""
