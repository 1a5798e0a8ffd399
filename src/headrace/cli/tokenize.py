"""`headrace tokenize`: text or chat to token ids, or ids to text."""

import argparse
import json
import sys
from typing import Any

from headrace.cli.completions import error_json
from headrace.cli.prompt_flags import add_prompt_arguments, read_prompt
from headrace.cli.server_flag import add_server_argument
from headrace.client import Client
from headrace.common.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds server and input flags."""
    add_server_argument(parser)
    add_prompt_arguments(parser, ids_flag="--ids", ids_help="token ids to turn into text")
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="do not add special tokens to text, or leave them out of it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints one JSON object; 1 if the request fails, with the error as JSON."""
    try:
        prompt = read_prompt(arguments)
        result: dict[str, Any]
        with Client(arguments.server) as client:
            if prompt.HasField("token_ids"):
                ids = prompt.token_ids.ids
                result = {"text": client.detokenize(ids, skip_special_tokens=arguments.no_special_tokens)}
            else:
                answer = client.tokenize(prompt, add_special_tokens=not arguments.no_special_tokens)
                result = {"token_ids": list(answer.token_ids), "count": len(answer.token_ids)}
                if prompt.HasField("chat"):
                    result["rendered"] = answer.rendered
    except RequestError as error:
        print(error_json(error), file=sys.stderr)
        return 1
    print(json.dumps(result, ensure_ascii=False))
    return 0
