"""Services as processes that can be killed, stopped, told to go, and started again on the same port."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.common.addresses import free_port

PATIENCE_S = 180  # ends a test that would hang; loading twice on a busy machine takes a while
NO_BACKOFF = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]


class Service:
    """`headrace <command>` on a port that stays the same over all its lives; all of them log to one file."""

    def __init__(self, log: Path, *command: object) -> None:
        self.port = free_port("127.0.0.1")
        self.log = log
        self._command = [sys.executable, "-m", "headrace", *map(str, command), "--port", str(self.port)]
        self._family: set[psutil.Process] = set()  # this process and its descendants, in all lives
        self._process = self._spawn()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def kill(self) -> None:
        """SIGKILL, and the next life."""
        self._remember_family()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self._process = self._spawn()

    async def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._process.send_signal(signal.SIGCONT)

    async def drain(self) -> None:
        """SIGTERM, which must end it well, and the next life."""
        await asyncio.to_thread(self.end)
        self._process = self._spawn()

    def end(self) -> None:
        """SIGTERM; fails unless the process exits with 0 in time."""
        self._remember_family()
        self._process.terminate()
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        assert code == 0, self.log.read_text()[-5000:]

    def destroy(self) -> None:
        """Whatever happened before, nothing stays behind."""
        self._remember_family()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def wait_serving(self) -> None:
        """Waits until its health says SERVING."""
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(self.address, NO_BACKOFF) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                assert self._process.poll() is None, self.log.read_text()[-5000:]
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.05)

    def survivors(self) -> list[psutil.Process]:
        """Processes of any life that still run."""
        return [process for process in self._family if _runs(process)]

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def _remember_family(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            self._family |= {process, *process.children(recursive=True)}


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
