"""Bad constraints are refused by field and path before a core sees them, and keep nobody else waiting."""

import asyncio
import json
import threading

import pytest
from gateway_harness import text_request
from pair_requests import violated_fields

from headrace.common.errors import InvalidRequest, Overloaded, Violation
from headrace.common.grammar_checker import GrammarChecker, Verdict
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.gateway.structured_outputs import MAX_WAITING_CHECKS, StructuredOutputsCheck

GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}}
FIELD = "sampling.structured_outputs"


class SlowChecker(GrammarChecker):
    """Checks nothing before it is let go."""

    def __init__(self):
        self.go = threading.Event()
        self.checked: list[StructuredOutputsParams] = []
        self.known: dict[StructuredOutputsParams, Verdict] = {}

    def remembered(self, params):
        return self.known.get(params)

    def check(self, params):
        self.go.wait(20)
        self.checked.append(params)
        return Verdict("grammar")

    def close(self):
        self.go.set()


@pytest.fixture
def slow():
    checker = SlowChecker()
    check = StructuredOutputsCheck(checker)
    yield checker, check
    check.close()


def regex(text):
    return StructuredOutputsParams(regex=text)


async def test_what_was_checked_before_waits_for_nobody(slow):
    checker, check = slow
    checker.known = {regex("a"): Verdict("grammar"), regex("b"): Verdict(violations=(Violation("f", "is bad"),))}
    waiting = asyncio.create_task(check(regex("c")))
    await asyncio.sleep(0)
    await check(regex("a"))
    with pytest.raises(InvalidRequest, match="f: is bad"):
        await check(regex("b"))
    assert not waiting.done()
    checker.go.set()
    await waiting
    assert checker.checked == [regex("c")]


async def test_more_new_constraints_than_may_wait_are_an_overload(slow):
    checker, check = slow
    waiting = [asyncio.create_task(check(regex(f"a{i}"))) for i in range(MAX_WAITING_CHECKS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=f"at most {MAX_WAITING_CHECKS} may"):
        await check(regex("b"))
    checker.go.set()
    await asyncio.gather(*waiting)
    await check(regex("b"))
    assert len(checker.checked) == MAX_WAITING_CHECKS + 1


async def test_many_requests_with_the_same_new_constraint_wait_for_one_check(slow):
    checker, check = slow
    waiting = [asyncio.create_task(check(regex("a"))) for _ in range(4 * MAX_WAITING_CHECKS)]
    await asyncio.sleep(0)
    waiting.pop(0).cancel()
    checker.go.set()
    await asyncio.gather(*waiting)
    assert checker.checked == [regex("a")]


async def refused(client, **structured):
    request = text_request("hi", max_tokens=3)
    for name, value in structured.items():
        if name == "choice":
            request.sampling.structured_outputs.choice.texts.extend(value)
            request.sampling.structured_outputs.choice.SetInParent()
        else:
            setattr(request.sampling.structured_outputs, name, value)
    request.sampling.structured_outputs.SetInParent()
    outcome = await client.generate(request)
    assert outcome.error is not None, "served"
    return outcome.error.code().name, violated_fields(outcome.error)


async def test_a_good_constraint_reaches_the_core_as_it_is(client, core):
    request = text_request("hi", max_tokens=3)
    request.sampling.structured_outputs.json_schema = json.dumps(GOOD)
    request.sampling.structured_outputs.disable_any_whitespace = True
    for _ in range(2):
        assert (await client.generate(request)).error is None
    for seen in core.requests:
        assert seen.sampling.structured_outputs == request.sampling.structured_outputs


@pytest.mark.parametrize(
    ("structured", "field", "part"),
    [
        ({}, FIELD, "exactly one of"),
        ({"json_schema": '{"items": {"not": {}}}'}, f"{FIELD}.json_schema", 'at /items: Unimplemented keys: ["not"]'),
        ({"json_schema": '{"a":' * 1000 + "1" + "}" * 1000}, f"{FIELD}.json_schema", "nested deeper than 64 levels"),
        ({"json_object": False}, f"{FIELD}.json_object", "must be true"),
        ({"regex": "(a"}, f"{FIELD}.regex", "unclosed group"),
        ({"choice": []}, f"{FIELD}.choice", "at least one text"),
        ({"lark": "start: x"}, f"{FIELD}.lark", "unknown name"),
        ({"gbnf": "x"}, f"{FIELD}.gbnf", "is not valid GBNF"),
        ({"structural_tag": "[]"}, f"{FIELD}.structural_tag", "must be a JSON object"),
    ],
)
async def test_a_bad_constraint_is_refused_by_field_and_path_and_no_core_sees_it(client, core, structured, field, part):
    code, fields = await refused(client, **structured)
    assert code == "INVALID_ARGUMENT"
    assert list(fields) == [field]
    assert part in fields[field]
    assert core.requests == []


async def test_a_constraint_that_would_crash_its_compiler_harms_no_other_request(client, core):
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'
    bad, plain = await asyncio.gather(refused(client, lark=chain), client.generate(text_request("hi", max_tokens=3)))
    assert bad == (
        "INVALID_ARGUMENT",
        {f"{FIELD}.lark": "is too complex: compiling it needed more stack than there is"},
    )
    assert plain.error is None
    assert len(core.requests) == 1


async def test_a_bad_constraint_is_named_together_with_other_broken_rules(client):
    request = text_request("hi", max_tokens=3, temperature=3.0)
    request.sampling.structured_outputs.json_object = False
    outcome = await client.generate(request)
    assert set(violated_fields(outcome.error)) == {"sampling.temperature", f"{FIELD}.json_object"}
