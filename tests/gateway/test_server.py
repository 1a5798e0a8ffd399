"""The process: health, reflection, ports, draining, and what it must not import."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import grpc
import psutil
import pytest
from gateway_harness import Client, Gateway, eventually, running_gateway, serving, text_request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.common.errors import StartupError
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.config import GatewayConfig, ServerConfig
from headrace.gateway.fakes import FakeBehaviour, FakeCore, serve_fake_core
from headrace.gateway.server import SERVICE_NAMES, GatewayServer
from headrace.gateway_api.v1 import generation_pb2, models_pb2

STARTED = "from headrace.gateway.config import *; from headrace.gateway.main import run; "


async def health(client: Client, name: str) -> int:
    answer = await health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READY_NAMES = ("", "readiness", *SERVICE_NAMES)


async def test_alive_at_once_and_ready_with_the_first_core(core: FakeCore) -> None:
    async with serve_fake_core(core) as address:
        pass  # learn a free port
    async with running_gateway(address) as gateway:
        assert await health(gateway.client, "liveness") == SERVING
        assert [await health(gateway.client, name) for name in READY_NAMES] == [NOT_SERVING] * len(READY_NAMES)
        async with serve_fake_core(core, int(address.rpartition(":")[2])):
            await eventually(lambda: _ready(gateway.client))
            assert [await health(gateway.client, name) for name in READY_NAMES] == [SERVING] * len(READY_NAMES)
        await eventually(lambda: _not_ready(gateway.client))
        assert await health(gateway.client, "liveness") == SERVING


async def _ready(client: Client) -> bool:
    return bool(await health(client, "") == SERVING)


async def _not_ready(client: Client) -> bool:
    return bool(await health(client, "readiness") == NOT_SERVING)


async def test_reflection_lists_the_services(client: Client) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for answer in call:
        names = {service.name for service in answer.list_services_response.service}
        assert names >= {*SERVICE_NAMES, "grpc.health.v1.Health"}
        break


async def test_a_taken_port_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = GatewayServer(GatewayConfig(cores=("127.0.0.1:1",), server=ServerConfig(port=port)))
        with pytest.raises(StartupError, match=str(port)):
            await server.start()
        await server.close()


async def test_a_missing_tokenizer_is_one_clear_error() -> None:
    config = GatewayConfig(cores=("127.0.0.1:1",), server=ServerConfig(port=0), tokenizer="/no/such/model")
    server = GatewayServer(config)
    await server.start()
    with pytest.raises(StartupError, match="/no/such/model"):
        await server.run()
    await server.close()


async def test_draining_finishes_what_runs_and_refuses_what_comes(
    gateway: Gateway, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.step_pause_s = 0.01
    running = asyncio.create_task(gateway.client.generate(text_request("A", max_tokens=50)))
    await eventually(lambda: core.stats.running == 1)
    draining = asyncio.create_task(gateway.server.drain())
    await eventually(lambda: _not_ready(gateway.client))
    refused = await gateway.client.generate(text_request("A"))
    assert refused.error is not None
    assert refused.error.code() == grpc.StatusCode.UNAVAILABLE
    outcome = await running
    assert outcome.error is None
    assert outcome.usage.output_tokens == 50
    await draining


async def test_what_outlasts_the_grace_is_ended_as_unavailable(
    gateway: Gateway, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.step_pause_s = 0.01
    running = asyncio.create_task(gateway.client.generate(text_request("A", until_context=True)))
    await eventually(lambda: core.stats.running == 1)
    behaviour.step_pause_s = 0.5
    object.__setattr__(gateway.server._config.server, "drain_grace", 0.1)
    await gateway.server.drain()
    outcome = await running
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.UNAVAILABLE
    await eventually(lambda: core.stats.running == 0)


async def test_too_many_requests_are_refused_before_any_work(core: FakeCore, behaviour: FakeBehaviour) -> None:
    behaviour.step_pause_s = 0.02
    async with serve_fake_core(core) as address, running_gateway(address, max_live_requests=2) as gateway:
        await serving(gateway.client)
        running = [asyncio.create_task(gateway.client.generate(text_request("A"))) for _ in range(2)]
        await eventually(lambda: core.stats.running == 2)
        refused = await gateway.client.generate(text_request("A"))
        assert refused.error is not None
        assert refused.error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert all(outcome.error is None for outcome in await asyncio.gather(*running))


async def test_a_client_that_never_reads_is_cut_off(core: FakeCore, behaviour: FakeBehaviour) -> None:
    async with serve_fake_core(core) as address, running_gateway(address, slow_reader_timeout=0.3) as gateway:
        await serving(gateway.client)
        behaviour.step_pause_s = 0.002
        # Log-probabilities fill a window of 64 KiB that does not grow, so that the gateway's writes wait.
        client = Client(gateway.address, options=[("grpc.http2.bdp_probe", 0)])
        call = client.generation.Generate(text_request("A", until_context=True, logprobs=20, n=8))
        await eventually(lambda: core.stats.running == 8)
        await eventually(lambda: core.stats.running == 0)
        assert len(core.aborted) == 8
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
        assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await client.channel.close()


async def test_unread_output_is_bounded_in_size(core: FakeCore) -> None:
    async with serve_fake_core(core) as address, running_gateway(address, max_unsent_bytes=65536) as gateway:
        await serving(gateway.client)
        request = text_request("A", until_context=True, logprobs=20)
        request.output_kind = generation_pb2.OUTPUT_KIND_FINAL_ONLY  # everything is kept for the end
        outcome = await gateway.client.generate(request)
        assert outcome.error is not None
        assert outcome.error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await gateway.client.generate(text_request("A", max_tokens=2))).text() == "ab"


async def test_facts_of_the_model(client: Client, info: core_pb.CoreInfo) -> None:
    (model,) = (await client.models.ListModels(models_pb2.ListModelsRequest())).models
    assert (model.name, model.max_model_len, model.vocab_size) == ("fake", 512, 258)
    assert list(model.tasks) == ["generate"]
    assert model.tokenizer_digest == info.tokenizer_digest
    assert (await client.models.GetModel(models_pb2.GetModelRequest(name="fake"))).model == model
    (load,) = (await client.load()).cores
    assert (load.num_blocks, load.free_blocks, load.numerics_id) == (1000, 1000, "fake-numerics")


def test_no_torch_and_no_numpy_and_a_small_process() -> None:
    script = STARTED + "import sys; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


async def test_the_process_starts_serves_drains_and_exits_with_zero(core: FakeCore) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with serve_fake_core(core) as address:
        config = f"GatewayConfig(cores=({address!r},), server=ServerConfig(port={port}))"
        process = subprocess.Popen(  # noqa: ASYNC220 - starting it blocks for a moment only
            [sys.executable, "-c", f"{STARTED} raise SystemExit(run({config}))"],
            stderr=subprocess.PIPE,
            env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
        )
        client = Client(f"127.0.0.1:{port}")
        try:
            started = time.monotonic()
            await eventually(lambda: _answers(client))
            assert time.monotonic() - started < 6  # the goal is 2 s, in a quiet machine
            await serving(client)
            assert (await client.generate(text_request("A", max_tokens=3))).text() == "abc"
            assert psutil.Process(process.pid).memory_info().rss < 150 * 2**20
            process.send_signal(signal.SIGTERM)
            _, logs = await asyncio.to_thread(process.communicate, timeout=20)
        finally:
            process.kill()
            await client.channel.close()
    assert process.returncode == 0
    lines = [json.loads(line) for line in logs.decode().splitlines()]
    events = [line["event"] for line in lines]
    for event in ("gateway listening", "core connected", "request finished", "draining", "gateway stopped"):
        assert event in events
    (finished,) = (line for line in lines if line["event"] == "request finished")
    assert finished.pop("request_id")  # random: it may contain anything
    assert (finished["code"], finished["prompt_tokens"], finished["output_tokens"]) == ("OK", 1, 3)
    assert "abc" not in json.dumps(finished)


async def _answers(client: Client) -> bool:
    try:
        return bool(await health(client, "liveness") == SERVING)
    except grpc.aio.AioRpcError:
        return False
