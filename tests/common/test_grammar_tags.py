"""Structural tags in both of their forms: free text until a trigger, then the tag's own form."""

import json
from typing import Any

import pytest
from grammar_walks import FILES, VOCAB_SIZE

from headrace.common.byte_tokenizer import EOS_ID
from headrace.common.errors import InvalidRequest
from headrace.common.grammar_engine import build_grammar_tokenizer, new_matcher
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.grammar_source import grammar_source

SCHEMA = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"], "additionalProperties": False}


@pytest.fixture(scope="module")
def fits():
    tokenizer = build_grammar_tokenizer(FILES.files["tokenizer.json"].decode(), VOCAB_SIZE, (EOS_ID,))

    def check(text, value, **options):
        params = StructuredOutputsParams(structural_tag=json.dumps(value), **options)
        matcher = new_matcher(tokenizer, grammar_source(params))
        tokens = list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


def formatted(**value):
    return {"type": "structural_tag", "format": value}


def legacy(*begins, triggers=("<f=",)):
    structures = [{"begin": begin, "schema": SCHEMA, "end": "</f>"} for begin in begins]
    return {"structures": structures, "triggers": list(triggers)}


def tag(begin="<t>", end="</t>", **content):
    return {
        "type": "tag",
        "begin": begin,
        "content": content or {"type": "json_schema", "json_schema": SCHEMA},
        "end": end,
    }


TEXT_ONLY = ("", "hello\nthere", "a <f", "1 < f=2")


def test_text_is_free_and_a_trigger_begins_a_tag_that_follows_its_schema(fits):
    value = legacy("<f=a>", "<f=bb>")
    good = '<f=a>{"q":1}</f>', 'hi <f=bb>{"q": -7}</f> and <f=a>{"q":0}</f> bye <f'
    bad = "<f=c>", "<f=a>x", '<f=a>{"q":"1"}</f>', '<f=a>{"q":1}', "hi <f="
    for text in TEXT_ONLY + good:
        assert fits(text, value), text
    for text in bad:
        assert not fits(text, value), text


def test_tags_of_several_triggers_are_told_apart(fits):
    value = legacy("<f=a>", "[call]", triggers=("<f=", "[c"))
    assert fits('x [call]{"q":1}</f> y <f=a>{"q":1}</f>', value)
    assert not fits("[cat]", value)
    assert fits("[bat]", value)


def test_the_named_type_of_the_older_form_is_taken(fits):
    assert fits('<f=a>{"q":1}</f>', {"type": "structural_tag", **legacy("<f=a>")})


def test_the_options_on_json_hold_inside_tags(fits):
    open_schema = {"type": "object", "properties": {"q": {"type": "integer"}}}
    value = {"structures": [{"begin": "<f>", "schema": open_schema, "end": ""}], "triggers": ["<f>"]}
    assert fits('<f>{ "x":1}', value)
    assert not fits('<f>{ "x":1}', value, disable_any_whitespace=True)
    assert fits('<f>{"x":1}', value, disable_any_whitespace=True)
    assert not fits('<f>{"x":1}', value, disable_additional_properties=True)


def test_triggered_tags_can_be_required_and_be_the_last(fits):
    tags = {"triggers": ["<t"], "tags": [tag()]}
    one, two = '<t>{"q":1}</t>', '<t>{"q":1}</t><t>{"q":2}</t>'
    for at_least_one in (False, True):
        for only_one in (False, True):
            value = formatted(type="triggered_tags", **tags, at_least_one=at_least_one, stop_after_first=only_one)
            assert fits("text", value) == (not at_least_one)
            assert fits("text" + one, value)
            assert fits(one + "text", value) == (not only_one)
            assert fits(two, value) == (not only_one)


