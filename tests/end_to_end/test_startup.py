"""Start, readiness and the way down, with real processes. Bounds are three times the goals."""

import asyncio
import signal
from typing import Any

import grpc
import psutil
import pytest
from gateway_harness import Outcome, eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pair_requests import PATIENCE_S, PairClient, make_request, wait_until_idle

from headrace.common.addresses import free_port
from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import models_pb2

CORE_READY_S = 3 * 15
GATEWAY_LIVE_S = 3 * 2
GATEWAY_READY_AFTER_CORE_S = 3 * 1
GATEWAY_BYTES = 150_000_000
CHECKER_BYTES = 100_000_000
NUM_TOKENS = 40  # of a stream that is in flight while its server is told to stop

pytestmark = pytest.mark.model


async def health(client, service=""):
    """Name of the status; DOWN if nobody answers."""
    try:
        answer = await health_pb2_grpc.HealthStub(client.channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=2
        )
    except grpc.aio.AioRpcError:
        return "DOWN"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def begin_stream(client: PairClient) -> "asyncio.Task[Outcome]":
    """A stream that is in flight: its first token has come."""
    begun = asyncio.Event()

    async def read() -> Outcome:
        messages = []
        try:
            request = make_request("The sea is", max_tokens=NUM_TOKENS, ignore_eos=True)
            async for message in client.generation.Generate(request, timeout=PATIENCE_S):
                messages.append(message)
                begun.set()
        except grpc.aio.AioRpcError as error:
            return Outcome(messages, error)
        finally:
            begun.set()
        return Outcome(messages, None)

    task = asyncio.create_task(read())
    await begun.wait()
    assert not task.done()
    return task


async def rest_of(call: Any) -> grpc.StatusCode:
    """Reads a stream to its end and returns its status."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def assert_finished(outcome):
    assert outcome.error is None
    assert len(outcome.token_ids()) == NUM_TOKENS
    assert outcome.last().finish_reason == params_pb2.FINISH_REASON_LENGTH
    assert outcome.usage.output_tokens == NUM_TOKENS


def test_core_is_ready_soon_after_a_cold_start(pair):
    assert pair.seconds_to_core < CORE_READY_S


def test_gateway_is_live_soon_and_ready_soon_after_its_first_core(pair):
    assert pair.seconds_to_gateway_live < GATEWAY_LIVE_S
    assert pair.seconds_from_core_to_gateway_ready < GATEWAY_READY_AFTER_CORE_S


async def test_gateway_stays_small(pair, client):
    """With the process that renders its chat templates, after traffic of every kind; and with the one that tries out
    constraints, which has a vocabulary of its own, where somebody has sent one."""
    prompts = [make_request(f"Story {i}:", max_tokens=8, n=2, logprobs=3) for i in range(32)]
    outcomes = await asyncio.gather(*(client.generate(request) for request in prompts))
    assert all(outcome.error is None for outcome in outcomes)
    await wait_until_idle(client)
    gateway = psutil.Process(pair.gateway.popen.pid)
    sizes = {process.cmdline()[-1]: process.memory_full_info().pss for process in gateway.children(recursive=True)}
    checker = sizes.pop("headrace.common.grammar_worker", 0)
    assert gateway.memory_full_info().pss + sum(sizes.values()) < GATEWAY_BYTES
    assert checker < CHECKER_BYTES
    assert pair.gateway.resident_bytes() < GATEWAY_BYTES


async def test_a_gateway_is_live_before_its_core_and_ready_with_it_and_finds_its_successor(start_process):
    core_port = free_port("127.0.0.1")
    gateway = start_process("gateway", "--core", f"127.0.0.1:{core_port}")
    gateway.wait_serving("liveness")
    client = PairClient(gateway.address)
    assert await health(client) == "NOT_SERVING"
    refused = await client.generate(make_request("hello"))
    assert refused.error is not None
    assert refused.error.code() == grpc.StatusCode.UNAVAILABLE

    def start_core():
        return start_process("core", "--model", "demo", "--kv-cache-memory", "64MiB", port=core_port)

    core = start_core()
    await asyncio.to_thread(gateway.wait_serving)

    # An orderly stop: what is in flight is finished, and nothing new is taken.
    stream = await begin_stream(client)
    core.popen.send_signal(signal.SIGTERM)
    assert_finished(await stream)
    assert await asyncio.to_thread(core.popen.wait, 60) == 0

    async def lost():
        states = [core.state for core in (await client.load()).cores]
        return states == [models_pb2.CORE_STATE_CONNECTING] and await health(client) == "NOT_SERVING"

    await eventually(lost)
    assert await health(client, "liveness") == "SERVING"

    core = start_core()
    await asyncio.to_thread(gateway.wait_serving)

    # A crash: the stream ends with a status that tells the client to try again, and the gateway lives on.
    stream = await begin_stream(client)
    core.popen.kill()
    outcome = await stream
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.UNAVAILABLE
    await eventually(lost)
    await asyncio.to_thread(core.popen.wait)

    core = start_core()
    await asyncio.to_thread(gateway.wait_serving)
    answer = await client.generate(make_request("The sea is", max_tokens=NUM_TOKENS, ignore_eos=True))
    assert_finished(answer)
    assert answer.token_ids()[: len(outcome.token_ids())] == outcome.token_ids()
    await client.channel.close()
    assert await asyncio.to_thread(gateway.stop) == 0
    assert await asyncio.to_thread(core.stop) == 0


async def test_a_gateway_told_to_stop_finishes_its_streams_and_takes_no_new_ones(start_process, bfloat16_pair):
    gateway = start_process("gateway", "--core", bfloat16_pair.core.address)
    gateway.wait_serving()
    client, other = PairClient(gateway.address), PairClient(gateway.address)
    stream = await begin_stream(client)
    gateway.popen.send_signal(signal.SIGTERM)

    async def draining():
        return await health(other) != "SERVING"

    await eventually(draining)
    refused = await other.generate(make_request("hello"))
    assert_finished(await stream)
    assert refused.error is not None
    assert refused.error.code() == grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(gateway.popen.wait, 60) == 0
    assert "Traceback" not in gateway.log.read_text()
    for each in (client, other):
        await each.channel.close()


async def test_a_grace_that_is_over_ends_the_streams_and_still_exits_with_zero(start_process, bfloat16_pair):
    gateway = start_process("gateway", "--core", bfloat16_pair.core.address, "--drain-grace", "0.2")
    gateway.wait_serving()
    client, witness = PairClient(gateway.address), PairClient(bfloat16_pair.server)
    call = client.generation.Generate(make_request("The sea is", max_tokens=4000, ignore_eos=True), timeout=PATIENCE_S)
    await call.read()
    assert await asyncio.to_thread(gateway.stop) == 0
    assert await rest_of(call) == grpc.StatusCode.UNAVAILABLE
    await wait_until_idle(witness)
    for each in (client, witness):
        await each.channel.close()
