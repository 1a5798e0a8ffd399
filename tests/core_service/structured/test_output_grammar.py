"""Outputs drawn from the masks match their constraint, and end exactly where they may."""

import json
import re

import numpy as np
import pytest
from grammar_walks import EMPTY, FILES, PIECES, VOCAB_SIZE, allowed, start, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schema_checker import faults

from headrace.common.byte_tokenizer import BOS_ID, EOS_ID
from headrace.common.errors import InvalidRequest
from headrace.common.grammar_rules import StructuredOutputsParams

SEEDS = st.integers(0, 2**32 - 1)
REGEXES = (
    "[0-9]{3}-[a-f]{2}",
    "(abc|true|yes)*x",
    "(10){1,4}|é+",
    "a?b?c?",
    "(0|1(01*0)*1)+",
    "^y?e?s$",
    r"\d+\.\d{1,2}/",
)
CHOICES = ("yes", "no", "yes!", "abc", "abd", "é", 'quote "', "line\nbreak", "back\\slash")
END_IDS = st.sampled_from([(EOS_ID,), (), (BOS_ID,), (BOS_ID, EOS_ID), (ord("q"),), (319,)])


def byte_ids(text):
    return tuple(text.encode())


@st.composite
def json_schemas(draw, depth=2):
    """Schemas whose values are short."""
    kinds = ["integer", "number", "enum", "string", "pattern", "const", "boolean"]
    kind = draw(st.sampled_from(kinds + ["object", "array", "anyOf"] * (depth > 0)))
    if kind == "integer":
        low = draw(st.integers(-200, 200))
        return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 300))}
    if kind == "number":
        low = draw(st.integers(-50, 50))
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + draw(st.integers(1, 9))}
    if kind == "enum":
        return {"enum": draw(st.lists(st.sampled_from(["yes", "a", 1, -2.5, None, True, [1], {"k": "v"}]), min_size=1))}
    if kind == "string":
        low = draw(st.integers(0, 3))
        return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(["^[a-c]{2}$", "^(true|10)+$", "^é?-[0-9]$"]))}
    if kind == "const":
        return {"const": draw(st.sampled_from(["abc", 100, {"a": [True, None]}]))}
    if kind == "array":
        low = draw(st.integers(0, 2))
        return {
            "type": "array",
            "items": draw(json_schemas(depth=depth - 1)),
            "minItems": low,
            "maxItems": low + draw(st.integers(0, 2)),
        }
    if kind == "anyOf":
        return {"anyOf": draw(st.lists(json_schemas(depth=depth - 1), min_size=1, max_size=3))}
    if kind == "boolean":
        return {"type": "boolean"}
    names = draw(st.lists(st.sampled_from(["a", "ab", "true", "x y", "é"]), unique=True, max_size=3))
    return {
        "type": "object",
        "properties": {name: draw(json_schemas(depth=depth - 1)) for name in names},
        "required": draw(st.lists(st.sampled_from(names), unique=True)) if names else [],
        "additionalProperties": False,
    }


@settings(max_examples=150, deadline=None)
@given(schema=json_schemas(), seed=SEEDS, compact=st.booleans())
def test_outputs_of_a_json_schema_parse_and_validate(backend, schema, seed, compact):
    params = StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=compact)
    outcome = walk(backend, start(backend, params), seed, most=3000)
    if outcome.ended:
        value = json.loads(outcome.text)
        assert faults(value, schema) == []
        if compact:
            assert not re.search(r"[:,\[{]\s", re.sub(r'"(\\.|[^"\\])*"', '""', outcome.text))
    else:
        assert not compact, "every value is short; only white space may go on"


@settings(max_examples=60, deadline=None)
@given(regex=st.sampled_from(REGEXES), seed=SEEDS)
def test_outputs_of_a_regex_match_in_full(backend, regex, seed):
    outcome = walk(backend, start(backend, StructuredOutputsParams(regex=regex)), seed)
    if outcome.ended:
        assert re.fullmatch(regex, outcome.text)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, size=st.integers(1, len(CHOICES)), eos=END_IDS)
def test_a_mask_allows_the_tokens_that_a_choice_can_go_on_with_and_the_end_where_one_is_complete(
    backend, seed, size, eos
):
    choices = CHOICES[-size:]

    def check(tokens, ids):
        text = b"".join(PIECES[token] for token in tokens)
        rests = [choice.encode()[len(text) :] for choice in choices if choice.encode().startswith(text)]
        fitting = {i for i, piece in PIECES.items() if any(rest.startswith(piece) for rest in rests)} - set(eos)
        complete = b"" in rests
        assert ids & {*eos, BOS_ID, EOS_ID} == (set(eos) if complete else set())
        # Where only one byte can come, llguidance asks for the tokenizer's own token for it.
        forced = not complete and len({rest[:1] for rest in rests}) == 1
        assert ids - set(eos) == fitting or (forced and ids and ids <= fitting)

    outcome = walk(backend, start(backend, StructuredOutputsParams(choice=choices), eos=eos), seed, eos=eos, see=check)
    assert outcome.ended
    assert outcome.text in choices


def test_ids_without_text_are_never_allowed(backend):
    grammar = start(backend, StructuredOutputsParams(regex="(.|\n)*"))
    assert max(allowed(backend, grammar)) == max(PIECES)


