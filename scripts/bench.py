"""Measures this machine: `headrace bench host`, then `headrace bench serve` at several numbers of requests at once.

Prompts of 128 tokens, outputs of 64, greedy, end-of-sequence ignored.
usage: bench.py [FLAG of `headrace up`]...          default: --model demo
"""

import json
import subprocess
import sys
from typing import Any

from local_pair import PairError, running_pair

CONCURRENCY = (1, 8, 32)
REQUESTS_PER_STREAM = 4
COLUMNS = "{:>8} {:>12} {:>10} {:>10} {:>10} {:>10} {:>7}"


def bench(*words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs `headrace bench`; CalledProcessError if it fails."""
    return subprocess.run([sys.executable, "-m", "headrace", "bench", *words], check=True, text=True, **options)


def measure(server: str, concurrency: int) -> str:
    """One line of the table; CalledProcessError if nothing could be measured."""
    words = ["--concurrency", str(concurrency), "--requests", str(concurrency * REQUESTS_PER_STREAM)]
    report = json.loads(bench("serve", "--json", "--server", server, *words, stdout=subprocess.PIPE).stdout)
    ttft, itl = report["ttft_ms"], report["itl_ms"]
    times = (f"{value:.1f}" for value in (ttft["p50"], ttft["p99"], itl["p50"], itl["p99"]))
    return COLUMNS.format(concurrency, f"{report['output_tok_s']:.1f}", *times, report["failed"])


def main() -> int:
    """Prints both tables; returns the exit code."""
    flags = sys.argv[1:] or ["--model", "demo"]
    try:
        bench("host")
        print(flush=True)
        with running_pair(*flags, "--log-level", "error") as server:
            print(COLUMNS.format("at once", "tokens/s", "ttft p50", "ttft p99", "itl p50", "itl p99", "failed"))
            for concurrency in CONCURRENCY:
                print(measure(server, concurrency), flush=True)
    except (PairError, subprocess.CalledProcessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
