"""The running pair against continuations that Hugging Face transformers made in float32 (tests/data/greedy.jsonl)."""

import asyncio
import json
from pathlib import Path

import pytest

from headrace.client import AsyncClient, chat_prompt, text_prompt, token_prompt
from headrace.common.v1.params_pb2 import SamplingParams
from headrace.gateway_api.v1 import generation_pb2 as pb

CASES = [json.loads(line) for line in Path("tests/data/greedy.jsonl").read_text().splitlines()]
NEAR_TIE = 0.01  # below this margin between the two best logits, either token is right

pytestmark = pytest.mark.model


def prompt_of(case):
    if case["kind"] == "chat":
        return chat_prompt([(m["role"], m["content"]) for m in case["messages"]])
    return text_prompt(case["text"])


async def generate_all(server, requests):
    """All requests at once; the final messages of each."""

    async def one(client, request):
        return [message async for message in client.generate(request)]

    async with AsyncClient(server) as client:
        return await asyncio.gather(*(one(client, request) for request in requests))


def test_all_cases_reproduce_every_token_up_to_the_first_near_tie(pair):
    requests = [
        pb.GenerateRequest(
            prompt=prompt_of(case),
            sampling=SamplingParams(temperature=0, max_tokens=len(case["output_token_ids"]), logprobs=5),
            output_kind=pb.OUTPUT_KIND_FINAL_ONLY,
            return_prompt_token_ids=True,
        )
        for case in CASES
    ]
    assert len(requests) == 20
    for case, messages in zip(CASES, asyncio.run(generate_all(pair.server, requests)), strict=True):
        prompt_ids = [i for message in messages for i in message.prompt_token_ids]
        assert prompt_ids == case["prompt_token_ids"], case["id"]
        (output,) = [output for message in messages for output in message.outputs]
        check_tokens(case, list(output.token_ids))
        check_top5(case, output)
        if list(output.token_ids) == case["output_token_ids"]:
            assert output.text == case["output_text"], case["id"]


def check_tokens(case, ids):
    for step, (got, reference) in enumerate(zip(ids, case["output_token_ids"], strict=False)):
        if got != reference:
            assert case["margins"][step] < NEAR_TIE, f"{case['id']}: token {step} is {got}, not {reference}"
            return
    assert len(ids) == len(case["output_token_ids"]), case["id"]


def check_top5(case, output):
    for step, reference in enumerate(case["top5"]):
        if list(output.token_ids[:step]) != case["output_token_ids"][:step]:
            return  # past a near-tie the contexts differ
        got = {c.token_id: c.logprob for c in output.logprobs[step].candidates}
        for token_id, logprob in reference:
            assert got[token_id] == pytest.approx(logprob, abs=0.02), f"{case['id']}: step {step}, token {token_id}"


def test_bfloat16_ranks_the_reference_token_first_nearly_always(bfloat16_pair):
    """Teacher-forced: prompt log-probabilities over prompt and reference. transformers' own bfloat16 reaches 95.8 %."""
    first = 16
    requests = [
        pb.GenerateRequest(
            prompt=token_prompt([*case["prompt_token_ids"], *case["output_token_ids"][:first]]),
            sampling=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        )
        for case in CASES
    ]
    right = total = 0
    for case, messages in zip(CASES, asyncio.run(generate_all(bfloat16_pair.server, requests)), strict=True):
        rows = [row for message in messages for row in message.prompt_logprobs]
        reference = case["output_token_ids"][:first]
        assert len(rows) == len(case["prompt_token_ids"]) + len(reference)
        for token_id, row in zip(reference, rows[len(case["prompt_token_ids"]) :], strict=True):
            assert row.candidates[0].token_id == token_id
            right += row.candidates[0].rank == 1
            total += 1
    assert total > 300
    assert right / total >= 0.95, f"{right} of {total}"
