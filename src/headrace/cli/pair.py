"""Supervises a core and a gateway as child processes: both serve, or neither runs."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.common.addresses import Address

_POLL_S = 0.1
_STOP_SLACK_S = 20.0


@dataclass(slots=True)
class Child:
    """A service to run, and its process once it was started.

    `address` is where this process reaches it; `drain_grace_s` is how long it may take to end.
    """

    name: str
    command: Sequence[str]
    address: Address
    drain_grace_s: float
    process: asyncio.subprocess.Process | None = None

    async def start(self, parent_pipe: int) -> None:
        """Starts the process in a group of its own, so that a terminal's Ctrl-C reaches only us."""
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            f"--parent-pipe={parent_pipe}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=(parent_pipe,),
            process_group=0,
        )

    async def ended(self) -> int:
        """Waits for the process; its exit code, negative for a signal."""
        if self.process is None:
            raise RuntimeError(f"the {self.name} was not started")
        return await self.process.wait()

    async def serving(self) -> None:
        """Returns once the service says that it serves. Loading may take as long as it takes."""
        options = [
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.enable_http_proxy", 0),
        ]
        async with grpc.aio.insecure_channel(str(self.address), options=options) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=2)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.aio.AioRpcError:  # not listening yet; if it never will, its process ends
                    pass
                await asyncio.sleep(_POLL_S)

    async def stop(self, kill: asyncio.Event) -> None:
        """Lets the process drain, and kills it when `kill` is set or its time is over."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        ended, killed = asyncio.create_task(self.process.wait()), asyncio.create_task(kill.wait())
        await asyncio.wait(
            {ended, killed}, timeout=self.drain_grace_s + _STOP_SLACK_S, return_when=asyncio.FIRST_COMPLETED
        )
        killed.cancel()
        if not ended.done():
            self.process.kill()
            await ended


class Pair:
    """A core and a gateway that start, serve and stop together."""

    def __init__(self, core: Child, gateway: Child) -> None:
        self._children = (core, gateway)
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    def request_stop(self) -> None:
        """Drains both; asked a second time, kills both."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    async def run(self, on_ready: Callable[[], None]) -> str | None:
        """Runs both until a stop is requested (returns None) or one of them ends (returns one line that says which).

        The pipe ties the children to this process: it closes when we die, even if we are killed.
        """
        read_end, write_end = os.pipe()
        try:
            for child in self._children:
                await child.start(read_end)
            return await self._watch(on_ready)
        finally:
            core, gateway = self._children
            await gateway.stop(self._kill)  # first: its streams end while the core still makes their tokens
            await core.stop(self._kill)
            os.close(read_end)
            os.close(write_end)

    async def _watch(self, on_ready: Callable[[], None]) -> str | None:
        ends = {asyncio.create_task(child.ended()): child for child in self._children}
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.gather(*(child.serving() for child in self._children))
        phase = "before it was ready"
        waiting: set[asyncio.Future[object]] = {*ends, stop, ready}  # type: ignore[arg-type]
        try:
            while True:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    return None
                for task, child in ends.items():
                    if task in done:
                        return f"the {child.name} ended {_reason(task.result())} {phase}"
                ready.result()
                on_ready()
                phase = "while serving"
                waiting.discard(ready)
        finally:
            for future in waiting | {ready}:
                future.cancel()
            await asyncio.gather(*ends, stop, ready, return_exceptions=True)


def _reason(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
