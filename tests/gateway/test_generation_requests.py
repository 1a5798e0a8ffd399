"""Generate over real gRPC: what reaches the core, and how calls end."""

import asyncio
from typing import Any

import grpc
import pytest
from gateway_harness import EOS, KINDS, SECOND_EOS, Client, Gateway, Outcome, eventually, final_text, text_request

from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.fakes import FakeBehaviour, FakeCore
from headrace.gateway_api.v1 import generation_pb2 as pb


async def test_chat_is_rendered_by_the_template(client: Client, core: FakeCore) -> None:
    chat = pb.Chat(
        messages=[
            pb.ChatMessage(role="system", content="s"),
            pb.ChatMessage(role="user", parts=[pb.ContentPart(text="u1"), pb.ContentPart(text="u2")]),
        ]
    )
    request = pb.GenerateRequest(prompt=pb.Prompt(chat=chat))
    assert (await client.generate(request)).error is None
    assert bytes(core.requests[0].prompt_token_ids) == b"[system]s[user]u1u2[assistant]"
    request.prompt.chat.add_generation_prompt = False
    await client.generate(request)
    assert bytes(core.requests[1].prompt_token_ids) == b"[system]s[user]u1u2"


async def test_token_ids_are_used_as_they_are(client: Client, core: FakeCore) -> None:
    request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[5, 0, EOS])))
    assert (await client.generate(request)).error is None
    assert list(core.requests[0].prompt_token_ids) == [5, 0, EOS]


async def test_truncation_keeps_the_last_tokens(client: Client, core: FakeCore) -> None:
    request = text_request("A" * 5000 + "abc", max_tokens=1)
    request.text_options.truncate_prompt_tokens = 3
    assert (await client.generate(request)).error is None
    assert bytes(core.requests[0].prompt_token_ids) == b"abc"


async def test_the_core_gets_final_parameters(client: Client, core: FakeCore) -> None:
    request = text_request("A", temperature=0.0, top_p=0.5, max_tokens=3, ignore_eos=True)
    request.priority, request.cache_salt, request.request_id = -3, "salt", "mine"
    request.sampling.logprob_token_ids.append(7)
    request.sampling.time_limit.seconds = 5
    await client.generate(request, deadline_s=7)
    sent = core.requests[0]
    assert (sent.external_id, sent.priority, sent.cache_salt) == ("mine", -3, "salt")
    assert list(sent.eos_token_ids) == [EOS, SECOND_EOS]
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.max_tokens) == (0, 1, 3)
    assert sent.sampling.logprobs == 0  # so that the drawn token has a row beside the ids asked for
    assert sent.sampling.time_limit.seconds == 4  # what is left of five
    assert 6 < sent.timeout.seconds + sent.timeout.nanos / 1e9 < 7.1


async def test_models_defaults_fill_what_the_request_leaves_open(
    client: Client, core: FakeCore, info: core_pb.CoreInfo
) -> None:
    info.default_sampling.temperature = 0.25
    info.default_sampling.repetition_penalty = 1.5
    core.streams[0].send(core_pb.ConnectResponse(welcome=core_pb.Welcome(info=info)))
    await client.generate(text_request("A"))
    await eventually(lambda: _temperature_reaches(client, core, 0.25))
    assert core.requests[-1].sampling.repetition_penalty == 1.5
    await client.generate(text_request("A", repetition_penalty=1.0))
    assert core.requests[-1].sampling.repetition_penalty == 1.0


async def test_prompt_logprobs_can_start_late_and_be_asked_for_by_id_only(client: Client, core: FakeCore) -> None:
    request = text_request("hello", max_tokens=1, prompt_logprob_start=3)
    request.sampling.prompt_logprob_token_ids.append(7)
    outcome = await client.generate(request)
    sent = core.requests[0].sampling
    assert (sent.prompt_logprobs, list(sent.prompt_logprob_token_ids), sent.prompt_logprob_start) == (0, [7], 3)
    rows = [[c.token_id for c in row.candidates] for m in outcome.messages for row in m.prompt_logprobs]
    assert rows == [[], [], [], [ord("l")], [ord("o")]]


async def _temperature_reaches(client: Client, core: FakeCore, value: float) -> bool:
    await client.generate(text_request("A", max_tokens=1))
    return core.requests[-1].sampling.temperature == value


async def test_a_client_that_goes_away_frees_the_core(
    client: Client, core: FakeCore, behaviour: FakeBehaviour, info: core_pb.CoreInfo
) -> None:
    behaviour.step_pause_s = 0.01
    call = client.generation.Generate(text_request("A", until_context=True, n=4))
    async for _ in call:
        break
    assert (await client.load()).cores[0].running == 4
    call.cancel()

    async def free() -> bool:
        load = await client.load()
        return load.live_requests == 0 and load.cores[0].running == 0 and load.cores[0].free_blocks == info.num_blocks

    await eventually(free)


