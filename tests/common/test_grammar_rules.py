"""The rules of a constraint that show at a glance, each under the public field that is to blame."""

import re

import pytest

from headrace.common.grammar_rules import (
    MAX_CONSTRAINT_BYTES,
    MAX_PATTERN_BYTES,
    StructuredOutputsParams,
    constraint_violations,
)
from headrace.common.params import ModelLimits, SamplingParams

FIELD = "sampling.structured_outputs"


def violated(**params):
    return {v.field: v.description for v in constraint_violations(StructuredOutputsParams(**params))}


@pytest.mark.parametrize(
    "params",
    [
        {"json": "{}"},
        {"json_object": True},
        {"regex": "a"},
        {"choice": ("a", "b", "a")},
        {"lark": 'start: "a"'},
        {"gbnf": 'root ::= "a"'},
        {"structural_tag": "{}"},
        {"json": "{}", "disable_any_whitespace": True, "disable_additional_properties": True},
        {"json_object": True, "whitespace_pattern": "[ ]?"},
        {"structural_tag": "{}", "whitespace_pattern": "[ ]?", "disable_additional_properties": True},
        {"json": "x" * MAX_CONSTRAINT_BYTES},
        {"choice": ("é" * (MAX_CONSTRAINT_BYTES // 4),) * 2},
        {"json": "{}", "whitespace_pattern": "x" * MAX_PATTERN_BYTES},
    ],
)
def test_a_constraint_that_keeps_the_rules_is_taken(params):
    assert violated(**params) == {}


@pytest.mark.parametrize(
    ("params", "field", "part"),
    [
        ({}, FIELD, "exactly one of json_schema, .*; got none"),
        ({"regex": "a", "json_object": True}, FIELD, "got json_object and regex"),
        ({"json": ""}, f"{FIELD}.json_schema", "must not be empty"),
        ({"lark": ""}, f"{FIELD}.lark", "must not be empty"),
        ({"gbnf": ""}, f"{FIELD}.gbnf", "must not be empty"),
        ({"regex": ""}, f"{FIELD}.regex", "must not be empty"),
        ({"structural_tag": ""}, f"{FIELD}.structural_tag", "must not be empty"),
        ({"json_object": False}, f"{FIELD}.json_object", "must be true"),
        ({"choice": ()}, f"{FIELD}.choice", "at least one text"),
        ({"choice": ("a", "")}, f"{FIELD}.choice", "must not hold an empty text"),
        ({"choice": ("a",) * 65_537}, f"{FIELD}.choice", "at most 65536 texts; got 65537"),
        ({"regex": "a\0"}, f"{FIELD}.regex", "NUL"),
        ({"json": "{}", "whitespace_pattern": "\0"}, f"{FIELD}.whitespace_pattern", "NUL"),
        ({"json": "{}", "whitespace_pattern": "x" * 257}, f"{FIELD}.whitespace_pattern", "at most 256 bytes; got 257"),
        ({"regex": "a", "whitespace_pattern": " "}, f"{FIELD}.whitespace_pattern", "no meaning for regex"),
        (
            {"choice": ("a",), "disable_any_whitespace": True},
            f"{FIELD}.disable_any_whitespace",
            "no meaning for choice",
        ),
        (
            {"json_object": True, "disable_additional_properties": True},
            f"{FIELD}.disable_additional_properties",
            "no meaning for json_object",
        ),
        (
            {"json": "{}", "whitespace_pattern": " ", "disable_any_whitespace": True},
            f"{FIELD}.whitespace_pattern",
            "must be empty where disable_any_whitespace",
        ),
        ({"json": "x" * (MAX_CONSTRAINT_BYTES + 1)}, f"{FIELD}.json_schema", "at most 262144 bytes; got 262145"),
        ({"choice": ("é" * (MAX_CONSTRAINT_BYTES // 4), "b") * 2}, f"{FIELD}.choice", "at most 262144 bytes"),
    ],
)
def test_a_broken_rule_is_named_by_its_field(params, field, part):
    found = violated(**params)
    assert list(found) == [field]
    assert re.search(part, found[field])


def test_the_rules_are_part_of_the_sampling_parameters():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=()))
    found = params.violations(ModelLimits(vocab_size=10, max_model_len=100, max_logprobs=5))
    assert [violation.field for violation in found] == [f"{FIELD}.choice"]
