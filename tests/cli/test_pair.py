"""Supervision of two child processes, with small stand-ins for core and gateway."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.pair import Child, Pair
from headrace.common.addresses import Address, free_port, is_port_taken

# Serves health on its port, notes its start and its orderly end in a file, ends on SIGTERM or with its parent.
SERVICE = """
import signal, sys, threading
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from headrace.cli.service_process import end_with_parent

port, notes, behaviour = sys.argv[1], sys.argv[2], sys.argv[3]
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: behaviour != "deaf" and stop.set())
end_with_parent(int(sys.argv[4].partition("=")[2]), 0.0)
if behaviour == "fails":
    sys.exit(3)
server = grpc.server(futures.ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port("127.0.0.1:" + port)
server.start()
print("a line that must not reach the parent's stdout")
open(notes, "a").write("started\\n")
if behaviour == "crashes":
    threading.Event().wait(1)
    sys.exit(4)
stop.wait()
open(notes, "a").write("drained " + port + "\\n")
server.stop(0).wait()
"""

DRIVER = """
import asyncio, sys
from headrace.cli.pair import Child, Pair
from headrace.common.addresses import parse_address
notes, first, second = sys.argv[1:]
def child(name, port):
    command = [sys.executable, "-c", {service!r}, port, notes, "serves"]
    return Child(name, command, parse_address("127.0.0.1:" + port), 5.0)
pair = Pair(child("core", first), child("gateway", second))
asyncio.run(pair.run(lambda: print("ready", flush=True)))
"""


def make_child(name: str, notes: Path, behaviour: str = "serves", grace_s: float = 5.0) -> Child:
    port = free_port("127.0.0.1")
    command = [sys.executable, "-c", SERVICE, str(port), str(notes), behaviour]
    return Child(name, command, Address("127.0.0.1", port), grace_s)


async def run_until_ready_then_stop(pair: Pair) -> tuple[str | None, int]:
    ready = 0

    def on_ready() -> None:
        nonlocal ready
        ready += 1
        pair.request_stop()

    async with asyncio.timeout(60):
        return await pair.run(on_ready), ready


def assert_all_gone(*children: Child) -> None:
    for child in children:
        assert child.process is not None
        assert child.process.returncode is not None
        assert not is_port_taken(child.address)


async def test_both_serve_then_both_drain_the_gateway_first(tmp_path):
    core, gateway = make_child("core", tmp_path / "notes"), make_child("gateway", tmp_path / "notes")
    failure, ready = await run_until_ready_then_stop(Pair(core, gateway))
    assert (failure, ready) == (None, 1)
    lines = (tmp_path / "notes").read_text().splitlines()
    assert lines[2:] == [f"drained {gateway.address.port}", f"drained {core.address.port}"]
    assert_all_gone(core, gateway)


@pytest.mark.parametrize("which", ["core", "gateway"])
async def test_a_child_that_cannot_start_takes_the_other_down(tmp_path, which):
    behaviours = {"core": "serves", "gateway": "serves", which: "fails"}
    core, gateway = (make_child(name, tmp_path / "notes", behaviours[name]) for name in ("core", "gateway"))
    failure, ready = await run_until_ready_then_stop(Pair(core, gateway))
    assert failure == f"the {which} ended with exit code 3 before it was ready"
    assert ready == 0
    assert_all_gone(core, gateway)


async def test_a_child_that_dies_while_serving_takes_the_other_down(tmp_path):
    core, gateway = make_child("core", tmp_path / "notes", "crashes"), make_child("gateway", tmp_path / "notes")
    async with asyncio.timeout(60):
        failure = await Pair(core, gateway).run(lambda: None)
    assert failure is not None
    assert failure.startswith("the core ended with exit code 4")
    assert_all_gone(core, gateway)


async def test_a_second_stop_kills_a_child_that_does_not_end(tmp_path):
    core = make_child("core", tmp_path / "notes", "deaf", grace_s=600.0)
    gateway = make_child("gateway", tmp_path / "notes", "deaf", grace_s=600.0)
    pair = Pair(core, gateway)
    running = asyncio.create_task(run_until_ready_then_stop(pair))
    while not pair._stop.is_set():
        await asyncio.sleep(0.05)
    pair.request_stop()
    assert (await running)[0] is None
    assert core.process is not None
    assert core.process.returncode == -signal.SIGKILL
    assert_all_gone(core, gateway)


def test_children_end_when_their_parent_is_killed(tmp_path, wait_until):
    notes, ports = tmp_path / "notes", [free_port("127.0.0.1"), free_port("127.0.0.1")]
    parent = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(service=SERVICE), str(notes), *map(str, ports)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: sorted(notes.read_text().splitlines()[2:]) == sorted(f"drained {port}" for port in ports))
    wait_until(lambda: not any(is_port_taken(Address("127.0.0.1", port)) for port in ports))
