"""The running pair: core and gateway as two processes with the demo model, started once for each dtype."""

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pair_requests import PairClient

from headrace.common.addresses import free_port

STARTUP_TIMEOUT_S = 120


@dataclass
class Process:
    """A `headrace` service in a process of its own, with its log in a file."""

    command: list[str]
    port: int
    log: Path
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        self._log_file = self.log.open("w")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "headrace", *self.command, "--port", str(self.port)],
            stdout=self._log_file,
            stderr=self._log_file,
        )

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def wait_serving(self, service="", timeout_s=STARTUP_TIMEOUT_S):
        """Seconds from the start of the process until its health says SERVING."""
        deadline = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.address, [("grpc.max_reconnect_backoff_ms", 50)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                assert self.popen.poll() is None, self.log.read_text()
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return time.monotonic() - self.started
                time.sleep(0.02)
        raise AssertionError(f"not serving after {timeout_s} s:\n{self.log.read_text()}")

    def resident_bytes(self):
        return psutil.Process(self.popen.pid).memory_info().rss

    def stop(self):
        """SIGTERM; returns the exit code."""
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            return self.popen.wait(60)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise
        finally:
            self._log_file.close()


@dataclass
class RunningPair:
    """A core and its gateway."""

    core: Process
    gateway: Process
    seconds_to_core: float
    seconds_to_gateway_live: float
    seconds_from_core_to_gateway_ready: float

    @property
    def server(self):
        return self.gateway.address


@pytest.fixture(scope="session")
def start_process(tmp_path_factory):
    """Starts a service and stops it at the end of the session, if the test has not.

    Cores check their blocks whenever they are idle; none may have found a fault.
    """
    processes = []

    def start(name, *command, port=None):
        log = tmp_path_factory.mktemp("logs") / f"{name}.log"
        checks = ["--check-integrity"] if name == "core" else []
        process = Process([name, *map(str, command), *checks], port or free_port("127.0.0.1"), log)
        processes.append(process)
        return process

    yield start
    for process in reversed(processes):
        process.stop()
    for process in processes:
        log = process.log.read_text()
        assert "engine died" not in log, log


def _start_pair(start_process, dtype):
    core = start_process("core", "--model", "demo", "--dtype", dtype, "--kv-cache-memory", "1GiB")
    gateway = start_process("gateway", "--core", core.address)
    live = gateway.wait_serving("liveness")
    ready = core.wait_serving()
    core_serves = time.monotonic()
    gateway.wait_serving()
    return RunningPair(core, gateway, ready, live, time.monotonic() - core_serves)


@pytest.fixture(scope="session")
def pair(start_process):
    """The pair in float32, which reproduces the reference continuations."""
    return _start_pair(start_process, "float32")


@pytest.fixture(scope="session")
def bfloat16_pair(start_process):
    """The pair in bfloat16, the default on CPUs that compute in it."""
    return _start_pair(start_process, "bfloat16")


@pytest.fixture
async def client(pair):
    """Stubs of the float32 pair's gateway."""
    client = PairClient(pair.server)
    yield client
    await client.channel.close()


@pytest.fixture
async def bfloat16_client(bfloat16_pair):
    """Stubs of the bfloat16 pair's gateway."""
    client = PairClient(bfloat16_pair.server)
    yield client
    await client.channel.close()
