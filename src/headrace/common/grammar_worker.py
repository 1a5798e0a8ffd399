"""Tries constraints out in a process of its own: `python -m headrace.common.grammar_worker`.

A grammar of a few hundred bytes can keep llguidance busy for minutes, and one whose rules form a long chain makes it
overflow its stack, which ends the process that it runs in. So every constraint is compiled here first
(`headrace.common.limited_worker`), exactly as the core will compile it.
"""

import json

from headrace.common.errors import InvalidRequest, Violation
from headrace.common.grammar_engine import build_grammar_tokenizer, new_matcher
from headrace.common.grammar_rules import FIELDS, StructuredOutputsParams, constraint_kind
from headrace.common.grammar_source import grammar_source
from headrace.common.limited_worker import Handler, serve


def _set_up(message: bytes) -> Handler:
    """`message` is a line of JSON with `vocab_size` and `eos_token_ids`, then the bytes of tokenizer.json."""
    line, _, tokenizer_json = message.partition(b"\n")
    facts = json.loads(line)
    try:
        tokenizer = build_grammar_tokenizer(tokenizer_json.decode(), facts["vocab_size"], tuple(facts["eos_token_ids"]))
    except ValueError as error:
        unsupported = json.dumps({"unsupported": str(error)}).encode()
        return lambda _: unsupported

    def check(message: bytes) -> bytes:
        values = json.loads(message)
        values["choice"] = None if values["choice"] is None else tuple(values["choice"])
        params = StructuredOutputsParams(**values)
        try:
            grammar = grammar_source(params)
            new_matcher(tokenizer, grammar)
        except InvalidRequest as error:
            return _verdict("", error.violations)
        except ValueError as error:
            kind = constraint_kind(params)
            assert kind is not None, "checked before"
            return _verdict("", [Violation(FIELDS[kind], str(error))])
        return _verdict(grammar, [])

    return check


def _verdict(grammar: str, violations: list[Violation]) -> bytes:
    pairs = [(violation.field, violation.description) for violation in violations]
    return json.dumps({"grammar": grammar, "violations": pairs}).encode()


if __name__ == "__main__":
    serve(_set_up)
