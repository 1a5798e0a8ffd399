"""`headrace generate`: one prompt, and what comes back as text or JSON."""

import argparse
import json
import sys

from headrace.cli.completions import Completions, error_json
from headrace.cli.prompt_flags import add_prompt_arguments, read_prompt
from headrace.cli.sampling_flags import add_sampling_arguments, fill_sampling
from headrace.cli.server_flag import add_server_argument
from headrace.client import Client
from headrace.common.errors import InvalidRequest, RequestError, Violation
from headrace.common.quantities import parse_duration
from headrace.gateway_api.v1 import generation_pb2 as pb

_KINDS = {
    "delta": pb.OUTPUT_KIND_DELTA,
    "cumulative": pb.OUTPUT_KIND_CUMULATIVE,
    "final": pb.OUTPUT_KIND_FINAL_ONLY,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds server, prompt, sampling and output flags."""
    add_server_argument(parser)
    add_prompt_arguments(parser, ids_flag="--token-ids", ids_help="the prompt as token ids")
    add_sampling_arguments(parser)
    parser.add_argument("--model", default="", help="served model; not needed where there is only one")
    parser.add_argument("--output-kind", choices=tuple(_KINDS), default="delta", help="what each message carries")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="lower runs sooner")
    parser.add_argument("--deadline", type=_duration, metavar="DURATION", help="give up after this time, such as 30s")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text; errors as JSON too"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the text as it arrives, or one JSON object at the end; 1 if the request fails."""
    try:
        result = _generate(arguments)
    except RequestError as error:
        print(error_json(error) if arguments.json else f"headrace generate: {error.message}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(result.as_json(), ensure_ascii=False))
    return 0


def _generate(arguments: argparse.Namespace) -> Completions:
    request = pb.GenerateRequest(model=arguments.model, output_kind=_KINDS[arguments.output_kind])
    try:
        request.priority = arguments.priority
    except ValueError as error:  # protobuf: out of the field's range
        raise InvalidRequest([Violation("priority", f"is out of range; got {arguments.priority}")]) from error
    fill_sampling(request, arguments)
    request.prompt.CopyFrom(read_prompt(arguments))
    completions = Completions(request.output_kind)
    streams_text = not arguments.json and (arguments.n is None or arguments.n == 1)
    with Client(arguments.server) as client:
        for message in client.generate(request, deadline_s=arguments.deadline):
            for text in completions.add(message).values():
                if streams_text:
                    print(text, end="", flush=True)
    if streams_text:
        print()
    elif not arguments.json:
        for output in completions.outputs:
            print(f"[{output.index}] {output.text}")
    return completions


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
