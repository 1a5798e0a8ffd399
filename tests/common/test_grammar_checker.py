"""Constraints are tried in a process that may die of them; its verdicts are remembered, and it is replaced."""

import json
import os
import signal
import time

import psutil
import pytest
from grammar_walks import FILES, VOCAB_SIZE

from headrace.common.byte_tokenizer import EOS_ID
from headrace.common.errors import InvalidRequest, Overloaded, Unimplemented
from headrace.common.grammar_checker import REMEMBERED_CONSTRAINTS, GrammarChecker
from headrace.common.grammar_engine import STEP_MAX_ITEMS
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.limited_worker import WorkerLimits

SLOW = StructuredOutputsParams(
    lark="start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{n}}}(a|b)*/" for n in range(30))  # minutes of work
)
CHAIN = StructuredOutputsParams(lark="start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"')
GOOD = StructuredOutputsParams(regex="a+")


@pytest.fixture
def make_checker():
    checkers = []

    def make(tokenizer_json=FILES.files["tokenizer.json"], **limits):
        checkers.append(GrammarChecker(tokenizer_json, VOCAB_SIZE, (EOS_ID,), WorkerLimits(**limits)))
        return checkers[-1]

    yield make
    for checker in checkers:
        checker.close()


def children():
    return {child.pid for child in psutil.Process().children()}


def reason(verdict):
    with pytest.raises(InvalidRequest):
        verdict.get()
    (violation,) = verdict.violations
    return violation


def test_a_good_constraint_gives_its_grammar(make_checker):
    assert json.loads(make_checker().check(GOOD).get()) == {"grammars": [{"lark_grammar": "start: /a+/"}]}


def test_a_bad_one_gives_the_field_and_the_place(make_checker):
    schema = json.dumps({"properties": {"a": {"type": "array", "uniqueItems": True}}})
    violation = reason(make_checker().check(StructuredOutputsParams(json=schema)))
    assert violation.field == "sampling.structured_outputs.json_schema"
    assert violation.description == 'at /properties/a: Unimplemented keys: ["uniqueItems"]'


def test_rules_that_show_at_a_glance_start_no_process(make_checker):
    before = children()
    assert "exactly one" in reason(make_checker().check(StructuredOutputsParams())).description
    assert children() == before


def test_one_that_computes_without_end_is_cut_off_and_the_next_is_served(make_checker):
    checker = make_checker(cpu_seconds=0.2)
    violation = reason(checker.check(SLOW))
    assert violation.field == "sampling.structured_outputs.lark"
    assert violation.description == "is too complex: compiling it took more than 0.2 s of processor time"
    assert checker.check(GOOD).get()


def test_one_that_overflows_the_stack_is_refused_and_the_next_is_served(make_checker):
    checker = make_checker()
    assert "needed more stack than there is" in reason(checker.check(CHAIN)).description
    assert checker.check(GOOD).get()


def test_one_that_fails_in_its_first_mask_is_refused(make_checker):
    rules = range(STEP_MAX_ITEMS + 100)
    lark = "start: " + " | ".join(f"r{n}" for n in rules) + "\n"
    lark += "\n".join(f'r{n}: "a" r{n} | "{n}"' for n in rules)
    violation = reason(make_checker().check(StructuredOutputsParams(lark=lark)))
    assert f"Too many items (limit {STEP_MAX_ITEMS}" in violation.description


def test_one_that_fails_with_its_first_token_is_refused(make_checker):
    violation = reason(make_checker().check(StructuredOutputsParams(regex="(a?){20000}a{20000}")))
    assert "too many expressions" in violation.description


def test_one_that_needs_too_much_memory_is_refused_and_the_next_is_served(make_checker):
    checker = make_checker(memory_bytes=8 << 20)
    violation = reason(checker.check(StructuredOutputsParams(regex="a?" * 8000)))
    assert violation.description == "is too complex: compiling it needed more than 8 MiB of memory"
    assert checker.check(GOOD).get()


def test_verdicts_are_remembered_and_the_oldest_forgotten(make_checker):
    checker = make_checker()
    bad = StructuredOutputsParams(regex="(a")
    for params in (GOOD, bad):
        assert checker.remembered(params) is None
        verdict = checker.check(params)
        assert checker.remembered(params) is verdict
        assert checker.check(params) is verdict
    for i in range(REMEMBERED_CONSTRAINTS - 1):
        assert checker.remembered(GOOD)
        checker.check(StructuredOutputsParams(choice=(f"{i}",)))
    assert checker.remembered(GOOD)
    assert checker.remembered(bad) is None


def test_a_process_that_gets_no_time_is_an_overload_and_is_not_remembered(make_checker):
    checker = make_checker(wall_seconds=0.5)
    before = children()
    assert checker.check(GOOD).get()
    (child,) = children() - before
    os.kill(child, signal.SIGSTOP)
    while psutil.Process(child).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    with pytest.raises(Overloaded, match=r"more than 0\.5 s"):
        checker.check(StructuredOutputsParams(regex="b"))
    assert children() == before
    assert checker.remembered(StructuredOutputsParams(regex="b")) is None


def test_a_process_that_somebody_ended_is_an_overload_and_is_replaced(make_checker):
    checker = make_checker()
    before = children()
    assert checker.check(GOOD).get()
    (child,) = children() - before
    os.kill(child, signal.SIGKILL)
    with pytest.raises(Overloaded, match="exit code -9"):
        checker.check(StructuredOutputsParams(regex="b"))
    assert checker.check(StructuredOutputsParams(regex="b")).get()


def test_a_tokenizer_that_llguidance_does_not_know_is_named(make_checker):
    with pytest.raises(Unimplemented, match="tokenizer"):
        make_checker(tokenizer_json=b"{}").check(GOOD)


def test_a_closed_checker_leaves_no_process(make_checker):
    before = children()
    checker = make_checker()
    checker.check(GOOD)
    checker.close()
    assert children() == before
