"""JSON schemas for llguidance: parsed, bounded, with the request's options; and where in a schema a fault lies."""

import json
from collections.abc import Iterator
from typing import Any

from headrace.common.grammar_engine import grammar_fault

MAX_SCHEMA_NESTING = 64
# Between two tokens of JSON: some spaces, then a line break and the indentation of a deep value. Without a bound, small
# models write line breaks to the end of their context.
DEFAULT_WHITESPACE = r"[ \t]{0,8}(\r?\n[ \t]{0,64})?"
MAX_PROBES = 256

_OPTIONS = "x-guidance"  # llguidance reads its options from this key of a schema
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)

Json = Any


class ConstraintError(Exception):
    """The constraint cannot be used; the message says why."""


def parse_json(text: str, max_nesting: int) -> Json:
    """The value of a JSON text. Raises ConstraintError."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, allow_nan=False)  # 1e999 is infinite in Python
    except RecursionError:
        raise ConstraintError(f"is nested deeper than {max_nesting} levels") from None
    except ValueError as error:
        raise ConstraintError(f"is not valid JSON: {error}") from None
    if nesting(value) > max_nesting:
        raise ConstraintError(f"is nested deeper than {max_nesting} levels")
    return value


def nesting(value: Json) -> int:
    """Levels of objects and arrays inside each other."""
    levels, inside = 0, [value]
    while inside := [item for item in inside if isinstance(item, dict | list)]:
        levels += 1
        inside = [item for holder in inside for item in (holder.values() if isinstance(holder, dict) else holder)]
    return levels


def prepared_schema(schema: Json, *, whitespace: str | None, close_objects: bool) -> dict[str, Json]:
    """The schema that llguidance gets. `whitespace` is a pattern, empty for none at all, None for the default.

    Raises ConstraintError. `close_objects` forbids properties that the schema does not name.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ConstraintError("must be a JSON object, the schema, or true")
    if _OPTIONS in schema:
        raise ConstraintError(f"must not have the key {_OPTIONS}: the request's own fields set these options")
    if close_objects:
        schema = _closed(schema)
    options = {
        "whitespace_flexible": whitespace != "",
        "whitespace_pattern": DEFAULT_WHITESPACE if whitespace is None else whitespace or None,
    }
    return {**schema, _OPTIONS: {name: value for name, value in options.items() if value is not None}}


def schema_grammar(schema: dict[str, Json]) -> str:
    """llguidance's grammar of a prepared schema."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def locate_fault(schema: dict[str, Json], fault: str) -> str:
    """JSON pointer to the smallest part of a schema that has the fault by itself; empty for the whole schema.

    llguidance names no place, so parts are compiled one by one, at most MAX_PROBES of them.
    """
    pointer, probes = "", 0
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    part: Json = schema
    while True:
        for step, child in _children(part):
            probes += 1
            if probes > MAX_PROBES:
                return pointer
            alone = {**shared, **child, _OPTIONS: schema[_OPTIONS]} if isinstance(child, dict) else child
            if grammar_fault(schema_grammar(alone)) == fault:
                pointer, part = pointer + step, child
                # What is wrong in a definition is not to be found again through itself.
                shared = {} if step.startswith(("/$defs/", "/definitions/")) else shared
                break
        else:
            return pointer


def _children(schema: Json) -> Iterator[tuple[str, Json]]:
    if not isinstance(schema, dict):
        return
    for name in _MAPS:
        if isinstance(entries := schema.get(name), dict):
            for key, child in entries.items():
                yield f"/{name}/{key.replace('~', '~0').replace('/', '~1')}", child
    for name in _LISTS:
        if isinstance(items := schema.get(name), list):
            for index, child in enumerate(items):
                yield f"/{name}/{index}", child
    for name in _SINGLES:
        if isinstance(child := schema.get(name), dict):
            yield f"/{name}", child


def _closed(schema: Json) -> Json:
    """The schema with additionalProperties = false wherever it names properties and does not say."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in _MAPS:
        if isinstance(entries := schema.get(name), dict):
            result[name] = {key: _closed(child) for key, child in entries.items()}
    for name in _LISTS:
        if isinstance(items := schema.get(name), list):
            result[name] = [_closed(child) for child in items]
    for name in _SINGLES:
        if isinstance(child := schema.get(name), dict):
            result[name] = _closed(child)
    if "properties" in schema or "patternProperties" in schema:
        result.setdefault("additionalProperties", False)
    return result


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a JSON value")
