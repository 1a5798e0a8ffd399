"""Reads a tree of settings. The first of these that has a value wins:

    flag  >  environment  >  YAML file (--config or HEADRACE_CONFIG)  >  default

One YAML file may serve both sides: its top keys are `core` and `gateway`. One ConfigError names every wrong value.
"""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

from headrace.common.config import ENVIRONMENT_PREFIX, Config, Section, broken_rules, leaves, variables
from headrace.common.errors import ConfigError

CONFIG_FILE_VARIABLE = "HEADRACE_CONFIG"
# Read elsewhere, and so no typing errors: cache folder, demo model file, defaults of client commands and of `up`.
OTHER_VARIABLES = frozenset(
    {CONFIG_FILE_VARIABLE, "HEADRACE_CACHE", "HEADRACE_DEMO_MODEL", "HEADRACE_SERVER", "HEADRACE_CORE_PORT"}
)
_SIDES = ("core", "gateway")
# Kubernetes puts such variables into every pod of a namespace with a service called headrace or headrace-...
_KUBERNETES_NAME = re.compile(r".*_SERVICE_(HOST|PORT(_.*)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://.*")

ConfigType = TypeVar("ConfigType", bound=Config)


def load_config(
    tree: type[ConfigType],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    config_file: str | None = None,
    foreign_variables: Iterable[str] = (),
) -> ConfigType:
    """The resolved settings of one side.

    `flags` holds the flags that were given, by `Leaf.name`. Variables in `foreign_variables` belong to the other side.
    ConfigError names every value that is wrong, every key and variable that nobody knows, every broken rule.
    """
    problems: list[str] = []
    file_values = _read_file(config_file or environment.get(CONFIG_FILE_VARIABLE) or None, tree, problems)
    known = variables(tree) | frozenset(foreign_variables)
    problems.extend(unknown_variables(environment, known))
    values: dict[str, Any] = {}
    for leaf in leaves(tree):
        source, raw = leaf.flag, flags.get(leaf.name)
        if raw is None:
            source, raw = leaf.variable, environment.get(leaf.variable) or None  # set but empty counts as unset
        if raw is None:
            source, raw = f"{tree.side}.{leaf.dotted}", file_values.get(leaf.dotted)
        if raw is None:
            if leaf.default is MISSING:
                problems.append(f"{leaf.flag} is required (or {leaf.variable})")
            else:
                values[leaf.dotted] = leaf.default
            continue
        try:
            value = leaf.convert(raw)
        except ValueError as error:
            problem = str(error)
            if _KUBERNETES_VALUE.fullmatch(str(raw)):
                problem += " (from a Kubernetes service of this name: set enableServiceLinks: false)"
            problems.append(f"{source}: {problem}")
            continue
        if broken := leaf.problem(value):
            problems.append(f"{source}: {broken}")
        else:
            values[leaf.dotted] = value
    problems.extend(broken_rules(tree, values))
    if problems:
        raise ConfigError(problems)
    result: ConfigType = _build(tree, (), values)
    return result


def _build(tree: type[Section], parents: tuple[str, ...], values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(tree)
    arguments = {}
    for field in dataclasses.fields(tree):  # type: ignore[arg-type]  # every Section is a dataclass
        path, hint = (*parents, field.name), hints[field.name]
        is_section = isinstance(hint, type) and issubclass(hint, Section)
        arguments[field.name] = _build(hint, path, values) if is_section else values[".".join(path)]
    return tree(**arguments)


def _read_file(name: str | None, tree: type[Config], problems: list[str]) -> dict[str, Any]:
    """Values of this side's part of the YAML file by dotted path; adds what is wrong to `problems`."""
    if name is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{name}: cannot be read: {error}")
        return {}
    except yaml.YAMLError as error:
        problems.append(f"{name}: is not YAML: {' '.join(str(error).split())}")
        return {}
    values: dict[str, Any] = {}
    known = {f"{tree.side}.{leaf.dotted}": leaf.dotted for leaf in leaves(tree)}
    for side, part in _entries(content, name, problems):
        if side not in _SIDES:
            hint = _suggestion(str(side), _SIDES) or _right_place(str(side), tree.side, known)
            problems.append(f"{name}: unknown key {side}{hint}")
        elif side == tree.side:
            _flatten(part, (side,), name, known, values, problems)
    return values


def _flatten(
    part: Any, path: tuple[str, ...], file: str, known: Mapping[str, str], values: dict[str, Any], problems: list[str]
) -> None:
    """Notes the values below a key; `known` has the path in the tree of every full key, such as core.model.model."""
    key_of_part = ".".join(path)
    same_name = f"{key_of_part}.{path[-1]}"  # model: demo, where model is a section with a key model
    hint = f" (did you mean {same_name}?)" if same_name in known else ""
    for key, value in _entries(part, f"{file}: {key_of_part}", problems, hint):
        full = f"{key_of_part}.{key}"
        if full in known:
            values[known[full]] = value
        elif any(name.startswith(full + ".") for name in known):
            _flatten(value, (*path, str(key)), file, known, values, problems)
        else:
            hint = _right_place(str(key), path[0], known) or _suggestion(full, known)
            problems.append(f"{file}: {full}: unknown key{hint}")


def _entries(part: Any, where: str, problems: list[str], hint: str = "") -> Iterable[tuple[Any, Any]]:
    if part is None:  # nothing after the colon
        return ()
    if not isinstance(part, dict):
        problems.append(f"{where}: must hold keys and values; got {part!r}{hint}")
        return ()
    return part.items()


def _right_place(key: str, side: str, known: Iterable[str]) -> str:
    """Where a key belongs that stands in the wrong place of a side's part, or nothing if no place has it."""
    places = [name for name in known if name.startswith(f"{side}.") and name.endswith(f".{key}")]
    return f" (it belongs at {places[0]})" if places else ""


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> Iterator[str]:
    """Says of each variable of ours that no setting in `known` and nothing else reads that it is unknown."""
    names = OTHER_VARIABLES | frozenset(known)
    for name, value in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name in names:
            continue
        if not (_KUBERNETES_NAME.fullmatch(name) or _KUBERNETES_VALUE.fullmatch(value)):
            yield f"unknown variable {name}{_suggestion(name, names)}"


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
