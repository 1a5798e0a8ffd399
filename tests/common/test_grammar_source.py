"""What each kind of constraint lets through, and how what cannot be used is refused."""

import json
import re

import pytest
from grammar_walks import FILES, VOCAB_SIZE

from headrace.common.byte_tokenizer import EOS_ID
from headrace.common.errors import InvalidRequest
from headrace.common.grammar_engine import build_grammar_tokenizer, new_matcher
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.grammar_source import grammar_source

FIELD = "sampling.structured_outputs"


@pytest.fixture(scope="module")
def fits():
    """Whether the whole of a text is an output that a constraint allows."""
    tokenizer = build_grammar_tokenizer(FILES.files["tokenizer.json"].decode(), VOCAB_SIZE, (EOS_ID,))

    def check(text, **params):
        matcher = new_matcher(tokenizer, grammar_source(StructuredOutputsParams(**params)))
        tokens = list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


def refusal(**params):
    with pytest.raises(InvalidRequest) as caught:
        grammar_source(StructuredOutputsParams(**params))
    (violation,) = caught.value.violations
    return violation.field, violation.description


def test_a_json_object_is_any_object_and_nothing_else(fits):
    assert fits('{"a": [1, {"b": null}], "c": "é \\n"}', json_object=True)
    assert fits("{}", json_object=True)
    for text in ("[]", "1", '"a"', "{a: 1}", "", '{"a":1} '):
        assert not fits(text, json_object=True)


def test_the_schema_true_is_any_json(fits):
    assert fits("[1]", json="true")
    assert fits('"a"', json="{}")


def test_white_space_is_bounded_unless_the_request_says_otherwise(fits):
    def with_space(space, **options):
        return fits("{" + space + '"a":1}', json_object=True, **options)

    for space in ("", " ", "\t", "\n", "\r\n", " " * 8 + "\n" + " " * 64):
        assert with_space(space)
    for space in (" " * 9, "\n\n", "\n" + " " * 65):
        assert not with_space(space)
    assert not with_space("\u00a0")
    assert not with_space(" ", disable_any_whitespace=True)
    assert with_space("", disable_any_whitespace=True)
    assert with_space("\t", whitespace_pattern=r"\t{1,2}")
    assert not with_space(" ", whitespace_pattern=r"\t{1,2}")
    assert with_space(" " * 1000, whitespace_pattern=" *")


def test_additional_properties_can_be_forbidden_wherever_a_schema_names_some(fits):
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"a": inner, "open": {"type": "object"}, "said": {**inner, "additionalProperties": True}},
        }
    )
    inside = '{"a":{"b":1}}', '{"open":{"x":1}}', '{"said":{"x":1}}'
    outside = '{"x":1}', '{"a":{"x":1}}'
    for text in inside + outside:
        assert fits(text, json=schema)
        assert fits(text, json=schema, disable_additional_properties=True) == (text in inside)


def test_a_property_that_is_called_like_a_keyword_is_a_property(fits):
    schema = json.dumps({"type": "object", "properties": {"properties": {"type": "integer"}, "enum": {"const": 1}}})
    assert fits('{"properties":1,"enum":1}', json=schema, disable_additional_properties=True)
    assert not fits('{"x":1}', json=schema, disable_additional_properties=True)


def test_a_regex_matches_in_full_with_or_without_anchors(fits):
    for regex in (r"a/\d+", r"^a/\d+$"):
        assert fits("a/12", regex=regex)
        for text in ("a/", "xa/1", "a/1x", "a/٣"):
            assert not fits(text, regex=regex)


def test_a_choice_is_taken_literally(fits):
    texts = ('say "hi"', "a|b", "line\nbreak", "\\d", "é\U0001f600", "/start:/")
    for text in texts:
        assert fits(text, choice=texts)
    assert not fits("a", choice=texts)
    assert not fits("1", choice=texts)


def test_a_choice_may_be_among_tens_of_thousands(fits):
    texts = tuple(str(number) for number in range(10_000, 40_000))
    assert fits("23456", choice=texts)
    assert not fits("9999", choice=texts)


