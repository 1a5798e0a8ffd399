"""Sizes and durations as people write them: `1GiB`, `512MiB`, `30s`, `500ms`."""

import re
from collections.abc import Mapping

_SIZES = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
}
_DURATIONS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes in a size such as `1GiB` (1024-based), `1GB` (1000-based) or `4096`; ValueError says what is allowed."""
    number, factor = _parse(text, _SIZES, "a size such as 512MiB or 1GiB")
    return int(number * factor)


def parse_duration(text: str) -> float:
    """Seconds in a duration such as `30s`, `500ms`, `2m` or `30`; ValueError says what is allowed."""
    number, factor = _parse(text, _DURATIONS, "a duration such as 30s, 500ms or 2m")
    return number * factor


def format_size(num_bytes: int) -> str:
    """The size in the largest 1024-based unit that leaves at least 1, such as `1.5 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def _parse(text: str, units: Mapping[str, float], wanted: str) -> tuple[float, float]:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"must be {wanted}")
    return float(match[1]), units[match[2]]
