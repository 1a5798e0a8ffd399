"""Sampling parameters on the command line. A flag not given leaves its field unset, so the model's default holds."""

import argparse
from collections.abc import Collection
from typing import Any

from headrace.cli.prompt_flags import parse_ids
from headrace.common.errors import InvalidRequest, Violation
from headrace.common.params import DEFAULT_MAX_TOKENS
from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb

# Flag, its field in SamplingParams, type, help.
_SCALARS: tuple[tuple[str, str, type, str], ...] = (
    ("--max-tokens", "max_tokens", int, "most output tokens [default{max_tokens}]"),
    ("--min-tokens", "min_tokens", int, "fewest output tokens"),
    ("--temperature", "temperature", float, "0 is greedy, 2 the most [default: the model's, else 1]"),
    ("--top-k", "top_k", int, "draw from the k most likely tokens; 0 is off"),
    ("--top-p", "top_p", float, "draw from the smallest set of tokens with this probability; 1 is off"),
    ("--min-p", "min_p", float, "draw from tokens with this share of the top probability; 0 is off"),
    ("--seed", "seed", int, "the same seed gives the same tokens"),
    ("--n", "n", int, "completions of the prompt"),
    ("--logprobs", "logprobs", int, "log-probabilities of the token and of the k most likely"),
    ("--prompt-logprobs", "prompt_logprobs", int, "the same for the prompt's tokens"),
    ("--presence-penalty", "presence_penalty", float, "subtracted from logits of tokens in the output"),
    ("--frequency-penalty", "frequency_penalty", float, "subtracted per occurrence in the output"),
    ("--repetition-penalty", "repetition_penalty", float, "divides logits of tokens in prompt and output"),
)


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, max_tokens: int | None = None, skip: Collection[str] = ()
) -> None:
    """Adds a flag for each parameter but those whose field is in `skip`; `max_tokens` is a default for that one."""
    shown_default = f": the model's, else {DEFAULT_MAX_TOKENS}" if max_tokens is None else f" {max_tokens}"
    group = parser.add_argument_group("sampling")
    for flag, field, kind, text in _SCALARS:
        if field not in skip:
            shown = text.format(max_tokens=shown_default)
            group.add_argument(flag, dest=field, type=kind, metavar="N" if kind is int else "X", help=shown)
    parser.set_defaults(max_tokens=max_tokens)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends the output; repeatable"
    )
    group.add_argument("--stop-token-ids", metavar="1,2,3", help="token ids that end the output")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def fill_sampling(request: pb.GenerateRequest, arguments: argparse.Namespace) -> None:
    """Sets what was given. InvalidRequest names every number that its field cannot even hold, such as n = -1.

    All other checks are the server's.
    """
    violations: list[Violation] = []
    for _, field, _, _ in _SCALARS:
        if (value := getattr(arguments, field, None)) is not None:
            _set(request.sampling, field, value, violations)
    if arguments.stop_token_ids is not None:
        try:
            request.sampling.stop_token_ids.extend(parse_ids(arguments.stop_token_ids))
        except ValueError as error:
            violations.append(Violation("sampling.stop_token_ids", str(error)))
    request.sampling.ignore_eos = arguments.ignore_eos
    try:
        request.text_options.stop.extend(arguments.stop)
    except UnicodeEncodeError:
        violations.append(Violation("text_options.stop", "is not valid UTF-8"))
    if violations:
        raise InvalidRequest(violations)


def _set(sampling: params_pb2.SamplingParams, field: str, value: Any, violations: list[Violation]) -> None:
    try:
        setattr(sampling, field, value)
    except ValueError:  # protobuf: out of the field's range
        violations.append(Violation(f"sampling.{field}", f"is out of range; got {value}"))