def test_lark_is_lark_even_if_it_looks_like_json(fits):
    assert fits("ab", lark='start: "a" b\nb: /[b-c]/')
    field, reason = refusal(lark='{"grammars": [{"lark_grammar": "start: /a/"}]}')
    assert field == f"{FIELD}.lark"
    assert reason


def test_gbnf_starts_at_root(fits):
    grammar = 'root ::= item ("," item)* # a list\nitem ::= [0-9]{1,3} | "x"\n'
    assert fits("12,x,007", gbnf=grammar)
    assert not fits("1234", gbnf=grammar)
    assert not fits("1,", gbnf=grammar)


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "", 'Unimplemented keys: ["uniqueItems"]'),
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "/properties/a~1b/items", 'Unimplemented keys: ["not"]'),
        ({"anyOf": [{"type": "null"}, {"type": "objec"}]}, "/anyOf/1", "Invalid type: objec"),
        ({"$defs": {"x": {"pattern": "(?=a)"}}, "items": {"$ref": "#/$defs/x"}}, "/$defs/x", "look-around"),
        ({"properties": {"a": {"$ref": "#/nope"}}}, "/properties/a", "Pointer '/nope' does not exist"),
        ({"properties": {"a": 3}}, "/properties/a", "schema must be an object or boolean"),
        ({"items": {"format": "nope"}}, "/items", "Unknown format: nope"),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, "", "required property 'x' is unsatis"),
        ({"$ref": "https://example.com/s.json"}, "", "does not fetch"),
    ],
)
def test_what_a_schema_cannot_have_is_named_with_its_place(schema, place, reason):
    field, description = refusal(json=json.dumps(schema))
    assert field == f"{FIELD}.json_schema"
    assert reason in description
    assert description.startswith(f"at {place}: ") if place else not description.startswith("at /")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not valid JSON: .*line 1 column 2"),
        ("[" * 100_000, "is nested deeper than 64 levels"),
        ('{"items":' * 64 + "{}" + "}" * 64, "is nested deeper than 64 levels"),
        ("NaN", "is not valid JSON: NaN is not a JSON value"),
        ('{"minimum": 1e999}', "is not valid JSON"),
        ("3", "must be a JSON object, the schema, or true"),
        ("false", "must be a JSON object, the schema, or true"),
        ('{"x-guidance": {"lenient": true}}', "must not have the key x-guidance"),
    ],
)
def test_what_is_no_schema_is_refused(text, reason):
    field, description = refusal(json=text)
    assert field == f"{FIELD}.json_schema"
    assert re.match(reason, description)


def test_a_schema_may_be_nested_64_levels_deep():
    assert grammar_source(StructuredOutputsParams(json='{"items":' * 63 + "{}" + "}" * 63))


@pytest.mark.parametrize(
    ("params", "name", "reason"),
    [
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"regex": r"(a)\1"}, "regex", "backreferences are not supported"),
        ({"regex": r"\bfoo"}, "regex", "lookarounds not supported"),
        ({"regex": "x(?=y)"}, "regex", "look-around"),
        ({"json_object": True, "whitespace_pattern": "[a"}, "whitespace_pattern", "unclosed character class"),
        ({"lark": "start: foo"}, "lark", 'at 1(8): unknown name: "foo"'),
        ({"lark": 'begin: "a"'}, "lark", "start"),
        ({"gbnf": 'other ::= "a"'}, "gbnf", "No 'root' rule"),
        ({"gbnf": "root ::= nope"}, "gbnf", "'nope' not found"),
        ({"gbnf": "root := x"}, "gbnf", "Expected ::="),
        ({"gbnf": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "gbnf", "is nested too deeply"),
        ({"gbnf": "".join(f'r{i} ::= "a"\n' for i in range(501))}, "gbnf", "at most 500 rules; got 501"),
    ],
)
def test_what_does_not_compile_is_refused_in_one_line(params, name, reason):
    field, description = refusal(**params)
    assert field == f"{FIELD}.{name}"
    assert reason in description
    assert "\n" not in description
    assert len(description) < 400
