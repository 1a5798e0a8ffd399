"""n greedy outputs are one output n times, and cost the core one: with the real model, or the real engine alone."""

import asyncio
import re

import pytest
from fake_pair import running_fake_pair
from gateway_harness import KINDS, text_request
from pair_requests import make_request, wait_until_idle, wait_until_running, whole_ids, whole_text

from headrace.common.v1 import params_pb2

N = 3


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(), ("ay", "th")])
async def test_each_output_is_what_one_alone_is(client, kind, stop):
    request = make_request("On a sunny day in March", kind=kind, stop=stop, max_tokens=24, logprobs=2)
    alone = await client.generate(request)
    request.sampling.n = N
    outcome = await client.generate(request)
    assert outcome.error is None
    for index in range(N):
        assert whole_text(outcome, kind, index) == whole_text(alone, kind)
        assert whole_ids(outcome, kind, index) == whole_ids(alone, kind)
        assert outcome.last(index).finish_reason == alone.last().finish_reason
        assert outcome.last(index).stop_text == alone.last().stop_text
        assert outcome.last(index).cumulative_logprob == alone.last().cumulative_logprob
    assert outcome.usage.output_tokens == N * alone.usage.output_tokens
    await wait_until_idle(client)


@pytest.mark.model
async def test_they_keep_to_a_constraint_and_are_complete(client):
    structured = params_pb2.StructuredOutputs(regex=r"[A-Z][a-z]{2,8}-[0-9]{3}")
    request = make_request("A serial number:", n=N, max_tokens=40, structured_outputs=structured)
    outcome = await client.generate(request)
    texts = {outcome.text(index) for index in range(N)}
    assert len(texts) == 1
    assert re.fullmatch(r"[A-Z][a-z]{2,8}-[0-9]{3}", texts.pop())


@pytest.mark.model
async def test_the_core_runs_one(client):
    task = asyncio.create_task(client.generate(make_request("Once", n=50, max_tokens=150, ignore_eos=True)))
    await wait_until_running(client, 1)
    (core,) = (await client.load()).cores
    assert (core.running, core.waiting) == (1, 0)
    outcome = await task
    assert outcome.usage.output_tokens == 50 * 150


@pytest.mark.parametrize(("temperature", "computed"), [(0.0, 1), (1.0, N)])
async def test_the_core_counts_the_tokens_of_one_unless_they_are_drawn(temperature, computed):
    async with running_fake_pair() as pair:
        request = text_request("A", n=N, max_tokens=20, temperature=temperature)
        outcome = await pair.gateway.client.generate(request)
        assert outcome.usage.output_tokens == N * 20
        assert pair.engine.load().output_tokens == computed * 20
