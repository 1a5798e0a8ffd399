"""Settings: written once as frozen dataclasses, with their flags, variables and checks.

A service has one tree: a `Config` class whose fields are `Section` classes, whose fields are made by `setting()`. A
field alone yields the flag (`max_num_seqs` is `--max-num-seqs`), the variable (`HEADRACE_MAX_NUM_SEQS`), the key in the
YAML file (`core: {scheduler: {max_num_seqs: 64}}`), the help text and the checks, which also hold for a tree built in
code. `config_loader.load_config` reads a tree.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any, ClassVar

from headrace.common.errors import ConfigError
from headrace.common.quantities import parse_duration, parse_size

ENVIRONMENT_PREFIX = "HEADRACE_"


class Unit(Enum):
    """What a number counts, where people write it with a unit."""

    BYTES = "bytes"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Setting:
    """What `setting()` says about a field."""

    help: str
    name: str | None  # of flag and variable, where it is not the field's
    unit: Unit | None
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    above_low: bool
    check: Callable[[Any], str | None] | None


def setting(
    default: Any = MISSING,
    *,
    help: str,  # noqa: A002 - the name that argparse uses
    name: str | None = None,
    unit: Unit | None = None,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above_low: bool = False,
    check: Callable[[Any], str | None] | None = None,
) -> Any:
    """A field of a `Section`.

    Without a default it is required. `low` and `high` are bounds of a number (`above_low` excludes `low` itself).
    `check` returns what is wrong with a value, or None. A value of None is always good where the type allows it.
    """
    metadata = {"setting": Setting(help, name, unit, choices, low, high, above_low, check)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Rule:
    """What several settings must keep together.

    `settings` are dotted paths in the tree; `problem` gets their values and returns what is wrong, or None.
    """

    settings: tuple[str, ...]
    problem: Callable[..., str | None]


class Section:
    """Base of the dataclasses that hold settings."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if problems := _wrong_values(self):
            raise ConfigError(problems)


class Config(Section):
    """Base of the root of a tree. `side` is its name in the YAML file; `rules` are the impossible combinations."""

    __slots__ = ()
    side: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]] = ()

    def __post_init__(self) -> None:
        values = {leaf.dotted: functools.reduce(getattr, leaf.path, self) for leaf in leaves(type(self))}
        if problems := _wrong_values(self) or list(broken_rules(type(self), values)):
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting of a tree, with everything that follows from its field."""

    path: tuple[str, ...]
    setting: Setting
    kind: type  # str, int, float, bool or tuple (of str)
    optional: bool
    default: Any

    @property
    def dotted(self) -> str:
        """Path in the tree."""
        return ".".join(self.path)

    @property
    def name(self) -> str:
        """Name in flags and variables, with underscores; unique in the tree."""
        return self.setting.name or self.path[-1]

    @property
    def flag(self) -> str:
        """Such as --max-num-seqs."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Such as HEADRACE_MAX_NUM_SEQS."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value of the right type, or None."""
        rule = self.setting
        if value is None and self.optional:
            return None
        if rule.choices and value not in rule.choices:
            return f"must be one of {', '.join(rule.choices)}; got {value!r}"
        if rule.low is not None or rule.high is not None:
            low = -float("inf") if rule.low is None else rule.low
            high = float("inf") if rule.high is None else rule.high
            # NaN compares false, so it is never inside.
            if not (low < value <= high if rule.above_low else low <= value <= high):
                return f"must be {_bounds(rule)}; got {_plain(value)}"
        return rule.check(value) if rule.check else None

    def convert(self, raw: Any) -> Any:
        """The value that a text (of a flag or variable) or a YAML value means; ValueError says what is wrong."""
        if self.kind is tuple:
            return _texts(raw)
        if self.kind is bool:
            return _truth(raw)
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError(f"must be {'a text' if self.kind is str else 'a number'}; got {raw!r}")
        if self.kind is str:
            if not isinstance(raw, str):
                raise ValueError(f"must be a text; got {raw!r} (put it into quotes)")
            return raw
        if isinstance(raw, str) and self.setting.unit is Unit.BYTES:
            return _with_value(parse_size, raw)
        if isinstance(raw, str) and self.setting.unit is Unit.SECONDS:
            return _with_value(parse_duration, raw)
        try:
            number = self.kind(raw)
        except (ValueError, OverflowError):
            number = None
        if number is None or (self.kind is int and isinstance(raw, float) and number != raw):
            raise ValueError(f"must be {'a whole number' if self.kind is int else 'a number'}; got {raw!r}")
        return number


def leaves(tree: type[Section]) -> tuple[Leaf, ...]:
    """Every setting of a tree, in the order written."""
    return tuple(_leaves(tree, ()))


def variables(tree: type[Config]) -> frozenset[str]:
    """Names of the environment variables that the tree reads."""
    return frozenset(leaf.variable for leaf in leaves(tree))


def with_flag_names(tree: type[Config], problems: Iterable[str]) -> list[str]:
    """Problems that begin with a setting's name and a colon, with its flag instead; others as they are.

    What is only found out while a service starts is named as the user can set it.
    """
    flags = {name: leaf.flag for leaf in leaves(tree) for name in (leaf.name, leaf.dotted)}
    renamed = []
    for problem in problems:
        name, colon, rest = problem.partition(":")
        renamed.append(f"{flags[name]}:{rest}" if colon and name in flags else problem)
    return renamed


def _wrong_values(section: Section) -> list[str]:
    """Problems of the section's own settings; those of its sections were found when they were built."""
    own = (leaf for leaf in leaves(type(section)) if len(leaf.path) == 1)
    return [f"{leaf.dotted}: {problem}" for leaf in own if (problem := leaf.problem(getattr(section, leaf.dotted)))]


def _leaves(tree: type, parents: tuple[str, ...]) -> Iterator[Leaf]:
    hints = typing.get_type_hints(tree)
    for field in dataclasses.fields(tree):
        path, hint = (*parents, field.name), hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from _leaves(hint, path)
            continue
        optional = isinstance(hint, types.UnionType)
        if optional:
            hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
        yield Leaf(path, field.metadata["setting"], typing.get_origin(hint) or hint, optional, field.default)


def broken_rules(tree: type[Config], values: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the rules whose settings are all in `values`, by dotted path."""
    for rule in tree.rules:
        if all(path in values for path in rule.settings) and (
            problem := rule.problem(*(values[path] for path in rule.settings))
        ):
            yield problem


def _bounds(rule: Setting) -> str:
    low = "" if rule.low is None else f"{'above' if rule.above_low else 'at least'} {_plain(rule.low)}"
    high = "" if rule.high is None else f"at most {_plain(rule.high)}"
    return " and ".join(part for part in (low, high) if part)


def _plain(number: float) -> str:
    """The number as people write it: all its digits, no exponent for a whole one."""
    return str(number) if isinstance(number, int) else f"{number:.15g}"


def _with_value(parse: Callable[[str], float], raw: str) -> float:
    try:
        return parse(raw)
    except ValueError as error:
        raise ValueError(f"{error}; got {raw!r}") from None


def _truth(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).lower()
    if word not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError(f"must be true or false; got {raw!r}")
    return word in ("true", "1", "yes", "on")


def _texts(raw: Any) -> tuple[str, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list) or not all(isinstance(part, str) and part.strip() for part in parts):
        raise ValueError(f"must be texts with commas between them; got {raw!r}")
    return tuple(part.strip() for part in parts)
