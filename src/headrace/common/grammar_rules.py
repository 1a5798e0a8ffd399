"""A constraint on the output, and the rules that can be checked at a glance; whether it compiles shows later.

`headrace.common.grammar_checker` finds out the rest in a process of its own.
"""

from dataclasses import dataclass

from headrace.common.errors import Violation

FIELD = "sampling.structured_outputs"
# Field of the contract for each kind of constraint.
FIELDS = {
    "json": f"{FIELD}.json_schema",
    "json_object": f"{FIELD}.json_object",
    "regex": f"{FIELD}.regex",
    "choice": f"{FIELD}.choice",
    "lark": f"{FIELD}.lark",
    "gbnf": f"{FIELD}.gbnf",
    "structural_tag": f"{FIELD}.structural_tag",
}
MAX_CONSTRAINT_BYTES = 256 << 10
MAX_PATTERN_BYTES = 256
MAX_CHOICES = 65_536

_WITH_JSON = ("json", "json_object", "structural_tag")
_WITH_SCHEMA = ("json", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one constraint on the output text."""

    json: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    lark: str | None = None
    gbnf: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


def constraint_kind(params: StructuredOutputsParams) -> str | None:
    """The one kind that is set, a key of FIELDS; None if there is none or more than one."""
    kinds = _kinds(params)
    return kinds[0] if len(kinds) == 1 else None


def constraint_violations(params: StructuredOutputsParams) -> list[Violation]:
    """Every broken rule that shows without compiling."""
    kind = constraint_kind(params)
    if kind is None:
        given = " and ".join(FIELDS[name].rpartition(".")[2] for name in _kinds(params)) or "none"
        names = ", ".join(field.rpartition(".")[2] for field in FIELDS.values())
        return [Violation(FIELD, f"needs exactly one of {names}; got {given}")]
    return _value_violations(kind, getattr(params, kind)) + _option_violations(kind, params)


def _kinds(params: StructuredOutputsParams) -> list[str]:
    return [name for name in FIELDS if getattr(params, name) is not None]


def _value_violations(kind: str, value: str | bool | tuple[str, ...]) -> list[Violation]:
    field = FIELDS[kind]
    if isinstance(value, bool):
        return [] if value else [Violation(field, "must be true where it is set")]
    texts = (value,) if isinstance(value, str) else value
    found = []
    if len(texts) > MAX_CHOICES:
        return [Violation(field, f"must hold at most {MAX_CHOICES} texts; got {len(texts)}")]
    if not texts:
        found.append(Violation(field, "must hold at least one text"))
    if any(not text for text in texts):
        found.append(Violation(field, "must not be empty" if isinstance(value, str) else "must not hold an empty text"))
    if (size := sum(len(text.encode()) for text in texts)) > MAX_CONSTRAINT_BYTES:
        found.append(Violation(field, f"must be at most {MAX_CONSTRAINT_BYTES} bytes; got {size}"))
    if kind == "regex" and any("\0" in text for text in texts):
        found.append(Violation(field, "must not hold a NUL character"))
    return found


def _option_violations(kind: str, params: StructuredOutputsParams) -> list[Violation]:
    found = []
    for name, kinds in (
        ("disable_any_whitespace", _WITH_JSON),
        ("whitespace_pattern", _WITH_JSON),
        ("disable_additional_properties", _WITH_SCHEMA),
    ):
        if getattr(params, name) and kind not in kinds:
            found.append(Violation(f"{FIELD}.{name}", f"has no meaning for {FIELDS[kind].rpartition('.')[2]}"))
    if (pattern := params.whitespace_pattern) is not None:
        if params.disable_any_whitespace:
            found.append(Violation(f"{FIELD}.whitespace_pattern", "must be empty where disable_any_whitespace is true"))
        if "\0" in pattern:
            found.append(Violation(f"{FIELD}.whitespace_pattern", "must not hold a NUL character"))
        if (size := len(pattern.encode())) > MAX_PATTERN_BYTES:
            found.append(
                Violation(f"{FIELD}.whitespace_pattern", f"must be at most {MAX_PATTERN_BYTES} bytes; got {size}")
            )
    return found
