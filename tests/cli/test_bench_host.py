"""`headrace bench host`: what it prints, not how fast anything is."""

import json
import subprocess
import sys

import pytest

from headrace.cli import bench_host
from headrace.cli.main import main
from headrace.common.demo_model import fetch_demo_model
from headrace.core_service import host_benchmark
from headrace.gateway import output_benchmark

pytestmark = pytest.mark.model


@pytest.fixture
def small(monkeypatch):
    """Few steps and few requests: the figures mean nothing."""
    monkeypatch.setattr(host_benchmark, "STEPS", 4)
    monkeypatch.setattr(host_benchmark, "WARM_UP_STEPS", 2)
    monkeypatch.setattr(output_benchmark, "STEPS", 4)
    monkeypatch.setattr(bench_host, "ADMITTED", 3)


@pytest.fixture(scope="module")
def demo_model():
    return fetch_demo_model()


def test_the_json_holds_exactly_the_promised_keys_and_positive_numbers(small, demo_model, capsys):
    assert main(["bench", "host", "--rounds", "1", "--model", str(demo_model), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"step_ms", "admit_256_cached_ms", "detokenize_us_per_token"}
    assert set(report["step_ms"]) == {"64", "256", "1024"}
    figures = [*report["step_ms"].values(), report["admit_256_cached_ms"], report["detokenize_us_per_token"]]
    assert all(figure > 0 for figure in figures)


def test_the_table_names_every_figure_with_its_spread(small, demo_model, capsys):
    assert main(["bench", "host", "--rounds", "2", "--model", str(demo_model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert all(" to " in line for line in lines[1:])


def test_it_needs_no_torch():
    program = (
        "import sys; from headrace.cli import bench_host; import headrace.core_service.host_benchmark; "
        "import headrace.gateway.output_benchmark; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_steps_are_counted_between_starts_of_executions():
    figures = host_benchmark.steady_step_ms(3, rounds=2)
    assert len(figures) == 2
    assert all(0 < figure < 1000 for figure in figures)


def test_reading_is_a_part_of_admitting():
    for whole, reading in host_benchmark.cached_admission_ms(4, rounds=2):
        assert 0 < reading < 1000
        assert 0 < whole < 1000
