"""Both images, built for real, serve: without a container engine by buildah in a chroot (see scripts/images.py)."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGE_USER = 10001
MODEL_IN_IMAGE = "/models/demo.gguf"
STARTUP_S = 180.0
STOP_S = 60.0

pytestmark = [pytest.mark.campaign, pytest.mark.model, pytest.mark.timeout(1500)]


def why_images_cannot_be_built() -> str | None:
    """None where scripts/images.py can work; any other failure of it is a failure."""
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        return None
    if sys.platform != "linux":
        return "no container engine answers (docker info), and buildah needs Linux"
    if os.geteuid() != 0:
        return "no container engine answers (docker info), and buildah in a chroot needs root"
    if not (shutil.which("buildah") and shutil.which("mmdebstrap")) and not shutil.which("apt-get"):
        return "no container engine answers (docker info), buildah is not installed, and apt-get is not there to do it"
    return None


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """What scripts/images.py reports: the engine and the images. It fails if the gateway's image holds torch."""
    if reason := why_images_cannot_be_built():
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "images.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    print(result.stdout)
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


@contextmanager
def container(built: dict[str, Any], side: str, model: Path, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a service from its image on the host's network; stops it with SIGTERM, and it must end well."""
    engine, image = built["engine"], built["images"][side]
    settings = ["--env", "HEADRACE_HOST=127.0.0.1", "--env", f"HEADRACE_DEMO_MODEL={MODEL_IN_IMAGE}"]
    settings += ["--volume", f"{model}:{MODEL_IN_IMAGE}:ro"]
    if built["is_docker"]:
        process = subprocess.Popen([*engine, "run", "--rm", "--network", "host", *settings, image, *words])
        with ended(process):
            yield process
            process.send_signal(signal.SIGTERM)  # docker run passes it on
            assert process.wait(STOP_S) == 0
        return
    name = subprocess.run([*engine, "from", image], check=True, capture_output=True, text=True).stdout.strip()
    try:
        process = subprocess.Popen([*engine, "run", "--isolation", "chroot", *settings, name, "--", *words])
        with ended(process):
            yield process
            service_of(process).send_signal(signal.SIGTERM)  # buildah run would end without passing it on
            assert process.wait(STOP_S) == 0
    finally:
        subprocess.run([*engine, "rm", name], check=True, capture_output=True)


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Leaves nothing of the process and its children, whatever happens."""
    try:
        yield
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def service_of(process: "subprocess.Popen[bytes]") -> psutil.Process:
    """The service below buildah's own processes, which run from memory as `memfd:buildah...`."""
    children = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in children if not child.name().startswith("memfd"))


def test_images_serve_a_prompt(
    built: dict[str, Any],
    demo_model: Path,
    free_ports: tuple[int, int],
    wait_until_healthy: Callable[..., None],
    ask: Callable[[int], dict[str, Any]],
) -> None:
    gateway_port, core_port = free_ports
    commands = {
        "core": ["headrace", "core", "--model", "demo", "--port", str(core_port)],
        "gateway": ["headrace", "gateway", "--core", f"127.0.0.1:{core_port}", "--port", str(gateway_port)],
    }
    health = [sys.executable, "-m", "headrace.cli.main", "health", "--server"]
    with ExitStack() as stack:
        for side, port in (("core", core_port), ("gateway", gateway_port)):
            process = stack.enter_context(container(built, side, demo_model, *commands[side]))
            wait_until_healthy([*health, f"127.0.0.1:{port}"], os.environ, process, STARTUP_S)
            if not built["is_docker"]:
                assert service_of(process).uids().real == IMAGE_USER
        answer = ask(gateway_port)
    assert answer["usage"]["output_tokens"] == 8
    assert "Paris" in answer["outputs"][0]["text"]
