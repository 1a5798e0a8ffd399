"""`headrace bench serve`: speed of a running gateway, as its clients see it."""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.completions import error_json
from headrace.cli.number_flags import positive
from headrace.cli.server_flag import add_server_argument
from headrace.client import AsyncClient, token_prompt
from headrace.common.errors import RequestError
from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb


@dataclass(slots=True)
class _Results:
    """What the requests took, in seconds."""

    to_first_token: list[float] = field(default_factory=list)
    between_messages: list[float] = field(default_factory=list)
    output_tokens: int = 0
    failures: list[RequestError] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_server_argument(parser)
    for flag, default, text in (
        ("--concurrency", 8, "requests at once"),
        ("--requests", 32, "requests in all"),
        ("--input-tokens", 128, "prompt tokens of each"),
        ("--output-tokens", 64, "output tokens of each"),
    ):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{text} [default {default}]")
    parser.add_argument("--model", default="", help="served model; not needed where there is only one")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="repeat the prompts of an earlier run [default: new ones]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints throughput and latencies; 1 if nothing could be measured."""
    try:
        report, failures = asyncio.run(_measure(arguments))
    except RequestError as error:
        print(error_json(error) if arguments.json else f"headrace bench: {error.message}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(report))
    else:
        print(f"output   {report['output_tok_s']} tokens/s")
        print(f"ttft     p50 {report['ttft_ms']['p50']} ms   p99 {report['ttft_ms']['p99']} ms")
        print(f"itl      p50 {report['itl_ms']['p50']} ms   p99 {report['itl_ms']['p99']} ms")
        print(f"requests {report['requests']}, failed {report['failed']}")
    if failures:
        print(f"headrace bench: the first failure: {failures[0].message}", file=sys.stderr)
    return 1 if len(failures) == arguments.requests else 0


async def _measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[RequestError]]:
    results = _Results()
    async with AsyncClient(arguments.server) as client:
        vocab_size = (await client.get_model(arguments.model)).vocab_size
        prompts = _prompts(arguments.requests + 1, arguments.input_tokens, vocab_size, arguments.seed)
        requests = [_request(arguments, prompt) for prompt in prompts]
        # One request that does not count: the first one through pays for connections and lazy set-up.
        async for _ in client.generate(requests.pop()):
            pass
        started = time.perf_counter()

        async def work() -> None:
            while requests:
                await _run_one(client, requests.pop(), results)

        await asyncio.gather(*(work() for _ in range(min(arguments.concurrency, arguments.requests))))
        elapsed = time.perf_counter() - started
    report = {
        "output_tok_s": round(results.output_tokens / elapsed, 2),
        "ttft_ms": _percentiles(results.to_first_token),
        "itl_ms": _percentiles(results.between_messages),
        "requests": arguments.requests,
        "failed": len(results.failures),
    }
    return report, results.failures


async def _run_one(client: AsyncClient, request: pb.GenerateRequest, results: _Results) -> None:
    """Runs a request and notes its times.

    A gap is what a reader waits between two messages with tokens, however many tokens each carries: merged messages do
    not look faster than they feel.
    """
    last = started = time.perf_counter()
    first: float | None = None
    gaps: list[float] = []
    tokens = 0
    try:
        async for message in client.generate(request):
            new_tokens = sum(len(output.token_ids) for output in message.outputs)
            if new_tokens == 0:
                continue
            now = time.perf_counter()
            if first is None:
                first = now - started
            else:
                gaps.append(now - last)
            last, tokens = now, tokens + new_tokens
    except RequestError as error:
        results.failures.append(error)
        return
    if first is not None:
        results.to_first_token.append(first)
    results.between_messages += gaps
    results.output_tokens += tokens


def _request(arguments: argparse.Namespace, prompt: list[int]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=arguments.model,
        prompt=token_prompt(prompt),
        sampling=params_pb2.SamplingParams(temperature=0, max_tokens=arguments.output_tokens, ignore_eos=True),
    )


def _prompts(count: int, length: int, vocab_size: int, seed: int | None) -> list[list[int]]:
    """Prompts that differ from their first token on, so that none finds another's blocks in the prefix cache.

    Ids come from the middle of the vocabulary: special tokens lie at its ends.
    """
    generator = random.Random(seed)
    middle = range(vocab_size // 4, max(vocab_size * 3 // 4, vocab_size // 4 + 1))
    firsts = generator.sample(middle, min(count, len(middle)))
    return [[firsts[i % len(firsts)], *generator.choices(middle, k=length - 1)] for i in range(count)]


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    ordered = sorted(seconds)

    def at(percent: int) -> float | None:
        # Nearest rank: a value that was measured.
        return round(ordered[max(-(-percent * len(ordered) // 100), 1) - 1] * 1000, 3) if ordered else None

    return {"p50": at(50), "p99": at(99)}
