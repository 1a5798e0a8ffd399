"""Structural tags: free text in which a trigger begins a tag, and the tag's inside follows a schema.

Two forms are in use, and both are taken:

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": ..., ...}}

A format is one of const_string, json_schema, regex, grammar (GBNF), sequence, or, tag, any_text, triggered_tags and
tags_with_separator. Triggers and tags are matched as text; special tokens can be named in a Lark grammar only.
"""

import json
from collections.abc import Callable
from typing import Any

from headrace.common.grammar_engine import lark_regex
from headrace.common.grammar_gbnf import lark_from_gbnf
from headrace.common.grammar_schema import MAX_SCHEMA_NESTING, ConstraintError, Json, nesting, prepared_schema

MAX_TAG_NESTING = MAX_SCHEMA_NESTING + 16


def tag_grammar(value: Json, *, whitespace: str | None, close_objects: bool) -> str:
    """llguidance's grammar of a structural tag; the options are those of `prepared_schema`. Raises ConstraintError."""
    writer = _LarkWriter(whitespace, close_objects)
    if not isinstance(value, dict):
        raise ConstraintError("must be a JSON object")
    if "format" in value:
        _known_keys(value, "", required=("type", "format"))
        start = writer.format(value["format"], "/format", last=True)
    else:
        start = writer.triggered(_as_triggered_tags(value), "", last=True, tags="structures")
    if value.get("type", "structural_tag") != "structural_tag":
        raise ConstraintError(f'type must be "structural_tag"; got {json.dumps(value["type"])[:100]}')
    return writer.grammar(start)


def _as_triggered_tags(value: dict[str, Json]) -> dict[str, Json]:
    """The older form in the words of the newer one."""
    _known_keys(value, "", required=("structures", "triggers"), optional=("type",))
    tags = []
    for index, entry in enumerate(_list(value, "structures", "")):
        place = f"/structures/{index}"
        if not isinstance(entry, dict):
            raise ConstraintError(f"at {place}: must be an object")
        _known_keys(entry, place, required=("begin", "schema", "end"))
        content = {"type": "json_schema", "json_schema": entry["schema"]}
        tags.append({"type": "tag", "begin": entry["begin"], "content": content, "end": entry["end"]})
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}


