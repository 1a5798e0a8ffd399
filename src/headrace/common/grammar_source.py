r"""From a constraint to the grammar that llguidance takes; what that costs is up to the user (see grammar_worker).

json_schema, json_object   llguidance's own JSON schema compiler, strict: what it cannot enforce is refused
regex                      one lexeme, matched in full; \d is [0-9]
choice                     alternatives of literal texts
lark                       as it is
gbnf                       rewritten as Lark; its rule root becomes start
structural_tag             Lark: free text, tags that a trigger begins, JSON inside them (grammar_tags)
"""

import json

from headrace.common.errors import InvalidRequest, Violation
from headrace.common.grammar_engine import grammar_fault, lark_regex
from headrace.common.grammar_gbnf import lark_from_gbnf
from headrace.common.grammar_rules import FIELD, FIELDS, StructuredOutputsParams, constraint_kind
from headrace.common.grammar_schema import (
    MAX_SCHEMA_NESTING,
    ConstraintError,
    Json,
    locate_fault,
    parse_json,
    prepared_schema,
    schema_grammar,
)
from headrace.common.grammar_tags import MAX_TAG_NESTING, tag_grammar


def grammar_source(params: StructuredOutputsParams) -> str:
    """The grammar's text, known to be free of faults that do not depend on the vocabulary.

    The parameters must keep the rules of `constraint_violations`. Raises InvalidRequest with the field, and for JSON
    schemas the path in the schema.
    """
    kind = constraint_kind(params)
    assert kind is not None, "checked before"
    whitespace = "" if params.disable_any_whitespace else params.whitespace_pattern
    if whitespace and (fault := grammar_fault(f"start: /{lark_regex(whitespace)}/")):
        raise InvalidRequest([Violation(f"{FIELD}.whitespace_pattern", fault)])
    try:
        if kind in ("json", "json_object"):
            text = params.json if params.json is not None else '{"type": "object"}'
            schema = prepared_schema(
                parse_json(text, MAX_SCHEMA_NESTING),
                whitespace=whitespace,
                close_objects=params.disable_additional_properties,
            )
            return _checked_schema(schema)
        source = _lark_source(kind, params, whitespace)
        if fault := grammar_fault(source):
            raise ConstraintError(fault)
        return source
    except ConstraintError as error:
        raise InvalidRequest([Violation(FIELDS[kind], str(error))]) from None


def _checked_schema(schema: dict[str, Json]) -> str:
    source = schema_grammar(schema)
    if fault := grammar_fault(source):
        place = locate_fault(schema, fault)
        raise ConstraintError(f"at {place}: {fault}" if place else fault)
    return source


def _lark_source(kind: str, params: StructuredOutputsParams, whitespace: str | None) -> str:
    if params.structural_tag is not None:
        value = parse_json(params.structural_tag, MAX_TAG_NESTING)
        return tag_grammar(value, whitespace=whitespace, close_objects=params.disable_additional_properties)
    if params.regex is not None:
        lark = f"start: /{lark_regex(params.regex)}/"
    elif params.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(params.choice))
        lark = f"start: TEXT\nTEXT: {texts}"  # as one lexeme, there may be tens of thousands
    elif params.gbnf is not None:
        lark = lark_from_gbnf(params.gbnf)
    else:
        assert params.lark is not None, kind
        lark = params.lark
    return json.dumps({"grammars": [{"lark_grammar": lark}]})
