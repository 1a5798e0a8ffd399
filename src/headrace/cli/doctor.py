"""`headrace doctor`: what is installed and usable on this machine."""

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator

import headrace
from headrace.cli.side_config import installed_sides
from headrace.common.addresses import Address, is_port_taken
from headrace.common.config import leaves
from headrace.common.demo_model import cache_dir, cached_demo_model
from headrace.common.quantities import format_size

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<range>[^;]*)(?:;.*extra == [\"'](?P<extra>\w+)[\"'])?")
# An extra counts as wanted once the package that only it needs is there.
_TELLTALE = {"gateway": "jinja2", "core": "torch"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""


def run(_arguments: argparse.Namespace) -> int:
    """Prints a report; 1 if something needed is missing."""
    missing = []
    print(f"headrace {headrace.__version__}, Python {platform.python_version()} at {sys.executable}")
    print(f"{platform.platform()}, {len(os.sched_getaffinity(0))} CPUs usable, {_memory()}")
    print("\npackages")
    installed_extras = {extra for extra, package in _TELLTALE.items() if _version(package)}
    for name, wanted, extra in _requirements():
        version, needed = _version(name), not extra or extra in installed_extras
        print(f"  {name:<24} {version or 'missing':<16} {wanted or '':<18} {extra or ''}")
        if needed and version is None:
            missing.append(name)
    for extra in sorted(set(_TELLTALE) - installed_extras):
        print(f"  the {extra} is not installed (pip install 'headrace[{extra}]')")
    if not installed_extras:
        missing.append("headrace[gateway] or headrace[core]")
    print("\ndevices")
    for line in _devices("core" in installed_extras):
        print(f"  {line}")
    print("\nports")
    for side in installed_sides():
        defaults = {leaf.dotted: leaf.default for leaf in leaves(side)}
        address = Address(defaults["server.host"], defaults["server.port"])
        print(f"  {address} ({side.side}) {'taken' if is_port_taken(address) else 'free'}")
    print("\nmodel cache")
    demo = cached_demo_model()
    print(f"  {cache_dir()}")
    print(f"  demo model: {format_size(demo.stat().st_size) if demo.exists() else 'not fetched yet'}")
    if missing:
        print(f"\nmissing: {', '.join(missing)}")
    return 1 if missing else 0


def _requirements() -> Iterator[tuple[str, str, str | None]]:
    """Name, version range and extra of each package that a base, gateway or core installation needs."""
    for text in importlib.metadata.requires("headrace") or []:
        match = _REQUIREMENT.match(text)
        if match is not None and match["extra"] in (None, *_TELLTALE):
            yield match["name"], match["range"].strip(), match["extra"]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(has_torch: bool) -> Iterator[str]:
    if not has_torch:
        yield "unknown: torch is not installed"
        return
    import torch

    yield f"cpu: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        yield "cuda: none"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}: {properties.name}, {format_size(properties.total_memory)}"


def _memory() -> str:
    return format_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) + " memory"
