"""The programs in examples/ run as their first lines say, and say something."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path("examples").glob("*.py"))

pytestmark = pytest.mark.model


def run(program: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(program), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(pair, program):
    result = run(program, "the capital of France", pair.gateway.address)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip()


@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_that_finds_no_gateway_says_so_in_one_line(program):
    result = run(program, "anything", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"{program.name}: ")
    assert len(result.stderr.splitlines()) == 1


def test_the_structured_example_prints_what_its_schema_asks_for(pair):
    result = run(Path("examples/structured_output.py"), "a sailor", pair.gateway.address)
    person = ast.literal_eval(result.stdout)
    assert set(person) == {"name", "age", "likes"}
    assert 0 <= person["age"] <= 120
