"""n outputs that take the most likely token are one output n times: computed once, given n times."""

import asyncio
from typing import Any

import grpc
import pytest
from gateway_harness import EOS, KINDS, Client, eventually, final_text, running_gateway, serving, text_request

from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway import request_stream
from headrace.gateway.fakes import FakeBehaviour, FakeCore, serve_fake_core
from headrace.gateway_api.v1 import generation_pb2 as pb

N = 3


def greedy(**sampling: Any) -> pb.GenerateRequest:
    return text_request("A", **({"temperature": 0, "n": N, "max_tokens": 12} | sampling))


def without_place(output: pb.CompletionOutput) -> pb.CompletionOutput:
    copy = pb.CompletionOutput()
    copy.CopyFrom(output)
    copy.ClearField("index")
    copy.ClearField("seed")
    return copy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("stop", ["", "fgh"])
async def test_the_core_computes_one_and_every_message_carries_all(
    client: Client,
    core: FakeCore,
    behaviour: FakeBehaviour,
    kind: pb.OutputKind.ValueType,
    tokens_per_step: int,
    stop: str,
) -> None:
    behaviour.tokens_per_step, behaviour.step_pause_s = tokens_per_step, 0.002
    request = greedy(logprobs=2, prompt_logprobs=1, seed=2**64 - 1)
    request.output_kind = kind
    request.text_options.stop.extend([stop] if stop else [])
    outcome = await client.generate(request)
    assert outcome.error is None
    assert [child.index for child in core.requests[0].children] == [0]
    for message in outcome.messages:
        assert [output.index for output in message.outputs] in ([], list(range(N)))
        assert all(without_place(output) == without_place(message.outputs[0]) for output in message.outputs)
    expected = "abcde" if stop else "abcdefghijkl"
    assert [final_text(outcome, kind, i) for i in range(N)] == [expected] * N
    assert {outcome.last(i).stop_text for i in range(N)} == {stop}
    seeds = {o.index: o.seed for m in reversed(outcome.messages) for o in m.outputs if o.HasField("seed")}
    assert seeds == {0: 2**64 - 1, 1: 0, 2: 1}
    num_tokens = 8 if stop else 12
    assert (outcome.usage.prompt_tokens, outcome.usage.output_tokens) == (1, N * num_tokens)
    assert core.aborted == ([core.requests[0].internal_id] if stop else [])
    assert core.stats.running == 0


@pytest.mark.parametrize("n", [1, N])
async def test_the_outputs_are_those_that_one_output_alone_is(client: Client, behaviour: FakeBehaviour, n: int) -> None:
    behaviour.script = [*b"price: ", *"€".encode(), 0xE2, EOS]
    alone = await client.generate(greedy(n=1, logprobs=1))
    outcome = await client.generate(greedy(n=n, logprobs=1))
    for index in range(n):
        mine = [o for m in outcome.messages for o in m.outputs if o.index == index]
        whole = [o for m in alone.messages for o in m.outputs]
        assert outcome.text(index) == alone.text() == "price: €\ufffd"
        assert outcome.token_ids(index) == alone.token_ids()
        assert [row for o in mine for row in o.logprobs] == [row for o in whole for row in o.logprobs]
        assert mine[-1].finish_reason == params_pb2.FINISH_REASON_STOP
        assert mine[-1].cumulative_logprob == whole[-1].cumulative_logprob


async def test_a_client_that_goes_away_aborts_the_one_completion(
    client: Client, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.step_pause_s = 0.01
    call = client.generation.Generate(greedy(max_tokens=400))
    await call.read()
    call.cancel()
    await eventually(lambda: core.aborted == [core.requests[0].internal_id])
    await eventually(lambda: core.stats.running == 0)


async def test_a_failure_ends_all_outputs_and_what_they_have_is_sent_first(
    client: Client, behaviour: FakeBehaviour
) -> None:
    behaviour.fail_after = (3, core_pb.Finished(reason=params_pb2.FINISH_REASON_ERROR, code=13, message="broken"))
    outcome = await client.generate(greedy())
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.INTERNAL
    assert [outcome.text(i) for i in range(N)] == ["abc"] * N
    assert {outcome.last(i).finish_reason for i in range(N)} == {params_pb2.FINISH_REASON_ERROR}


async def test_outputs_that_are_drawn_are_computed_each(client: Client, core: FakeCore) -> None:
    await asyncio.gather(
        client.generate(greedy(temperature=0.5)),
        client.generate(greedy(temperature=1e-4)),
    )
    assert [len(request.children) for request in core.requests] == [N, N]


async def test_many_outputs_come_in_messages_of_bounded_size(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_stream, "MAX_COPIES_BYTES", 1000)
    request = greedy(n=500)
    request.output_kind = pb.OUTPUT_KIND_CUMULATIVE
    outcome = await client.generate(request)
    assert max(message.ByteSize() for message in outcome.messages) < 2000
    assert {outcome.last(i).text for i in range(500)} == {"abcdefghijkl"}
    assert outcome.usage.output_tokens == 500 * 12


async def test_what_is_kept_for_a_final_message_counts_as_often_as_it_will_be_sent(core: FakeCore) -> None:
    async with serve_fake_core(core) as address, running_gateway(address, max_unsent_bytes=65536) as gateway:
        await serving(gateway.client)
        for n, fails in ((100, False), (200, True)):  # of 12 tokens, at 32 bytes
            request = greedy(n=n)
            request.output_kind = pb.OUTPUT_KIND_FINAL_ONLY
            outcome = await gateway.client.generate(request)
            assert (outcome.error is not None) == fails
        assert outcome.error is not None
        assert outcome.error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
