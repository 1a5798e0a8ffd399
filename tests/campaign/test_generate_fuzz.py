"""Random Generate calls, good and bad, some cancelled: each ends, the bad ones by name, and nothing is left behind."""

import asyncio
import collections
import random

import grpc
import pytest
from fake_pair import running_fake_pair
from gateway_harness import eventually

from headrace.gateway_api.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]

EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ALREADY_EXISTS,
}
ODD_FLOATS = [0.0, -0.0, 1.0, 0.5, 2.0, 1e-9, -1.0, 5.0, 1e30, float("nan"), float("inf"), -float("inf")]
ODD_INTS = [0, 1, 2, 3, 19, 20, 21, 100, 511, 512, 2**31 - 1]
TEXTS = ["", "a", "abc", "x" * 600, "é😀" * 5, "\x00", "<eos>", "boom", "nop" * 30]


def random_request(rng):
    """About half of them are good; the others break one rule or many."""
    request = pb.GenerateRequest(output_kind=rng.choice([0, 1, 2, 3]), return_prompt_token_ids=rng.random() < 0.2)
    fill_prompt(request.prompt, rng)
    fill_good_options(request, rng)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 4)):
            break_something(request, rng)
    return request


def fill_prompt(prompt, rng):
    form = rng.choice(["text", "ids", "chat"])
    if form == "text":
        prompt.text = rng.choice(TEXTS[1:])
    elif form == "ids":
        prompt.token_ids.ids.extend(rng.randrange(256) for _ in range(rng.randint(1, 30)))
    else:
        for _ in range(rng.randint(1, 3)):
            prompt.chat.messages.add(role=rng.choice(["user", "assistant", "system"]), content=rng.choice(TEXTS[:-2]))


def fill_good_options(request, rng):
    sampling = request.sampling
    for name, values in (
        ("temperature", [0, 0.5, 1, 2]),
        ("top_p", [0.1, 0.9, 1]),
        ("min_p", [0, 0.1, 1]),
        ("top_k", [-1, 0, 1, 40]),
        ("n", [1, 2, 3]),
        ("max_tokens", [1, 2, 5, 30, 600]),
        ("logprobs", [0, 1, 20]),
        ("prompt_logprobs", [0, 3]),
        ("seed", [0, 7, 2**64 - 1]),
        ("presence_penalty", [-2, 0, 0.5]),
        ("frequency_penalty", [-2, 0, 0.5]),
        ("repetition_penalty", [0.5, 1, 1e30]),
        ("prompt_logprob_start", [0]),
    ):
        if rng.random() < 0.25:
            setattr(sampling, name, rng.choice(values))
    if rng.random() < 0.2:
        sampling.stop_token_ids.extend(rng.choice([[97], [98, 99], list(range(200))]))
    if rng.random() < 0.2:
        request.text_options.stop.extend(rng.choice([["d"], ["fg", "g"], ["é"], ["zz"] * 5]))
    if rng.random() < 0.1:
        request.text_options.bad_words.extend(rng.choice([["d"], [" de", "é"], ["never"]]))
    if rng.random() < 0.1:
        sampling.logit_bias.update(rng.choice([{97: 1e30}, {0: -1.5, 255: 2.5}]))
    if rng.random() < 0.1:
        sampling.allowed_token_ids.extend(rng.choice([[97], range(256)]))
    if rng.random() < 0.1:
        request.stream_interval = rng.choice([1, 7])
    if rng.random() < 0.1:
        sampling.time_limit.FromMilliseconds(rng.choice([1, 20, 1000]))
    if rng.random() < 0.1:
        request.request_id = f"same-{rng.randint(0, 3)}"
    request.priority = rng.choice([0, 0, 1, -5, 2**31 - 1])


def break_something(request, rng):
    sampling = request.sampling
    what = rng.randrange(11)
    if what == 0:
        request.prompt.text = rng.choice(["", TEXTS[-1] * 10])
    elif what == 1:
        request.prompt.token_ids.ids.append(rng.choice([258, 2**31]))
    elif what == 2:
        request.prompt.chat.messages.add(role=rng.choice(["wizard", "", "user"]), content="boom")
    elif what == 3:
        request.prompt.chat.template_variables = rng.choice(["[1]", "{", "nul"])
    elif what == 4:
        request.prompt.embeds.dtype = "float32"
    elif what == 5:
        name = rng.choice(
            ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
        )
        setattr(sampling, name, rng.choice(ODD_FLOATS))
    elif what == 6:
        name = rng.choice(["n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"])
        setattr(sampling, name, rng.choice(ODD_INTS))
    elif what == 7:
        sampling.top_k = rng.choice([-5, -(2**31)])
    elif what == 8:
        request.text_options.stop.append("")
        request.text_options.detokenize = rng.random() < 0.5
    elif what == 9:
        sampling.logit_bias[rng.choice([5, 9999])] = rng.choice(ODD_FLOATS)
    else:
        request.model, request.output_kind = rng.choice([("another", 1), ("", 9)])


async def call_once(client, rng):
    request = random_request(rng)
    call = client.generation.Generate(request, timeout=rng.choice([0.02, 0.3, 30, 30]))
    leave_after = rng.choice([None, None, None, 0, 1, 3])
    count = 0
    try:
        async for _ in call:
            if count == leave_after:
                call.cancel()
            count += 1
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.OK


async def test_fuzz(scale):
    rng = random.Random(7)
    seen: collections.Counter[grpc.StatusCode] = collections.Counter()
    total = 3_000 * scale
    async with running_fake_pair() as pair:
        client = pair.gateway.client

        async def worker(count, seed):
            own = random.Random(seed)
            for _ in range(count):
                seen[await call_once(client, own)] += 1

        await asyncio.gather(*(worker(total // 24, rng.random()) for _ in range(24)))
        assert set(seen) <= EXPECTED, seen
        assert seen[grpc.StatusCode.OK] >= 0.15 * total, seen
        assert seen[grpc.StatusCode.INVALID_ARGUMENT] >= 0.2 * total, seen

        async def all_gone():
            load = await client.load()
            (core,) = load.cores
            return (load.live_requests, core.running, core.waiting) == (0, 0, 0) and core.free_blocks == core.num_blocks

        await eventually(all_gone)
        assert pair.engine.healthy
        # And the next request works.
        request = pb.GenerateRequest(prompt=pb.Prompt(text="abc"))
        assert (await client.generate(request)).text() == "defghijklmnopqrs"
