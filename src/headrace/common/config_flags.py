"""Settings as command-line flags: argparse arguments for a tree, and the flags that were given."""

import argparse
from collections.abc import Collection, Iterator
from dataclasses import MISSING
from typing import Any

from headrace.common.config import Config, Leaf, Unit, leaves
from headrace.common.quantities import format_size


def add_flags(parser: argparse.ArgumentParser, tree: type[Config], *, skip: Collection[str] = ()) -> None:
    """Adds a flag for every setting of the tree but those in `skip` (by `Leaf.name`).

    Values stay texts, so that the loader can name all the wrong ones at once; a flag not given is None.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in leaves(tree):
        if leaf.name in skip:
            continue
        title = leaf.path[0] if len(leaf.path) > 1 else "settings"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if leaf.kind is bool:
            groups[title].add_argument(
                leaf.flag, dest=leaf.name, action=argparse.BooleanOptionalAction, default=None, help=_help(leaf)
            )
        else:
            groups[title].add_argument(leaf.flag, dest=leaf.name, metavar=_metavar(leaf), help=_help(leaf))


def given_flags(arguments: argparse.Namespace, tree: type[Config]) -> dict[str, Any]:
    """The flags of the tree that were given, by `Leaf.name`: what `load_config` takes."""
    names = (leaf.name for leaf in leaves(tree))
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def flag_texts(flags: dict[str, Any], tree: type[Config]) -> Iterator[str]:
    """The command-line words that give these flags again, for a child process."""
    for leaf in leaves(tree):
        value = flags.get(leaf.name)
        if isinstance(value, bool):
            yield leaf.flag if value else leaf.flag.replace("--", "--no-", 1)
        elif value is not None:
            yield f"{leaf.flag}={value}"


def _metavar(leaf: Leaf) -> str:
    if leaf.setting.choices:
        return "{" + ",".join(leaf.setting.choices) + "}"
    if leaf.setting.unit is Unit.BYTES:
        return "SIZE"
    if leaf.setting.unit is Unit.SECONDS:
        return "DURATION"
    return {int: "N", float: "X", str: "TEXT", tuple: "A[,B...]"}[leaf.kind]


def _help(leaf: Leaf) -> str:
    return f"{leaf.setting.help} [{leaf.variable}{_default(leaf)}]".replace("%", "%%")


def _default(leaf: Leaf) -> str:
    if leaf.default is MISSING:
        return "; required"
    if leaf.default is None or leaf.default == ():
        return ""
    if leaf.setting.unit is Unit.BYTES:
        return f"; default {format_size(leaf.default)}"
    if leaf.setting.unit is Unit.SECONDS:
        return f"; default {leaf.default:g}s"
    return f"; default {str(leaf.default).lower() if leaf.kind is bool else leaf.default}"
