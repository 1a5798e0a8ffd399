"""Many streams at once through the running pair: each ends as if it had been alone, and leaves nothing behind."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from gateway_harness import Outcome
from google.protobuf.duration_pb2 import Duration
from pair_requests import (
    PATIENCE_S,
    PairClient,
    make_request,
    wait_until_accepted,
    wait_until_idle,
    wait_until_running,
    whole_ids,
    whole_text,
)

from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb

CASES = [json.loads(line) for line in Path("tests/data/greedy.jsonl").read_text().splitlines()]
KINDS = [pb.OUTPUT_KIND_DELTA, pb.OUTPUT_KIND_CUMULATIVE, pb.OUTPUT_KIND_FINAL_ONLY]
NUM_STREAMS = 64
NEAR_TIE = 0.01  # below this difference of two log-probabilities, rounding may decide
FREE_WITHIN_S = 10.0  # a step or two, far from the minutes that the stream would have gone on
LONG = 4000  # output tokens that no test waits for

pytestmark = pytest.mark.model


@dataclass
class Stream:
    """One of many: its request, and what came back."""

    request: pb.GenerateRequest
    outcome: Outcome

    @property
    def n(self) -> int:
        return self.request.sampling.n

    @property
    def seeded(self) -> bool:
        return self.request.sampling.temperature > 0

    def text(self, index: int) -> str:
        return whole_text(self.outcome, self.request.output_kind, index)

    def ids(self, index: int) -> list[int]:
        return whole_ids(self.outcome, self.request.output_kind, index)


def mixed_requests() -> list[pb.GenerateRequest]:
    """Text, ids and chat; short and long; one to three completions; greedy and seeded; stopped and not."""
    generator = random.Random(7)
    words = [word for case in CASES for word in (case.get("text") or case["messages"][-1]["content"]).split()]
    requests = []
    for i in range(NUM_STREAMS):
        text = " ".join(generator.choices(words, k=generator.choice([1, 5, 20, 60])))
        prompt = [
            pb.Prompt(text=text),
            pb.Prompt(token_ids=pb.TokenIds(ids=generator.choices(range(1000, 40_000), k=generator.choice([1, 40])))),
            pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])),
        ][i % 3]
        sampling = {"seed": generator.getrandbits(64), "temperature": 0.9, "top_p": 0.95} if i % 2 else {}
        requests.append(
            make_request(
                prompt,
                kind=KINDS[i // 2 % 3],
                stop=[".", "\n\n"] if i % 8 == 0 else (),
                n=generator.choice([1, 1, 2, 3]),
                max_tokens=generator.choice([1, 2, 5, 8, 12, 32]),
                ignore_eos=i % 4 < 2,
                **sampling,
            )
        )
    return requests


@pytest.fixture(scope="module")
def mixed_streams(pair) -> list[Stream]:
    """All of them at once."""

    async def run_all() -> list[Stream]:
        client = PairClient(pair.server)
        requests = mixed_requests()
        outcomes = await asyncio.gather(*(client.generate(request) for request in requests))
        await wait_until_idle(client)
        await client.channel.close()
        return [Stream(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]

    return asyncio.run(run_all())


def test_concurrent_streams_of_mixed_kinds_all_finish_right(mixed_streams):
    for stream in mixed_streams:
        sampling, outcome = stream.request.sampling, stream.outcome
        assert outcome.error is None
        assert all(message.exact for message in outcome.messages)
        for index in range(stream.n):
            ids, last = stream.ids(index), outcome.last(index)
            if last.finish_reason == params_pb2.FINISH_REASON_LENGTH:
                assert len(ids) == sampling.max_tokens
            else:
                assert last.finish_reason == params_pb2.FINISH_REASON_STOP
                assert len(ids) <= sampling.max_tokens
                assert last.HasField("stop_text") or not sampling.ignore_eos
        assert outcome.usage.output_tokens == sum(len(stream.ids(index)) for index in range(stream.n))
        assert outcome.usage.prompt_tokens > 0
        if stream.request.output_kind == pb.OUTPUT_KIND_FINAL_ONLY:
            assert len(outcome.messages) == 1


def test_each_completion_ends_once_and_its_offsets_have_no_gaps(mixed_streams):
    for stream in mixed_streams:
        for index in range(stream.n):
            outputs = [o for m in stream.outcome.messages for o in m.outputs if o.index == index]
            assert [bool(o.finish_reason) for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[0].HasField("seed")
            if stream.request.output_kind == pb.OUTPUT_KIND_DELTA:
                assert outputs[0].token_offset == 0
                for before, after in pairwise(outputs):
                    assert after.token_offset == before.token_offset + len(before.token_ids)
            else:
                assert all(o.token_offset == 0 for o in outputs)
                for before, after in pairwise(outputs):
                    assert after.text.startswith(before.text)
                    assert list(after.token_ids[: len(before.token_ids)]) == list(before.token_ids)


async def test_each_concurrent_stream_equals_the_same_request_alone(mixed_streams, client):
    """Alone it is asked for with FINAL_ONLY and without the prefix cache: neither changes the output."""
    for stream in mixed_streams:
        request = pb.GenerateRequest()
        request.CopyFrom(stream.request)
        request.output_kind = pb.OUTPUT_KIND_FINAL_ONLY
        request.sampling.skip_reading_prefix_cache = True
        alone = await client.generate(request)
        assert alone.error is None
        for index in range(stream.n):
            together = stream.ids(index)
            by_itself = list(alone.last(index).token_ids)
            if stream.seeded or together == by_itself:
                assert together == by_itself
                assert stream.text(index) == alone.last(index).text
                assert stream.outcome.last(index).finish_reason == alone.last(index).finish_reason
            else:
                await assert_near_tie(client, request, together, by_itself)


async def assert_near_tie(client, request, ids, others):
    """The first token that differs was as likely as the other one, nearly."""
    step = next(i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    prompt_ids = (
        list(request.prompt.token_ids.ids)
        or (await client.generation.Tokenize(pb.TokenizeRequest(prompt=request.prompt))).token_ids
    )
    outcome = await client.generate(make_request([*prompt_ids, *ids[:step]], max_tokens=1, logprobs=2))
    best, second = sorted((c.logprob for c in outcome.last().logprobs[0].candidates), reverse=True)[:2]
    assert best - second < NEAR_TIE, f"token {step} is {ids[step]} or {others[step]}, and that is no near-tie"


async def test_all_output_kinds_join_to_the_same_text(client):
    for seed in range(3):
        texts, ids = set(), set()
        for kind in KINDS:
            request = make_request("Once upon a time", kind=kind, temperature=1.0, seed=seed, max_tokens=24)
            outcome = await client.generate(request)
            texts.add(whole_text(outcome, kind))
            ids.add(tuple(whole_ids(outcome, kind)))
        assert len(texts) == len(ids) == 1


async def test_reported_seed_makes_the_same_text_again(client):
    request = make_request("The old lighthouse keeper", temperature=1.0, max_tokens=24, n=2, ignore_eos=True)
    first, other = await client.generate(request), await client.generate(request)
    seeds = [first.messages[0].outputs[0].seed, other.messages[0].outputs[0].seed]
    assert seeds[0] != seeds[1]
    assert first.token_ids() != other.token_ids()
    request.sampling.seed = seeds[0]
    again = await client.generate(request)
    for index in range(2):
        assert again.token_ids(index) == first.token_ids(index)
        assert again.text(index) == first.text(index)


async def test_child_i_draws_with_seed_plus_i(client):
    request = make_request("My favourite animal is", temperature=1.0, seed=2**64 - 1, n=3, max_tokens=12)
    together = await client.generate(request)
    for index, seed in enumerate([2**64 - 1, 0, 1]):
        request.sampling.n, request.sampling.seed = 1, seed
        assert together.token_ids(index) == (await client.generate(request)).token_ids()


@pytest.mark.parametrize(("length", "cached"), [(100, 96), (96, 80), (16, 0), (17, 16)])
async def test_usage_counts_the_prompt_its_cached_part_and_the_output(client, length, cached):
    """Whole blocks of 16 are shared; the last prompt token is always computed, since its logits are needed."""
    prompt = random.Random().choices(range(1000, 40_000), k=length)
    request = make_request(prompt, max_tokens=5, n=2, ignore_eos=True)
    first, second = await client.generate(request), await client.generate(request)
    assert (first.usage.prompt_tokens, first.usage.cached_tokens, first.usage.output_tokens) == (length, 0, 10)
    assert (second.usage.prompt_tokens, second.usage.cached_tokens, second.usage.output_tokens) == (length, cached, 10)
    assert first.token_ids(0) == second.token_ids(0)


async def test_a_cancelled_stream_frees_everything_and_leaves_its_neighbours_alone(client):
    prompts = [f"Chapter {i}. It was a dark night, and" for i in range(16)]
    alone = [await client.generate(make_request(p, max_tokens=12, ignore_eos=True)) for p in prompts[::2]]
    calls = [
        client.generation.Generate(
            make_request(p, max_tokens=LONG, ignore_eos=True, n=2, temperature=1.0), timeout=PATIENCE_S
        )
        for p in prompts[1::2]
    ]
    neighbours = [
        asyncio.create_task(client.generate(make_request(p, max_tokens=12, ignore_eos=True))) for p in prompts[::2]
    ]
    for call in calls:
        await call.read()
        call.cancel()
    for before, task in zip(alone, neighbours, strict=True):
        after = await task
        assert after.error is None
        assert after.token_ids() == before.token_ids()
    await wait_until_idle(client, FREE_WITHIN_S)


@pytest.mark.parametrize("flags", [[], ["--output-kind", "final"]], ids=["streaming", "silent"])
async def test_a_client_that_is_killed_leaves_nothing_behind(pair, client, flags):
    """Also one to which nothing is written: its connection's end is all that tells."""
    command = [sys.executable, "-m", "headrace", "generate", "--server", pair.server, "--text", "Once upon a time"]
    command += ["--max-tokens", str(LONG), "--temperature", "1", "--ignore-eos", "--n", "3", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    await wait_until_running(client, 3)
    process.kill()
    await wait_until_idle(client, FREE_WITHIN_S)
    assert await process.wait() == -signal.SIGKILL


async def test_a_client_that_goes_while_its_prompt_is_computed_leaves_nothing_behind(client):
    prompt = random.Random().choices(range(1000, 40_000), k=1000)
    call = client.generation.Generate(make_request(prompt, max_tokens=LONG, ignore_eos=True), timeout=PATIENCE_S)
    await wait_until_accepted(client, 1)
    call.cancel()
    await wait_until_idle(client, FREE_WITHIN_S)


async def test_a_deadline_ends_the_stream_and_frees_everything(client):
    outcome = await client.generate(make_request("Count:", max_tokens=LONG, ignore_eos=True), deadline_s=1.0)
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_until_idle(client, FREE_WITHIN_S)


async def test_a_time_limit_keeps_the_partial_text(client):
    request = make_request("Count:", max_tokens=LONG, ignore_eos=True, time_limit=Duration(nanos=700_000_000))
    outcome = await client.generate(request)
    assert outcome.error is None
    assert outcome.last().finish_reason == params_pb2.FINISH_REASON_TIME_LIMIT
    assert 0 < outcome.usage.output_tokens == len(outcome.token_ids()) < LONG
    assert outcome.text()
    await wait_until_idle(client, FREE_WITHIN_S)


async def test_two_gateways_of_one_core_get_the_same_answers(start_process, pair):
    """All at once; some completions are ended by stop strings while the others of their request go on."""
    gateways = [pair.gateway, start_process("gateway", "--core", pair.core.address)]
    gateways[1].wait_serving()
    clients = [PairClient(gateway.address) for gateway in gateways]
    requests = [
        make_request(
            f"{i} little birds sat on", n=3, temperature=1.0, seed=i, max_tokens=20, stop=["e"] if i % 2 else ()
        )
        for i in range(20)
    ]
    outcomes = await asyncio.gather(*(c.generate(r) for c in clients for r in requests))
    first, second = outcomes[: len(requests)], outcomes[len(requests) :]
    for request, one, other in zip(requests, first, second, strict=True):
        assert one.error is None
        assert other.error is None
        for index in range(3):
            assert one.text(index) == other.text(index)
            if request.text_options.stop:
                assert "e" not in one.text(index)
    await asyncio.gather(*(wait_until_idle(client) for client in clients))
    for client in clients:
        await client.channel.close()
    assert gateways[1].stop() == 0
