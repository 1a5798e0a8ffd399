"""Constraints through the running pair: every kind holds, in every form of output, and bad ones harm nobody."""

import asyncio
import json
import re
from typing import Any

import pytest
from gateway_harness import Outcome
from json_schema_checker import faults
from pair_requests import make_request, violated_fields, wait_until_idle, whole_text

from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb

pytestmark = pytest.mark.model

KINDS = [pb.OUTPUT_KIND_DELTA, pb.OUTPUT_KIND_CUMULATIVE, pb.OUTPUT_KIND_FINAL_ONLY]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool="],
        "tags": [
            {
                "type": "tag",
                "begin": "<tool=person>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</tool>",
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
# Minutes of work for the compiler, and more recursion than a stack holds.
SLOW = "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{n}}}(a|b)*/" for n in range(30))
CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"'
FIELD = "sampling.structured_outputs"


def constrained(
    prompt: str = "Describe a person as JSON:\n", *, options: dict[str, Any] | None = None, **more: Any
) -> pb.GenerateRequest:
    """At temperature 1 with a seed, unless `more` says otherwise."""
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 120}
    structured = params_pb2.StructuredOutputs(**(options or {}))
    kind = more.pop("kind", pb.OUTPUT_KIND_DELTA)
    return make_request(prompt, kind=kind, **(sampling | more), structured_outputs=structured)


def text_of(outcome: Outcome, index: int = 0, kind: pb.OutputKind.ValueType = pb.OUTPUT_KIND_DELTA) -> str:
    assert outcome.error is None, outcome.error
    assert outcome.last(index).finish_reason == params_pb2.FINISH_REASON_STOP
    return whole_text(outcome, kind, index)


@pytest.mark.parametrize("kind", KINDS)
async def test_outputs_of_a_schema_validate_in_every_form(client, kind):
    options = {"json_schema": json.dumps(SCHEMA)}
    text = text_of(await client.generate(constrained(options=options, kind=kind)), kind=kind)
    assert faults(json.loads(text), SCHEMA) == []


async def test_many_outputs_of_one_request_each_follow_the_schema(client):
    outcome = await client.generate(constrained(options={"json_schema": json.dumps(SCHEMA)}, n=6))
    texts = [text_of(outcome, index) for index in range(6)]
    assert all(faults(json.loads(text), SCHEMA) == [] for text in texts)
    assert len(set(texts)) > 1


async def test_greedy_outputs_follow_the_schema_too(client):
    options = {"json_schema": json.dumps(SCHEMA), "disable_any_whitespace": True}
    text = text_of(await client.generate(constrained(options=options, temperature=0.0)))
    assert faults(json.loads(text), SCHEMA) == []
    assert json.loads(text)["name"] in text
    assert '": ' not in text.replace(json.dumps(json.loads(text)["name"]), "")


async def test_a_json_object_is_an_object(client):
    request = constrained("A short JSON object: ", options={"json_object": True}, max_tokens=200, temperature=0.3)
    outcome = await client.generate(request)
    if outcome.last().finish_reason == params_pb2.FINISH_REASON_STOP:
        assert isinstance(json.loads(outcome.text()), dict)
    else:
        assert outcome.text().startswith("{")


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": r"[A-Z]{2}-\d{3}"}, r"[A-Z]{2}-[0-9]{3}"),
        ({"choice": params_pb2.Choices(texts=["red", "green", "a red one"])}, "red|green|a red one"),
        ({"lark": 'start: "sum " NUMBER ("+" NUMBER)~1..2\nNUMBER: /[0-9]{1,3}/'}, r"sum \d{1,3}(\+\d{1,3}){1,2}"),
        ({"gbnf": 'root ::= "I " verb " it."\nverb ::= "like" | "love"'}, "I (like|love) it."),
        ({"structural_tag": json.dumps(TAG)}, r"(.|\n)*<tool=person>\{(.|\n)*\}</tool>"),
    ],
)
async def test_outputs_match_their_constraint(client, options, pattern):
    request = constrained("Call the tool: <tool=person>", options=options, max_tokens=300, temperature=0.5)
    outcome = await client.generate(request)
    if "structural_tag" in options and outcome.last().finish_reason == params_pb2.FINISH_REASON_LENGTH:
        assert "<tool=" not in outcome.text() or "<tool=person>" in outcome.text()
        return
    assert re.fullmatch(pattern, text_of(outcome))


async def test_an_output_without_an_end_token_stops_when_it_is_complete(client):
    request = constrained(options={"regex": "[a-z]{5}!"}, ignore_eos=True)
    assert re.fullmatch("[a-z]{5}!", text_of(await client.generate(request)))


async def test_a_seeded_constrained_output_does_not_depend_on_its_company(client):
    request = constrained(options={"json_schema": json.dumps(SCHEMA)})
    alone = text_of(await client.generate(request))
    others = [client.generate(constrained(options={"regex": "[a-z ]{30}"}, seed=i)) for i in range(8)]
    together = await asyncio.gather(client.generate(request), *others, client.generate(request))
    assert {text_of(together[0]), text_of(together[-1])} == {alone}


@pytest.mark.parametrize(
    ("options", "field", "part"),
    [
        ({"json_schema": '{"properties": {"a": {"not": {}}}}'}, f"{FIELD}.json_schema", "at /properties/a: "),
        ({"json_schema": '{"a":' * 1000 + "1" + "}" * 1000}, f"{FIELD}.json_schema", "nested deeper than 64"),
        ({"lark": SLOW}, f"{FIELD}.lark", "is too complex: compiling it "),  # took too much time, or memory
        ({"regex": "(a"}, f"{FIELD}.regex", "unclosed group"),
        ({"lark": CHAIN}, f"{FIELD}.lark", "needed more stack"),
        ({}, FIELD, "exactly one of"),
    ],
)
async def test_a_bad_constraint_is_refused_by_field_while_others_are_served(client, options, field, part):
    good = asyncio.create_task(client.generate(constrained(options={"json_schema": json.dumps(SCHEMA)})))
    outcome = await client.generate(constrained(options=options))
    assert outcome.error.code().name == "INVALID_ARGUMENT"
    fields = violated_fields(outcome.error)
    assert list(fields) == [field]
    assert part in fields[field]
    assert faults(json.loads(text_of(await good)), SCHEMA) == []


async def test_a_grammar_that_runs_into_a_limit_ends_its_own_request_only(client):
    good = asyncio.create_task(client.generate(constrained(options={"json_schema": json.dumps(SCHEMA)})))
    outcome = await client.generate(constrained("aaaa", options={"regex": "(a{1,1000}){1,1000}"}, max_tokens=400))
    if outcome.error is not None:
        assert outcome.error.code().name in ("INVALID_ARGUMENT", "INTERNAL")
    assert set(outcome.text()) == {"a"}
    assert faults(json.loads(text_of(await good)), SCHEMA) == []
    await wait_until_idle(client)
