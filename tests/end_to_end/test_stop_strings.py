"""A stop string is found in the gateway; the core, which knows no text, stops at once. The engine is the real one."""

import asyncio

import pytest
from fake_pair import FakePair, running_fake_pair
from gateway_harness import KINDS, eventually, final_text, text_request

from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb
from headrace.gateway_api.v1 import models_pb2

STEP_S = 0.01
TOO_MANY = 450  # tokens, 4.5 s; the context is 512


async def load(pair: FakePair) -> models_pb2.CoreLoad:
    (core,) = (await pair.gateway.client.load()).cores
    return core


@pytest.mark.parametrize("kind", KINDS)
async def test_a_match_aborts_the_cores_part_at_once_and_frees_its_blocks(kind: pb.OutputKind.ValueType) -> None:
    async with running_fake_pair(step_time_s=STEP_S) as pair:
        request = text_request("A", max_tokens=TOO_MANY)
        request.text_options.stop.append("GHI")
        request.output_kind = kind
        outcome = await pair.gateway.client.generate(request)
        assert outcome.error is None
        assert final_text(outcome, kind) == "BCDEF"
        assert outcome.last().finish_reason == params_pb2.FINISH_REASON_STOP
        assert outcome.usage.output_tokens == 8

        # Its terminal row has come, so the core had heard of the abort before the stream ended.
        core = await load(pair)
        assert (core.running, core.waiting, core.free_blocks) == (0, 0, core.num_blocks)
        assert 8 <= pair.runner.batches < TOO_MANY // 5


async def test_the_running_count_falls_by_the_stopped_ones_and_their_neighbour_goes_on() -> None:
    async with running_fake_pair(step_time_s=STEP_S) as pair:
        client = pair.gateway.client
        free = (await load(pair)).free_blocks
        neighbour = asyncio.create_task(client.generate(text_request("a", max_tokens=120)))
        stopped = text_request("A", max_tokens=TOO_MANY, n=3)
        stopped.text_options.stop.append("YZ")
        task = asyncio.create_task(client.generate(stopped))

        async def running() -> int:
            return (await load(pair)).running

        async def all_run() -> bool:
            return await running() == 4

        await eventually(all_run)
        outcome = await task
        core = await load(pair)
        assert core.running == 1
        assert core.free_blocks >= free - 120 // 16 - 1
        assert [outcome.text(i) for i in range(3)] == ["BCDEFGHIJKLMNOPQRSTUVWX"] * 3
        assert outcome.usage.output_tokens == 3 * 25
        expected = bytes(ord("b") + i for i in range(120)).decode("utf-8", "replace")
        assert (await neighbour).text() == expected
