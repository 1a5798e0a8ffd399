"""Bias, allowed ids, bad words, penalties and repetition detection through the running pair."""

import asyncio
import json
import warnings

import grpc
import pytest
from gateway_harness import model_files
from pair_requests import PairClient, make_request

from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb

PROMPT = "The capital of France is"
COUNTING = "1 2 3 1 2 3 1 2 3 1 2 3"


async def ids_of(client, text):
    return list((await client.generation.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text=text)))).token_ids)


async def generated(client, request):
    outcome = await client.generate(request)
    assert outcome.error is None, outcome.error
    return outcome


@pytest.mark.model
async def test_a_bias_forces_a_token(client):
    (cat,) = await ids_of(client, " cat")
    outcome = await generated(client, make_request(PROMPT, max_tokens=6, logit_bias={cat: 100.0}))
    assert outcome.token_ids() == [cat] * 6


@pytest.mark.model
async def test_only_allowed_ids_come(client):
    allowed = await ids_of(client, " one two three four five")
    outcome = await generated(
        client, make_request(PROMPT, max_tokens=20, temperature=1.0, seed=3, n=4, allowed_token_ids=allowed)
    )
    drawn = {token for index in range(4) for token in outcome.token_ids(index)}
    assert drawn <= set(allowed)
    assert len(drawn) > 1


@pytest.mark.model
async def test_a_bad_word_never_appears(client):
    assert "Paris" in (await generated(client, make_request(PROMPT, max_tokens=20))).text()
    for temperature in (0.0, 1.0):
        request = make_request(PROMPT, max_tokens=40, temperature=temperature, seed=1, n=3)
        request.text_options.bad_words.append("Paris")
        outcome = await generated(client, request)
        for index in range(3):
            ids = outcome.token_ids(index)
            for word in (await ids_of(client, "Paris"), await ids_of(client, " Paris")):
                assert all(ids[i : i + len(word)] != word for i in range(len(ids)))


@pytest.mark.model
async def test_penalties_break_a_loop(client):
    looping = await generated(client, make_request(COUNTING, max_tokens=24, ignore_eos=True))
    assert len(set(looping.token_ids())) < 8
    for name, value in (("frequency_penalty", 2.0), ("repetition_penalty", 1.5)):
        request = make_request(COUNTING, max_tokens=24, ignore_eos=True)
        setattr(request.sampling, name, value)
        outcome = await generated(client, request)
        assert len(set(outcome.token_ids())) > len(set(looping.token_ids()))


@pytest.mark.model
async def test_a_repetition_ends_the_output(client):
    request = make_request(COUNTING, max_tokens=200, ignore_eos=True)
    request.sampling.repetition_detection.min_pattern_size = 2
    request.sampling.repetition_detection.max_pattern_size = 12
    request.sampling.repetition_detection.min_count = 3
    outcome = await generated(client, request)
    assert outcome.last().finish_reason == params_pb2.FINISH_REASON_REPETITION
    ids = outcome.token_ids()
    assert any(ids[-3 * size :] == ids[-size:] * 3 for size in range(2, 13))


@pytest.mark.model
async def test_edits_that_leave_nothing_end_the_call_with_the_clients_fault(client):
    (cat,) = await ids_of(client, " cat")
    request = make_request(PROMPT, max_tokens=5, allowed_token_ids=[cat])
    request.text_options.bad_words.append("cat")
    outcome = await client.generate(request)
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "bad_words" in outcome.error.details()
    assert (await client.generate(make_request(PROMPT, max_tokens=1))).error is None


@pytest.mark.model
async def test_an_edited_draw_is_the_same_alone_and_among_others(client):
    def request(seed):
        made = make_request(
            PROMPT,
            max_tokens=16,
            temperature=1.0,
            top_p=0.9,
            seed=seed,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            logit_bias={260: 2.0},
        )
        made.text_options.bad_words.append("France")
        return made

    alone = [(await generated(client, request(seed))).token_ids() for seed in range(4)]
    others = [make_request(f"{i} {COUNTING}", max_tokens=20, temperature=i % 2, seed=i) for i in range(12)]
    outcomes = await asyncio.gather(*(generated(client, one) for one in [*map(request, range(4)), *others]))
    assert [outcome.token_ids() for outcome in outcomes[:4]] == alone


@pytest.mark.model
async def test_prompt_logprobs_from_a_position_and_of_chosen_ids_are_those_of_the_whole(client):
    def rows(outcome):
        positions = [row for message in outcome.messages for row in message.prompt_logprobs]
        return [{c.token_id: (c.logprob, c.rank) for c in row.candidates} for row in positions]

    whole = rows(await generated(client, make_request(PROMPT, max_tokens=1, prompt_logprobs=20)))
    wanted = max(whole[3], key=lambda token: whole[3][token][1])
    request = make_request(PROMPT, max_tokens=1, prompt_logprob_token_ids=[wanted], prompt_logprob_start=3)
    part = rows(await generated(client, request))
    assert part[:3] == [{}, {}, {}]
    assert [list(row) for row in part[3:]] == [[token, wanted] for token in (await ids_of(client, PROMPT))[3:]]
    assert part[3][wanted] == whole[3][wanted]
    for few, many in zip(part[3:], whole[3:], strict=True):
        assert all(many[token] == value for token, value in few.items() if token in many)


async def test_a_models_own_repetition_penalty_applies_unless_the_request_says_otherwise(start_process, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=258,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for name, contents in model_files().files.items():
        (tmp_path / name).write_bytes(contents)
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 100.0}))
    core = start_process("core", "--model", tmp_path, "--dtype", "float32", "--kv-cache-memory", "4MiB")
    gateway = start_process("gateway", "--core", core.address)
    gateway.wait_serving()
    client = PairClient(gateway.address)
    try:
        request = make_request("abcabc", max_tokens=30, ignore_eos=True)
        default = (await generated(client, request)).token_ids()
        request.sampling.repetition_penalty = 100.0
        stated = (await generated(client, request)).token_ids()
        request.sampling.repetition_penalty = 1.0
        none = (await generated(client, request)).token_ids()
    finally:
        await client.channel.close()
    assert default == stated
    assert len(set(default)) == 30  # what was there is all but ruled out
    assert default != none
