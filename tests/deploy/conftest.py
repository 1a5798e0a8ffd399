"""What the deployment tests share: the demo model, and services that are told from outside when they are healthy."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.common.demo_model import fetch_demo_model

POLL_S = 0.5


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return fetch_demo_model()


@pytest.fixture
def free_ports() -> tuple[int, int]:
    """Two ports of loopback on which nothing listens."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


@pytest.fixture
def wait_until_healthy() -> Callable[..., None]:
    """`wait_until_healthy(check, environment, service, timeout_s)` returns once the check's exit code is 0.

    Fails if the service ends first, or when the time is over.
    """

    def wait(
        check: Sequence[str], environment: Mapping[str, str], service: "subprocess.Popen[bytes]", timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while subprocess.run(check, env=environment, capture_output=True).returncode != 0:
            assert service.poll() is None, f"{service.args!r} ended with exit code {service.returncode}"
            assert time.monotonic() < deadline, f"{service.args!r} was not healthy within {timeout_s} s"
            time.sleep(POLL_S)

    return wait


@pytest.fixture
def ask() -> Callable[[int], dict[str, Any]]:
    """`ask(port)` sends one greedy prompt to the gateway and returns the JSON answer."""

    def send(port: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "headrace.cli.main", "generate", "--json", "--server", f"127.0.0.1:{port}"]
        command += ["--text", "The capital of France is", "--max-tokens", "8", "--temperature", "0"]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    return send
