"""A small JSON schema validator, written from the specification (draft 2020-12), to check outputs with."""

import datetime
import json
import math
import re
import uuid
from collections.abc import Callable
from typing import Any

Json = Any
Check = Callable[[Json, Json, Json, Json, str], list[str]]

_TYPES: dict[str, Callable[[Json], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
}
_FORMATS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(text.replace("Z", "+00:00")),
    "uuid": uuid.UUID,
}


def faults(value: Json, schema: Json, root: Json = None, place: str = "$") -> list[str]:
    """What in a value breaks the schema; empty if it is valid. Knows only the keywords below: others raise KeyError."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return [] if schema else [f"{place}: nothing is allowed here"]
    found: list[str] = []
    for keyword, argument in schema.items():
        found += _KEYWORDS[keyword](value, argument, schema, root, place)
    return found


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _resolve(root: Json, pointer: str) -> Json:
    assert pointer.startswith("#"), pointer
    for step in pointer[1:].split("/")[1:]:
        root = root[step.replace("~1", "/").replace("~0", "~")]
    return root


def _same(left: Json, right: Json) -> bool:
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _unless(good: bool, text: str) -> list[str]:
    return [] if good else [text]


def _type(value: Json, names: Json, schema: Json, root: Json, place: str) -> list[str]:
    names = [names] if isinstance(names, str) else names
    return _unless(any(_TYPES[name](value) for name in names), f"{place}: {value!r} is not {names}")


def _properties(value: Json, properties: Json, schema: Json, root: Json, place: str) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [
        fault
        for name, child in properties.items()
        if name in value
        for fault in faults(value[name], child, root, f"{place}.{name}")
    ]


def _pattern_properties(value: Json, patterns: Json, schema: Json, root: Json, place: str) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [
        fault
        for pattern, child in patterns.items()
        for name, entry in value.items()
        if re.search(pattern, name)
        for fault in faults(entry, child, root, f"{place}.{name}")
    ]


def _additional_properties(value: Json, child: Json, schema: Json, root: Json, place: str) -> list[str]:
    if not isinstance(value, dict):
        return []
    named = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    return [
        fault
        for name, entry in value.items()
        if name not in named and not any(re.search(pattern, name) for pattern in patterns)
        for fault in faults(entry, child, root, f"{place}.{name}")
    ]


def _required(value: Json, names: Json, schema: Json, root: Json, place: str) -> list[str]:
    missing = [name for name in names if isinstance(value, dict) and name not in value]
    return _unless(not missing, f"{place}: lacks {missing}")


def _items(value: Json, child: Json, schema: Json, root: Json, place: str) -> list[str]:
    start = len(schema.get("prefixItems", []))
    entries = list(enumerate(value))[start:] if isinstance(value, list) else []
    return [fault for i, entry in entries for fault in faults(entry, child, root, f"{place}[{i}]")]


def _prefix_items(value: Json, children: Json, schema: Json, root: Json, place: str) -> list[str]:
    pairs = zip(value, children, strict=False) if isinstance(value, list) else []
    return [fault for i, (entry, child) in enumerate(pairs) for fault in faults(entry, child, root, f"{place}[{i}]")]


def _any_of(value: Json, children: Json, schema: Json, root: Json, place: str) -> list[str]:
    return _unless(any(not faults(value, child, root) for child in children), f"{place}: {value!r} fits none of anyOf")


def _one_of(value: Json, children: Json, schema: Json, root: Json, place: str) -> list[str]:
    count = sum(not faults(value, child, root) for child in children)
    return _unless(count == 1, f"{place}: {value!r} fits {count} of oneOf")


def _all_of(value: Json, children: Json, schema: Json, root: Json, place: str) -> list[str]:
    return [fault for child in children for fault in faults(value, child, root, place)]


def _format(value: Json, name: Json, schema: Json, root: Json, place: str) -> list[str]:
    if isinstance(value, str):
        try:
            _FORMATS[name](value)
        except ValueError:
            return [f"{place}: {value!r} is no {name}"]
    return []


def _compared(applies: Callable[[Json], bool], holds: Callable[[Json, Json], bool]) -> Check:
    def check(value: Json, limit: Json, schema: Json, root: Json, place: str) -> list[str]:
        return _unless(not applies(value) or holds(value, limit), f"{place}: {value!r} breaks the bound {limit}")

    return check


def _array(value: Json) -> bool:
    return isinstance(value, list)


def _text(value: Json) -> bool:
    return isinstance(value, str)


def _multiple(value: Json, of: Json) -> bool:
    return math.isclose(value / of, round(value / of), abs_tol=1e-9)


def _nothing(value: Json, argument: Json, schema: Json, root: Json, place: str) -> list[str]:
    return []


_KEYWORDS: dict[str, Check] = {
    "type": _type,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "required": _required,
    "items": _items,
    "prefixItems": _prefix_items,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "allOf": _all_of,
    "format": _format,
    "$ref": lambda value, pointer, schema, root, place: faults(value, _resolve(root, pointer), root, place),
    "enum": lambda value, values, schema, root, place: _unless(
        any(_same(value, one) for one in values), f"{place}: {value!r} is none of {values}"
    ),
    "const": lambda value, one, schema, root, place: _unless(_same(value, one), f"{place}: {value!r} is not {one!r}"),
    "minimum": _compared(_is_number, lambda value, limit: value >= limit),
    "maximum": _compared(_is_number, lambda value, limit: value <= limit),
    "exclusiveMinimum": _compared(_is_number, lambda value, limit: value > limit),
    "exclusiveMaximum": _compared(_is_number, lambda value, limit: value < limit),
    "multipleOf": _compared(_is_number, _multiple),
    "minLength": _compared(_text, lambda value, limit: len(value) >= limit),
    "maxLength": _compared(_text, lambda value, limit: len(value) <= limit),
    "pattern": _compared(_text, lambda value, pattern: re.search(pattern, value) is not None),
    "minItems": _compared(_array, lambda value, limit: len(value) >= limit),
    "maxItems": _compared(_array, lambda value, limit: len(value) <= limit),
    "$defs": _nothing,
    "title": _nothing,
    "description": _nothing,
}
