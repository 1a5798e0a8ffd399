"""What structured outputs cost: the vocabulary, checking, compiling, masks and accepted tokens.

usage: python benchmarks/structured_outputs.py MODEL     prints a table; MODEL is a GGUF file or a directory
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.tokenizer_files import load_tokenizer_files
from headrace.core_service.structured.backend import build_grammar_backend

ROWS = (1, 32, 256)
ROUNDS = 21
START = '{"name": "a person of note", "age": 30, "tags": ["x", "ye'


def schema(number: int) -> StructuredOutputsParams:
    """A schema of the usual kind, unlike those of other numbers."""
    properties = {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 100 + number},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,20}$"}, "maxItems": 5},
        "home": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    return StructuredOutputsParams(json=json.dumps({"type": "object", "properties": properties}))


def milliseconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    """Prints the table."""
    files = load_tokenizer_files(Path(sys.argv[1]))
    tokenizer = files.build_tokenizer()
    begin = time.perf_counter()
    backend = build_grammar_backend(files, tokenizer.get_vocab_size(), files.eos_token_ids)
    print(f"vocabulary of {tokenizer.get_vocab_size()}: {(time.perf_counter() - begin) * 1e3:.0f} ms")

    def compiled(number: int) -> None:
        backend.compile(schema(number), (), files.eos_token_ids).result()

    print(f"first schema, with the start of the checker's process: {milliseconds(lambda: compiled(0)):.0f} ms")
    new = statistics.median(milliseconds(lambda n=n: compiled(n)) for n in range(1, ROUNDS))  # type: ignore[misc]
    known = statistics.median(milliseconds(lambda: compiled(0)) for _ in range(ROUNDS))
    print(f"a new schema: {new:.2f} ms; a known one: {known:.3f} ms")
    output = np.array(tokenizer.encode(START, add_special_tokens=False).ids, np.int32)
    grammar = backend.compile(schema(0), (), files.eos_token_ids).result()
    for count in ROWS:
        begun, filled = [], []
        for _ in range(ROUNDS):
            places = [grammar.start(output[: 3 + row % (len(output) - 3)]) for row in range(count)]
            rows = np.arange(count, dtype=np.int32)
            begin = time.perf_counter()
            masks = backend.begin_masks(rows, places)
            begun.append(time.perf_counter() - begin)
            masks.wait()
            filled.append(time.perf_counter() - begin)
        us = [statistics.median(times) * 1e6 for times in (begun, filled)]
        print(f"masks of {count} rows: {us[0]:.0f} us to begin, {us[1]:.0f} us in all, {us[1] / count:.1f} us a row")
    place = grammar.start(output[:0])
    times = [milliseconds(lambda token=token: place.accept(token)) for token in output.tolist()]  # type: ignore[misc]
    print(f"accept: {statistics.median(times) * 1e3:.1f} us a token; resume of {len(output)} tokens: ", end="")
    print(f"{statistics.median(milliseconds(lambda: grammar.start(output)) for _ in range(ROUNDS)):.3f} ms")
    backend.close()


if __name__ == "__main__":
    main()
