"""`headrace bench host`: what a step costs besides the model, on this machine.

Nothing is served and nothing is computed: the engine runs over a runner that returns at once, and the gateway's side
turns ready-made step messages into text.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from typing import Any

from headrace.cli.number_flags import positive
from headrace.common.errors import StartupError

RUNNING = (64, 256, 1024)
ADMITTED = 256
WITH_LOGPROBS, NUM_LOGPROBS = 256, 20
STREAMS = 256


@dataclass(frozen=True, slots=True)
class _Rounds:
    """One figure, as the median of several rounds, with the least and the most."""

    values: list[float]

    @property
    def median(self) -> float:
        """The middle."""
        return round(statistics.median(self.values), 3)

    def __str__(self) -> str:
        return f"{self.median:>9.3f}  ({min(self.values):.3f} to {max(self.values):.3f})"


@dataclass(frozen=True, slots=True)
class _Figures:
    step_ms: dict[int, _Rounds]  # by the number of running requests
    logprobs_ms: _Rounds  # what log-probabilities add to a step
    admit_ms: _Rounds
    read_ms: _Rounds  # of these
    schedule_ms: _Rounds  # the rest of them
    to_text_us: _Rounds  # a token
    to_text_with_stop_us: _Rounds
    to_message_us: _Rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="measurements of each [default 5]")
    parser.add_argument("--model", default="demo", help="whose tokenizer to measure [default demo]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints medians, and how far the rounds lie apart. Raises StartupError if something is not to be had."""
    figures = _measure(arguments.model, arguments.rounds)
    if arguments.json:
        report: dict[str, Any] = {
            "step_ms": {str(running): figure.median for running, figure in figures.step_ms.items()},
            "admit_256_cached_ms": figures.admit_ms.median,
            "detokenize_us_per_token": figures.to_text_us.median,
        }
        print(json.dumps(report))
        return 0
    print(f"{'':60} median  (least to most)")
    for running, figure in figures.step_ms.items():
        _line(f"a decode step, {running} requests", "ms", figure)
    _line(f"what top {NUM_LOGPROBS} logprobs of {WITH_LOGPROBS} requests add to it", "ms", figures.logprobs_ms)
    _line(f"{ADMITTED} prompts of 2,048 cached tokens, to their first step", "ms", figures.admit_ms)
    _line("  of it: reading the messages", "ms", figures.read_ms)
    _line("  of it: finding what is cached, planning", "ms", figures.schedule_ms)
    _line(f"a token to its stream's text, {STREAMS} streams", "µs", figures.to_text_us)
    _line("  the same where a stop string is looked for", "µs", figures.to_text_with_stop_us)
    _line("  from there to the client's message", "µs", figures.to_message_us)
    return 0


def _measure(model: str, rounds: int) -> _Figures:
    from headrace.common.model_files import resolve_model
    from headrace.common.tokenizer_files import load_tokenizer_files

    try:
        from headrace.core_service.host_benchmark import cached_admission_ms, steady_step_ms
        from headrace.gateway.output_benchmark import NEVER_THERE, OutputBenchmark
    except ModuleNotFoundError as error:
        raise StartupError(f"bench host needs both services, and this installation lacks {error.name}") from error
    gateway = OutputBenchmark(load_tokenizer_files(resolve_model(model, None).path))
    steps = {running: _Rounds(steady_step_ms(running, rounds)) for running in RUNNING}
    with_logprobs = steady_step_ms(WITH_LOGPROBS, rounds, NUM_LOGPROBS)
    admissions = cached_admission_ms(ADMITTED, rounds)
    tokens = [gateway.measure(STREAMS) for _ in range(rounds)]
    with_stop = [gateway.measure(STREAMS, stops=[NEVER_THERE]) for _ in range(rounds)]
    gateway.close()
    return _Figures(
        step_ms=steps,
        logprobs_ms=_Rounds([step - steps[WITH_LOGPROBS].median for step in with_logprobs]),
        admit_ms=_Rounds([whole for whole, _ in admissions]),
        read_ms=_Rounds([read for _, read in admissions]),
        schedule_ms=_Rounds([whole - read for whole, read in admissions]),
        to_text_us=_Rounds([token.to_text for token in tokens]),
        to_text_with_stop_us=_Rounds([token.to_text for token in with_stop]),
        to_message_us=_Rounds([token.to_message for token in tokens]),
    )


def _line(what: str, unit: str, figure: _Rounds) -> None:
    print(f"{what:56}{unit}{figure}")