async def test_a_client_that_goes_away_before_the_first_token_frees_the_core(
    client: Client, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.silent = True
    call = client.generation.Generate(text_request("A"))
    await eventually(lambda: core.requests)
    call.cancel()
    await eventually(lambda: core.stats.running == 0)


async def test_deadline_ends_the_call_and_frees_the_core(
    client: Client, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.step_pause_s = 0.02
    outcome = await client.generate(text_request("A", until_context=True), deadline_s=0.3)
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert outcome.text().startswith("abc")
    await eventually(lambda: core.stats.running == 0)


def row(reason: params_pb2.FinishReason.ValueType, code: int = 0, message: str = "") -> core_pb.Finished:
    return core_pb.Finished(reason=reason, code=code, message=message)


@pytest.mark.parametrize(
    ("finished", "status"),
    [
        (row(params_pb2.FINISH_REASON_REPETITION), None),
        (row(params_pb2.FINISH_REASON_TIME_LIMIT), None),
        (row(params_pb2.FINISH_REASON_ABORT), grpc.StatusCode.CANCELLED),
        (row(params_pb2.FINISH_REASON_ABORT, 14, "going away"), grpc.StatusCode.UNAVAILABLE),
        (row(params_pb2.FINISH_REASON_DEADLINE), grpc.StatusCode.DEADLINE_EXCEEDED),
        (row(params_pb2.FINISH_REASON_ERROR, 13, "broken"), grpc.StatusCode.INTERNAL),
        (row(params_pb2.FINISH_REASON_ERROR), grpc.StatusCode.INTERNAL),
    ],
)
async def test_how_an_output_ends_decides_the_status(
    client: Client, core: FakeCore, behaviour: FakeBehaviour, finished: core_pb.Finished, status: grpc.StatusCode | None
) -> None:
    behaviour.fail_after = (3, finished)
    outcome = await client.generate(text_request("A", n=2))
    assert outcome.text() == "abc"
    assert outcome.last().finish_reason == finished.reason
    assert outcome.usage.prompt_tokens == 1
    assert outcome.usage.output_tokens >= 3
    assert (outcome.error.code() if outcome.error else None) == status
    if outcome.error and finished.message:
        assert outcome.error.details() == finished.message
    await eventually(lambda: core.stats.running == 0)


async def test_a_refused_request_ends_with_the_bare_status(client: Client, behaviour: FakeBehaviour) -> None:
    refusal = row(params_pb2.FINISH_REASON_ERROR, 8, "the queue is full")
    refusal.retry_delay.seconds = 3
    behaviour.refuse_with = refusal
    outcome = await client.generate(text_request("A"))
    assert outcome.messages == []
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("grpc-retry-pushback-ms", "3000") in tuple(outcome.error.trailing_metadata() or ())


async def test_a_live_request_id_is_refused_and_free_again_afterwards(
    client: Client, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.step_pause_s = 0.02
    request = text_request("A", max_tokens=20)
    request.request_id = "twice"
    first = asyncio.create_task(client.generate(request))
    await eventually(lambda: core.requests)
    second = await client.generate(request)
    assert second.error is not None
    assert second.error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert (await first).error is None
    assert (await client.generate(request)).error is None


async def test_sixty_four_streams_of_mixed_lengths_stay_apart(
    client: Client, core: FakeCore, info: core_pb.CoreInfo
) -> None:
    async def one(i: int) -> None:
        request = text_request(chr(ord("a") + i % 26), max_tokens=1 + 7 * i % 97)
        request.output_kind = KINDS[i % 3]
        outcome = await client.generate(request)
        expected = "".join(chr(ord("a") + (i + 1 + k) % 26) for k in range(1 + 7 * i % 97))
        assert final_text(outcome, KINDS[i % 3]) == expected
        assert outcome.usage.output_tokens == len(expected)

    await asyncio.gather(*(one(i) for i in range(64)))
    load = await client.load()
    assert (load.live_requests, load.cores[0].running, load.cores[0].free_blocks) == (0, 0, info.num_blocks)


async def test_a_prompt_too_long_for_the_stream_goes_by_blob(client: Client, core: FakeCore) -> None:
    info = core_pb.CoreInfo()
    info.CopyFrom(core.info)
    info.max_model_len = 300_000
    core.streams[0].send(core_pb.ConnectResponse(welcome=core_pb.Welcome(info=info)))
    prompt = "a" * 250_000
    request = text_request(prompt, max_tokens=2)

    async def accepted() -> bool:
        return (await client.generate(request)).error is None

    await eventually(accepted)
    assert len(core.blobs) == 1
    assert bytes(core.requests[-1].prompt_token_ids) == prompt.encode()


async def test_tokenize_and_detokenize(client: Client) -> None:
    answer = await client.generation.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="h€")))
    assert bytes(answer.token_ids) == "h€".encode()
    assert (answer.rendered, answer.max_model_len) == ("", 512)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="u")])
    answer = await client.generation.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(chat=chat)))
    assert answer.rendered == "[user]u[assistant]"
    assert bytes(answer.token_ids) == b"[user]u[assistant]"
    ids = [*b"hi", EOS]
    text = await client.generation.Detokenize(pb.DetokenizeRequest(token_ids=ids))
    assert text.text == "hi<eos>"
    text = await client.generation.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))
    assert text.text == "hi"


@pytest.mark.parametrize(
    ("stub", "call", "request_"),
    [
        ("generation", "Embed", pb.EmbedRequest()),
        ("generation", "Classify", pb.ClassifyRequest()),
        ("generation", "Score", pb.ScoreRequest()),
    ],
)
async def test_calls_that_are_not_built_say_so(client: Client, stub: str, call: str, request_: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await getattr(getattr(client, stub), call)(request_)
    assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert call in (failure.value.details() or "")


async def test_a_slow_reader_gets_everything_merged(client: Client, gateway: Gateway) -> None:
    call = client.generation.Generate(text_request("A", max_tokens=400))
    await asyncio.sleep(0.5)
    outcome = Outcome([message async for message in call], None)
    assert outcome.usage.output_tokens == 400 == len(outcome.text())
    assert gateway.work.done() is False
