"""Prints what pyproject.toml asks for: the base dependencies and those of the extras given, one a line.

An image installs these in a layer of their own, which changes of the source leave as it is.
usage: print_requirements.py EXTRA...
"""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """The base requirements and those of each extra; KeyError for an extra that does not exist."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