def test_special_tokens_are_never_part_of_a_text(backend):
    grammar = start(backend, StructuredOutputsParams(json='{"type": "string"}'))
    for token in byte_ids('"x'):
        assert grammar.accept(token)
    assert allowed(backend, grammar).isdisjoint({BOS_ID, EOS_ID})
    assert not grammar.accept(BOS_ID)


def test_a_special_token_comes_where_a_lark_grammar_names_it(backend):
    grammar = start(backend, StructuredOutputsParams(lark='start: ("a" | "b") <bos>'))
    assert grammar.accept(ord("a"))
    assert allowed(backend, grammar) == {BOS_ID}
    assert grammar.accept(BOS_ID)
    assert grammar.exhausted


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, wrong=st.sampled_from([0, ord("~"), BOS_ID, VOCAB_SIZE - 1]), regex=st.sampled_from(REGEXES))
def test_a_refused_token_changes_nothing(backend, seed, wrong, regex):
    grammar = start(backend, StructuredOutputsParams(regex=regex))

    def try_wrong(tokens, ids):
        assert not grammar.accept(wrong)
        assert allowed(backend, grammar) == ids

    outcome = walk(backend, grammar, seed, see=try_wrong)
    assert not outcome.ended or re.fullmatch(regex, outcome.text)


def test_an_output_is_exhausted_when_nothing_can_follow(backend):
    grammar = start(backend, StructuredOutputsParams(regex="ab|abc"), eos=())
    exhausted = []
    for token in byte_ids("abc"):
        assert grammar.accept(token)
        exhausted.append(grammar.exhausted)
    assert exhausted == [False, False, True]
    assert not grammar.accept(ord("c"))


def test_whether_an_output_is_exhausted_can_be_told_while_its_mask_is_filled(backend, monkeypatch):
    grammar = start(backend, StructuredOutputsParams(regex="ab"), eos=())
    assert grammar.accept(ord("a"))
    assert grammar.accept(ord("b"))
    monkeypatch.setattr(grammar, "_matcher", None)  # it may not be touched from two threads
    assert grammar.exhausted


def test_an_accepted_end_token_exhausts_the_output(backend):
    grammar = start(backend, StructuredOutputsParams(regex="a*"))
    assert grammar.accept(EOS_ID)
    assert grammar.exhausted
    assert not grammar.accept(ord("a"))


def test_a_stop_token_of_the_request_that_the_grammar_lacks_is_not_allowed(backend):
    grammar = start(backend, StructuredOutputsParams(regex="[a-c]*"))
    assert ord("q") not in allowed(backend, grammar)
    assert not grammar.accept(ord("q"))


def test_before_its_ids_have_appeared_a_grammar_allows_everything(backend):
    grammar = start(backend, StructuredOutputsParams(choice=("yes", "no")), after=(7, 8))
    for token in (7, 7, 9, EOS_ID, 7):
        assert allowed(backend, grammar) == set(range(VOCAB_SIZE))
        assert not grammar.exhausted
        assert grammar.accept(token)
    assert grammar.accept(8)
    assert {ord("n"), ord("y")} <= allowed(backend, grammar) <= set(PIECES)
    assert not grammar.accept(ord("x"))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, regex=st.sampled_from(REGEXES), after=st.sampled_from([(), (5,), (5, 5, 6)]), data=st.data())
def test_a_resumed_output_stands_where_it_stood(backend, seed, regex, after, data):
    params = StructuredOutputsParams(regex=regex)
    before = (9, *after) if after else ()
    first = start(backend, params, after=after, output=before)
    outcome = walk(backend, first, seed)
    cut = data.draw(st.integers(0, len(outcome.tokens)))
    output = (*before, *outcome.tokens[:cut])
    resumed = start(backend, params, after=after, output=output)
    again = start(backend, params, after=after)
    for token in output:
        assert again.accept(token)
    assert resumed.exhausted == again.exhausted
    assert allowed(backend, resumed) == allowed(backend, again)


def test_a_resumed_output_may_end_in_its_end_token(backend):
    assert start(backend, StructuredOutputsParams(regex="a+"), output=(ord("a"), EOS_ID)).exhausted


@pytest.mark.parametrize("output", [byte_ids("ax"), (EOS_ID,), (ord("a"), EOS_ID, ord("a"))])
def test_generated_tokens_that_do_not_fit_are_refused_by_number(backend, output):
    compiled = backend.compile(StructuredOutputsParams(regex="a+"), (), (EOS_ID,)).result(60)
    with pytest.raises(InvalidRequest, match="generated_token_ids"):
        compiled.start(np.array(output, np.int32))
    assert not compiled.start(EMPTY).exhausted


def test_outputs_that_start_from_one_grammar_do_not_feel_each_other(backend):
    compiled = backend.compile(StructuredOutputsParams(choice=("abc", "no")), (), (EOS_ID,)).result(60)
    first, second = compiled.start(EMPTY), compiled.start(EMPTY)
    assert first.accept(ord("n"))
    assert ord("a") in allowed(backend, second)
    assert allowed(backend, first) == {ord("o")}


def test_the_small_vocabulary_is_what_these_tests_think():
    tokenizer = FILES.build_tokenizer()
    assert {i: tokenizer.decode([i]) for i in range(258, 258 + 8)} == {
        i: PIECES[i].decode() for i in range(258, 258 + 8)
    }
