"""Generate, Tokenize and Detokenize over real gRPC, before a fake core."""

import asyncio
import hashlib

import grpc
import pytest
from gateway_harness import EOS, KINDS, SECOND_EOS, Client, eventually, final_text, text_request

from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.fakes import FakeBehaviour, FakeCore
from headrace.gateway_api.v1 import generation_pb2 as pb

EURO = "€".encode()  # three bytes, so three tokens here


async def test_streams_tokens_as_text(client: Client) -> None:
    outcome = await client.generate(text_request("abc", max_tokens=5))
    assert outcome.error is None
    assert outcome.text() == "defgh"
    assert bytes(outcome.token_ids()) == b"defgh"
    assert outcome.last().finish_reason == params_pb2.FINISH_REASON_LENGTH
    assert (outcome.usage.prompt_tokens, outcome.usage.output_tokens) == (3, 5)


async def test_default_is_sixteen_tokens(client: Client) -> None:
    outcome = await client.generate(text_request("a"))
    assert outcome.usage.output_tokens == 16


async def test_until_context_ends_as_length_at_the_contexts_end(client: Client, info: core_pb.CoreInfo) -> None:
    outcome = await client.generate(text_request("a", until_context=True))
    assert outcome.usage.output_tokens == info.max_model_len - 1
    assert outcome.last().finish_reason == params_pb2.FINISH_REASON_LENGTH


async def test_first_message_names_request_numerics_and_seed(client: Client) -> None:
    request = text_request("abc", max_tokens=3)
    request.request_id, request.return_prompt_token_ids = "mine", True
    outcome = await client.generate(request)
    first, rest = outcome.messages[0], outcome.messages[1:]
    assert (first.request_id, first.numerics_id, bytes(first.prompt_token_ids)) == ("mine", "fake-numerics", b"abc")
    assert first.outputs[0].HasField("seed")
    assert all(not m.request_id and not m.numerics_id and not m.prompt_token_ids for m in rest)
    assert all(m.exact for m in outcome.messages)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_ends_with_the_same_text(
    client: Client, behaviour: FakeBehaviour, kind: pb.OutputKind.ValueType
) -> None:
    behaviour.script = [*b"price: ", *EURO, *b"5", 0xE2, 0x82]  # the last character stays incomplete
    request = text_request("A", max_tokens=13)
    request.output_kind = kind
    outcome = await client.generate(request)
    assert final_text(outcome, kind) == "price: €5\ufffd"
    assert len(outcome.messages) == 1 or kind != pb.OUTPUT_KIND_FINAL_ONLY
    for message in outcome.messages[:-1]:
        assert not message.outputs[0].text.endswith("\ufffd")


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_deltas_join_to_the_cumulative_output(
    client: Client, behaviour: FakeBehaviour, tokens_per_step: int
) -> None:
    behaviour.tokens_per_step = tokens_per_step
    request = text_request("A", max_tokens=20, logprobs=1)
    deltas = await client.generate(request)
    request.output_kind = pb.OUTPUT_KIND_CUMULATIVE
    whole = (await client.generate(request)).last()
    outputs = [o for m in deltas.messages for o in m.outputs]
    assert deltas.text() == whole.text
    assert deltas.token_ids() == list(whole.token_ids)
    assert [row for o in outputs for row in o.logprobs] == list(whole.logprobs)
    assert outputs[-1].cumulative_logprob == whole.cumulative_logprob == -20
    position = 0
    for output in outputs:
        assert output.token_offset == position
        position += len(output.token_ids)


@pytest.mark.parametrize("interval", [1, 5, 10, 100])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_stream_interval_and_kind_change_messages_but_not_text(
    client: Client, behaviour: FakeBehaviour, interval: int, kind: pb.OutputKind.ValueType, tokens_per_step: int
) -> None:
    behaviour.tokens_per_step = tokens_per_step
    request = text_request("A", max_tokens=40)
    request.text_options.stop.append("vwx")
    request.stream_interval, request.output_kind = interval, kind
    outcome = await client.generate(request)
    assert final_text(outcome, kind) == "abcdefghijklmnopqrstu"
    assert outcome.usage.output_tokens == 24
    if kind == pb.OUTPUT_KIND_DELTA:
        sizes = [len(o.token_ids) for m in outcome.messages for o in m.outputs]
        assert all(size >= interval for size in sizes[1:-1])