class _LarkWriter:
    """Writes one rule a format; every method returns the name of the rule, or a piece of Lark that stands for it."""

    def __init__(self, whitespace: str | None, close_objects: bool) -> None:
        self._whitespace = whitespace
        self._close_objects = close_objects
        self._rules: list[str] = ["TEXT: /(.|\\n)*/"]
        self._side_grammars: list[dict[str, str]] = []
        self._formats: dict[str, Callable[[dict[str, Json], str], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._gbnf,
            "or": self._or,
            "tag": self.tag,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, start: str) -> str:
        """The whole, for llguidance."""
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *self._side_grammars]})

    def format(self, value: Json, place: str, *, last: bool) -> str:
        """Any format. Free text has no end of its own, so it may stand only where nothing follows: `last`."""
        if not isinstance(value, dict):
            raise ConstraintError(f"at {place}: must be an object")
        kind = value.get("type")
        if kind == "any_text":
            _known_keys(value, place, required=("type",))
            return self._any_text(place, last=last)
        if kind == "sequence":
            return self._sequence(value, place, last=last)
        if kind == "triggered_tags":
            return self.triggered(value, place, last=last)
        if not isinstance(kind, str) or kind not in self._formats:
            known = ", ".join(sorted([*self._formats, "any_text", "sequence", "triggered_tags"]))
            raise ConstraintError(f"at {place}: type {json.dumps(kind)[:100]} is not supported; supported are {known}")
        return self._formats[kind](value, place)

    def tag(self, value: Json, place: str, skip: int = 0) -> str:
        """A tag without the first `skip` characters of its beginning."""
        if not isinstance(value, dict):
            raise ConstraintError(f"at {place}: must be an object")
        _known_keys(value, place, required=("begin", "content", "end"), optional=("type",))
        begin, ends = _text(value, "begin", place), value["end"]
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise ConstraintError(f"at {place}/end: must be a string, or a list of strings")
        content = value["content"]
        if isinstance(content, dict) and content.get("type") == "any_text":
            _known_keys(content, f"{place}/content", required=("type",))
            if not all(ends):
                raise ConstraintError(f"at {place}/end: must not be empty after free text")
            inside = " | ".join(self._until(end) for end in ends)
        else:
            closing = " | ".join(_literal(end) for end in ends)
            inside = f"{self.format(content, f'{place}/content', last=False)} ({closing})"
        return self._rule(f"{_literal(begin[skip:])} ({inside})")

    def triggered(self, value: dict[str, Json], place: str, *, last: bool, tags: str = "tags") -> str:
        """Free text with tags in it; `tags` is what the user calls their list."""
        _known_keys(value, place, required=("triggers", "tags"), optional=("type", "at_least_one", "stop_after_first"))
        if not last:
            raise ConstraintError(f"at {place}: triggered_tags must be the last of a sequence")
        triggers = _list(value, "triggers", place)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ConstraintError(f"at {place}/triggers: must be texts that are not empty")
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, entry in enumerate(_list(value, "tags", place)):
            here = f"{place}/{tags}/{index}"
            begin = _text(entry, "begin", here)
            fitting = sorted((trigger for trigger in by_trigger if begin.startswith(trigger)), key=len)
            if not fitting:
                raise ConstraintError(f"at {here}/begin: must start with one of the triggers")
            # Text ends at the first trigger that is complete in it, which is the shortest.
            by_trigger[fitting[0]].append(self.tag(entry, here, skip=len(fitting[0])))
        if unused := [trigger for trigger, rules in by_trigger.items() if not rules]:
            raise ConstraintError(f"at {place}/triggers: no tag begins with {json.dumps(unused[0])[:100]}")
        branches = [f"{self._until(trigger)} ({' | '.join(rules)})" for trigger, rules in by_trigger.items()]
        one = self._rule(" | ".join(branches))
        at_least_one, only_one = bool(value.get("at_least_one")), bool(value.get("stop_after_first"))
        if only_one:
            return one if at_least_one else self._rule(f"{one} | TEXT")
        return self._rule(f"{one}{'+' if at_least_one else '*'} TEXT")

    def _tags_with_separator(self, value: dict[str, Json], place: str) -> str:
        _known_keys(value, place, required=("type", "tags", "separator"), optional=("at_least_one", "stop_after_first"))
        tags = " | ".join(
            self.tag(entry, f"{place}/tags/{index}") for index, entry in enumerate(_list(value, "tags", place))
        )
        one = self._rule(tags)
        more = "" if value.get("stop_after_first") else f" ({_literal(_text(value, 'separator', place))} {one})*"
        return self._rule(f"{one}{more}" if value.get("at_least_one") else f"({one}{more})?")

    def _const_string(self, value: dict[str, Json], place: str) -> str:
        _known_keys(value, place, required=("type", "value"))
        return _literal(_text(value, "value", place))

    def _json_schema(self, value: dict[str, Json], place: str) -> str:
        _known_keys(value, place, required=("type", "json_schema"))
        if nesting(value["json_schema"]) > MAX_SCHEMA_NESTING:
            raise ConstraintError(f"at {place}/json_schema: is nested deeper than {MAX_SCHEMA_NESTING} levels")
        try:
            schema = prepared_schema(
                value["json_schema"], whitespace=self._whitespace, close_objects=self._close_objects
            )
        except ConstraintError as error:
            raise ConstraintError(f"at {place}/json_schema: {error}") from None
        return self._rule(f"%json {json.dumps(schema)}")

    def _regex(self, value: dict[str, Json], place: str) -> str:
        _known_keys(value, place, required=("type", "pattern"))
        name = f"RX{len(self._rules)}"
        self._rules.append(f"{name}: /{lark_regex(_text(value, 'pattern', place))}/")
        return name

    def _gbnf(self, value: dict[str, Json], place: str) -> str:
        _known_keys(value, place, required=("type", "grammar"))
        name = f"side{len(self._side_grammars)}"
        self._side_grammars.append({"name": name, "lark_grammar": lark_from_gbnf(_text(value, "grammar", place))})
        return f"@{name}"

    def _or(self, value: dict[str, Json], place: str) -> str:
        _known_keys(value, place, required=("type", "elements"))
        elements = _list(value, "elements", place)
        return self._rule(
            " | ".join(self.format(part, f"{place}/elements/{i}", last=False) for i, part in enumerate(elements))
        )

    def _sequence(self, value: dict[str, Json], place: str, *, last: bool) -> str:
        _known_keys(value, place, required=("type", "elements"))
        elements = _list(value, "elements", place)
        end = len(elements) - 1
        return self._rule(
            " ".join(
                self.format(part, f"{place}/elements/{i}", last=last and i == end) for i, part in enumerate(elements)
            )
        )

    def _any_text(self, place: str, *, last: bool) -> str:
        if not last:
            raise ConstraintError(f"at {place}: any_text must be the last of a sequence, or the content of a tag")
        return "TEXT"

    def _until(self, text: str) -> str:
        """Free text up to and with the first place where `text` is complete."""
        return self._rule(f"TEXT {_literal(text)}", "[lazy]")

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _known_keys(
    value: dict[str, Any], place: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    where = f"at {place}: " if place else ""
    if missing := [name for name in required if name not in value]:
        raise ConstraintError(f"{where}needs {', '.join(missing)}")
    if unknown := [name for name in value if name not in (*required, *optional)]:
        raise ConstraintError(f"{where}{', '.join(unknown)[:100]} is not supported")


def _list(value: dict[str, Json], name: str, place: str) -> list[Json]:
    entries = value[name]
    if not isinstance(entries, list) or not entries:
        raise ConstraintError(f"at {place}/{name}: must be a list that is not empty")
    return entries


def _text(value: Json, name: str, place: str) -> str:
    text = value.get(name) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ConstraintError(f"at {place}/{name}: must be a string")
    return text
