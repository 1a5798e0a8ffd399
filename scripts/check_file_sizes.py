"""Fails when a hand-written Python file has more than 400 lines: a file holds one concept."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400


def source_files() -> list[Path]:
    """The Python files that git tracks or would track, without generated ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "*.py"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    paths = (ROOT / name for name in names)
    return [path for path in paths if path.exists() and not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def main() -> int:
    """Lists the files that are too long; returns the exit code."""
    too_long = 0
    for path in source_files():
        with path.open("rb") as file:
            lines = sum(1 for _ in file)
        if lines > MAX_LINES:
            print(f"{path.relative_to(ROOT)}: {lines} lines, at most {MAX_LINES}", file=sys.stderr)
            too_long += 1
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