async def test_stop_string_cuts_text_and_ids_and_aborts_in_the_core(
    client: Client, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.step_pause_s = 0.005
    request = text_request("A", max_tokens=400)
    request.text_options.stop.extend(["zzz", "def"])
    outcome = await client.generate(request)
    assert outcome.text() == "abc"
    assert bytes(outcome.token_ids()) == b"abcdef"
    assert (outcome.last().stop_text, outcome.last().finish_reason) == ("def", params_pb2.FINISH_REASON_STOP)
    assert outcome.usage.output_tokens == 6
    assert core.aborted == [core.requests[0].internal_id]
    assert outcome.usage.cached_tokens == 0
    assert core.stats.running == 0


async def test_included_stop_string_stays_in_the_text(client: Client) -> None:
    request = text_request("A", max_tokens=40)
    request.text_options.stop.append("def")
    request.text_options.include_stop_in_output = True
    assert (await client.generate(request)).text() == "abcdef"


async def test_stop_string_waits_for_min_tokens(client: Client) -> None:
    request = text_request("A", max_tokens=60, min_tokens=10)
    request.text_options.stop.append("c")
    assert (await client.generate(request)).text() == "abcdefghijklmnopqrstuvwxyzab"


async def test_held_back_text_is_released_at_the_end(client: Client) -> None:
    request = text_request("A", max_tokens=5)
    request.text_options.stop.append("efgh")
    assert (await client.generate(request)).text() == "abcde"


@pytest.mark.parametrize(("token", "stop_token_id"), [(EOS, None), (SECOND_EOS, SECOND_EOS), (ord("q"), ord("q"))])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_stop_tokens_keep_their_id_and_logprobs_and_lose_their_text(
    client: Client,
    behaviour: FakeBehaviour,
    token: int,
    stop_token_id: int | None,
    include: bool,
    logprobs: int | None,
    tokens_per_step: int,
) -> None:
    behaviour.script, behaviour.tokens_per_step = [*b"hi", token], tokens_per_step
    request = text_request("A", max_tokens=40, **({} if logprobs is None else {"logprobs": logprobs}))
    request.sampling.stop_token_ids.append(ord("q"))
    request.text_options.include_stop_in_output = include
    request.text_options.skip_special_tokens = False
    outcome = await client.generate(request)
    text = {EOS: "<eos>", SECOND_EOS: "<bos>", ord("q"): "q"}[token]
    assert outcome.text() == "hi" + (text if include else "")
    assert outcome.token_ids() == [*b"hi", token]
    last = outcome.last()
    assert last.finish_reason == params_pb2.FINISH_REASON_STOP
    assert (last.stop_token_id if last.HasField("stop_token_id") else None) == stop_token_id
    rows = [row for m in outcome.messages for o in m.outputs for row in o.logprobs]
    assert [row.candidates[0].token_id for row in rows] == ([] if logprobs is None else [*b"hi", token])


async def test_ignored_end_of_sequence_goes_on(client: Client, behaviour: FakeBehaviour) -> None:
    behaviour.script = [*b"hi", EOS, *b"yo"]
    outcome = await client.generate(text_request("A", max_tokens=5, ignore_eos=True))
    assert outcome.text() == "hiyo"
    assert outcome.token_ids() == [*b"hi", EOS, *b"yo"]


async def test_ids_only_where_detokenize_is_off(client: Client) -> None:
    request = text_request("A", max_tokens=4)
    request.text_options.detokenize = False
    outcome = await client.generate(request)
    assert outcome.text() == ""
    assert bytes(outcome.token_ids()) == b"abcd"


async def test_children_draw_with_successive_seeds(client: Client, core: FakeCore, behaviour: FakeBehaviour) -> None:
    behaviour.next_token = lambda _last, seed: ord("a") + seed % 26
    outcome = await client.generate(text_request("A", max_tokens=3, n=3, seed=2**64 - 2))
    assert [child.seed for child in core.requests[0].children] == [2**64 - 2, 2**64 - 1, 0]
    assert {outcome.text(i) for i in range(3)} == {chr(ord("a") + s % 26) * 3 for s in (2**64 - 2, 2**64 - 1, 0)}
    firsts = {o.index: o.seed for m in reversed(outcome.messages) for o in m.outputs if o.HasField("seed")}
    assert firsts == {0: 2**64 - 2, 1: 2**64 - 1, 2: 0}
    assert (outcome.usage.prompt_tokens, outcome.usage.output_tokens) == (1, 9)


async def test_a_drawn_seed_is_reported_and_repeats_the_output(client: Client, core: FakeCore) -> None:
    first = await client.generate(text_request("A", max_tokens=1))
    seed = first.messages[0].outputs[0].seed
    assert core.requests[0].children[0].seed == seed
    await client.generate(text_request("A", max_tokens=1, seed=seed))
    assert core.requests[1].children[0].seed == seed


async def test_one_stop_string_does_not_end_the_other_children(
    client: Client, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.next_token = lambda last, seed: last + 1 if seed else ord("z")
    behaviour.step_pause_s = 0.002
    request = text_request("a", max_tokens=8, n=2, seed=0)
    request.text_options.stop.append("zz")
    outcome = await client.generate(request)
    assert outcome.text(0) == ""
    assert outcome.text(1) == "bcdefghi"
    assert len(outcome.messages[-1].usage.ListFields()) > 0
    assert core.stats.running == 0


@pytest.mark.parametrize("by_blob", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_come_with_their_tokens(
    client: Client, behaviour: FakeBehaviour, kind: pb.OutputKind.ValueType, by_blob: bool
) -> None:
    behaviour.logprobs_by_blob = by_blob
    request = text_request("A", max_tokens=6, logprobs=2)
    request.output_kind = kind
    outcome = await client.generate(request)
    assert outcome.error is None
    for output in (o for m in outcome.messages for o in m.outputs):
        assert len(output.logprobs) == len(output.token_ids)
        for token_id, row in zip(output.token_ids, output.logprobs, strict=True):
            first, *others = row.candidates
            assert (first.token_id, first.token_bytes, first.logprob) == (token_id, bytes([token_id]), -1)
            assert [(c.token_id, c.rank, c.logprob) for c in others] == [(0, 1, -0.5), (1, 2, -1.5)]
    assert outcome.last().cumulative_logprob == -6


@pytest.mark.parametrize("by_blob", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_prompt_logprobs_come_once_and_before_the_first_output(
    client: Client, behaviour: FakeBehaviour, kind: pb.OutputKind.ValueType, by_blob: bool
) -> None:
    behaviour.logprobs_by_blob = by_blob
    request = text_request("hello", max_tokens=4, prompt_logprobs=1, n=2)
    request.output_kind = kind
    outcome = await client.generate(request)
    rows = [row for m in outcome.messages for row in m.prompt_logprobs]
    assert [bytes(c.token_id for c in row.candidates[:1]) for row in rows] == [b"", b"e", b"l", b"l", b"o"]
    first_output = next(i for i, m in enumerate(outcome.messages) if m.outputs)
    assert all(not m.prompt_logprobs for m in outcome.messages[first_output:])
    assert outcome.messages[0].request_id


async def test_logprobs_of_a_one_token_prompt_are_one_empty_row(client: Client) -> None:
    outcome = await client.generate(text_request("h", max_tokens=1, prompt_logprobs=1))
    assert [len(row.candidates) for m in outcome.messages for row in m.prompt_logprobs] == [0]


async def test_a_lost_blob_fails_its_request_only(client: Client, core: FakeCore, behaviour: FakeBehaviour) -> None:
    behaviour.logprobs_by_blob = True
    behaviour.step_pause_s = 0.01
    core.put = lambda payload: hashlib.sha256(payload + b"?").hexdigest()  # type: ignore[method-assign]
    plain, lost = await asyncio.gather(
        client.generate(text_request("A", max_tokens=20)), client.generate(text_request("x", max_tokens=20, logprobs=1))
    )
    assert plain.error is None
    assert lost.error is not None
    assert lost.error.code() == grpc.StatusCode.NOT_FOUND
    await eventually(lambda: core.stats.running == 0)