def test_sequences_alternatives_and_constants_compose(fits):
    value = formatted(
        type="sequence",
        elements=[
            {"type": "const_string", "value": "A:"},
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": r"\d{2}/"},
                    {"type": "grammar", "grammar": 'root ::= "zz" | "z"'},
                ],
            },
            tag("<t>", ["</t>", "!"], type="const_string", value="in"),
            {"type": "any_text"},
        ],
    )
    for text in ("A:12/<t>in</t>", "A:zz<t>in!", "A:z<t>in!and more\n"):
        assert fits(text, value), text
    for text in ("A:1/<t>in!", "A:zzz<t>in!", "A:12/<t>out!", "A:12/"):
        assert not fits(text, value), text


def test_free_text_in_a_tag_goes_to_the_first_end(fits):
    value = formatted(type="sequence", elements=[tag("<think>", "</think>", type="any_text"), tag()])
    assert fits('<think>a < b\n</think><t>{"q":1}</t>', value)
    assert not fits("<think>a</think>b</think>", value)
    assert not fits("<think>a", value)


def test_tags_with_a_separator_form_a_list(fits):
    value = formatted(type="tags_with_separator", tags=[tag(type="const_string", value="x")], separator=", ")
    for text in ("", "<t>x</t>", "<t>x</t>, <t>x</t>, <t>x</t>"):
        assert fits(text, value), text
    for text in ("<t>x</t>,", "<t>x</t><t>x</t>"):
        assert not fits(text, value), text
    assert not fits("", formatted(**{**value["format"], "at_least_one": True}))
    assert not fits("<t>x</t>, <t>x</t>", formatted(**{**value["format"], "stop_after_first": True}))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "must be a JSON object"),
        ({"format": {"type": []}, "type": "structural_tag"}, "at /format: type [] is not supported"),
        ({"format": 5, "type": "structural_tag"}, "at /format: must be an object"),
        (
            {"format": {"type": "tags_with_separator", "tags": [1], "separator": ","}, "type": "structural_tag"},
            "at /format/tags/0: must be an object",
        ),
        ({}, "needs structures, triggers"),
        ({"structures": [], "triggers": ["a"]}, "at /structures: must be a list that is not empty"),
        ({"structures": [1], "triggers": ["a"]}, "at /structures/0: must be an object"),
        ({"structures": [{"begin": "a", "end": ""}], "triggers": ["a"]}, "at /structures/0: needs schema"),
        ({**legacy("<f=a>"), "more": 1}, "more is not supported"),
        (legacy("<g=a>"), "at /structures/0/begin: must start with one of the triggers"),
        (legacy("<f=a>", triggers=("<f=", "x")), 'no tag begins with "x"'),
        (legacy("<f=a>", triggers=("",)), "at /triggers: must be texts that are not empty"),
        ({"type": "other", "format": {"type": "any_text"}}, 'type must be "structural_tag"; got "other"'),
        (formatted(type="qwen_xml_parameter"), 'type "qwen_xml_parameter" is not supported; supported are any_text'),
        (formatted(type="sequence", elements=[{"type": "any_text"}, tag()]), "at /format/elements/0: any_text must be"),
        (formatted(type="regex", pattern="a", excludes=[]), "at /format: excludes is not supported"),
        (formatted(type="const_string", value=3), "at /format/value: must be a string"),
        (formatted(type="regex", pattern="(a"), "unclosed group"),
        (formatted(type="json_schema", json_schema=[]), "at /format/json_schema: must be a JSON object"),
        (formatted(type="json_schema", json_schema={"not": {}}), 'Unimplemented keys: ["not"]'),
        (formatted(type="tag", begin="a", content={"type": "any_text"}, end=""), "at /format/end: must not be empty"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_its_place(value, reason):
    with pytest.raises(InvalidRequest) as caught:
        grammar_source(StructuredOutputsParams(structural_tag=json.dumps(value)))
    (violation,) = caught.value.violations
    assert violation.field == "sampling.structured_outputs.structural_tag"
    assert reason in violation.description


def test_tags_are_nested_at_most_80_levels_deep():
    deep: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(50):
        deep = {"type": "sequence", "elements": [deep]}
    with pytest.raises(InvalidRequest, match="is nested deeper than 80 levels"):
        grammar_source(StructuredOutputsParams(structural_tag=json.dumps(formatted(**deep))))
