"""docker-compose.yml says what works: the very commands, environments and checks of its services run as processes.

The ports are others, and all host names are loopback. What only a container engine does (images, read-only root, memory
limits) is not run here.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PORTS = {"gateway": "50051", "core": "50052"}
STARTUP_S = 90.0
DURATION = re.compile(r"(?:(\d+)m)?(?:(\d+)s)?")


def read_compose(*files: str, env_file: str) -> dict[str, Any]:
    """The services as docker compose resolves them."""
    command = [str(BIN / "docker-compose"), "--project-directory", str(ROOT), "--env-file", env_file]
    for file in files:
        command += ["--file", str(ROOT / file)]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    result = subprocess.run(
        [*command, "config", "--format", "json"], env=environment, capture_output=True, text=True, check=True
    )
    services: dict[str, Any] = json.loads(result.stdout)["services"]
    return services


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return read_compose("docker-compose.yml", env_file=os.devnull)


def seconds(duration: str) -> int:
    match = DURATION.fullmatch(duration)
    assert match
    return 60 * int(match[1] or 0) + int(match[2] or 0)


def dockerfile_environment(side: str) -> dict[str, str]:
    """The HEADRACE_ variables that the image itself sets."""
    text = (ROOT / "deploy" / f"{side}.Dockerfile").read_text()
    return dict(re.findall(r"\b(HEADRACE_\w+)=(\S+)", text))


def test_env_example_lists_the_defaults() -> None:
    defaults = read_compose("docker-compose.yml", env_file=os.devnull)
    assert read_compose("docker-compose.yml", env_file=str(ROOT / ".env.example")) == defaults


def test_every_variable_is_in_env_example() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    example = re.findall(r"^(\w+)=", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"\$\{(\w+)", text)) == set(example)


def test_every_service_is_confined_and_checked(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["deploy"]["resources"]["limits"]["memory"]
        assert service["healthcheck"]["test"][:3] == ["CMD", "headrace", "health"]
    assert services["gateway"]["depends_on"]["core"]["condition"] == "service_healthy"


def test_the_core_is_reached_by_the_gateway_only(services: dict[str, Any]) -> None:
    assert "ports" not in services["core"]


def test_gpu_overlay_gives_the_core_a_gpu() -> None:
    core = read_compose("docker-compose.yml", "deploy/docker-compose.gpu.yml", env_file=os.devnull)["core"]
    (device,) = core["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert core["environment"]["HEADRACE_DEVICE"] == "cuda"


@contextmanager
def running(command: list[str], environment: dict[str, str], grace_s: float) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of a service; at the end it is stopped as compose does it, and must end well in time."""
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(grace_s) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.model
def test_services_start_answer_and_stop_as_compose_says(
    services: dict[str, Any],
    demo_model: Path,
    free_ports: tuple[int, int],
    wait_until_healthy: Callable[..., None],
    ask: Callable[[int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    ports = dict(zip(("gateway", "core"), map(str, free_ports), strict=True))

    def on_loopback(word: str) -> str:
        word = word.replace("core:", "127.0.0.1:") if word.startswith("core:") else word
        for side, port in PORTS.items():
            word = re.sub(rf"\b{port}\b", ports[side], word)
        return word

    with ExitStack() as stack:
        for side in ("core", "gateway"):  # the order that depends_on asks for
            service = services[side]
            environment = {
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "HOME": str(tmp_path),
                **dockerfile_environment(side),
                **{name: value or "" for name, value in service.get("environment", {}).items()},
                "HEADRACE_HOST": "127.0.0.1",
                "HEADRACE_CACHE": str(tmp_path),
                "HEADRACE_DEMO_MODEL": str(demo_model),
            }
            command = [on_loopback(word) for word in service["command"]]
            check = [on_loopback(word) for word in service["healthcheck"]["test"][1:]]
            grace_s = seconds(service["stop_grace_period"])
            process = stack.enter_context(running([str(BIN / command[0]), *command[1:]], environment, grace_s))
            wait_until_healthy([str(BIN / check[0]), *check[1:]], environment, process, STARTUP_S)
        answer = ask(int(ports["gateway"]))
    assert answer["usage"]["output_tokens"] == 8
    assert "Paris" in answer["outputs"][0]["text"]
