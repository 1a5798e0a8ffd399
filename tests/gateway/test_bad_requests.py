"""Bad requests: every violated field is named in one answer, and the next request works."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from gateway_harness import Client, text_request

from headrace.common.errors import InvalidRequest, RequestError
from headrace.common.rpc_status import from_rpc_error
from headrace.gateway_api.v1 import admin_pb2, models_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb

NAN = float("nan")


def request(change: Callable[[pb.GenerateRequest], Any]) -> pb.GenerateRequest:
    result = text_request("abc", max_tokens=2)
    change(result)
    return result


def ids(*token_ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=token_ids)))


def chat(*messages: dict[str, Any], **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(**message) for message in messages], **fields))
    )


async def refusal(client: Client, bad: pb.GenerateRequest) -> RequestError:
    outcome = await client.generate(bad)
    assert outcome.error is not None
    assert outcome.messages == []
    assert (await client.generate(text_request("abc", max_tokens=2))).text() == "de"
    return from_rpc_error(outcome.error)


async def violated_fields(client: Client, bad: pb.GenerateRequest) -> dict[str, str]:
    error = await refusal(client, bad)
    assert isinstance(error, InvalidRequest), error
    return {violation.field: violation.description for violation in error.violations}


USER = {"role": "user", "content": "hi"}
TABLE = {
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "empty text": (text_request(""), "prompt.text"),
    "empty ids": (ids(), "prompt.token_ids.ids"),
    "id outside": (ids(1, 258), "prompt.token_ids.ids[1]"),
    "no messages": (chat(), "prompt.chat.messages"),
    "bad role": (chat(USER, {"role": "robot", "content": "x"}), "prompt.chat.messages[1].role"),
    "template raises": (chat({"role": "user", "content": "boom"}), "prompt.chat"),
    "bad variables": (chat(USER, template_variables="[1]"), "prompt.chat.template_variables"),
    "bad tool": (chat(USER, tools=["{"]), "prompt.chat.tools[0]"),
    "bad tool call": (chat({"role": "assistant", "tool_calls": ["7"]}), "prompt.chat.messages[0].tool_calls[0]"),
    "content and parts": (
        chat({"role": "user", "content": "x", "parts": [pb.ContentPart(text="y")]}),
        "prompt.chat.messages[0].parts",
    ),
    "two endings": (
        chat(USER, continue_final_message=True, add_generation_prompt=True),
        "prompt.chat.continue_final_message",
    ),
    "temperature -1": (text_request("a", temperature=-1), "sampling.temperature"),
    "temperature NaN": (text_request("a", temperature=NAN), "sampling.temperature"),
    "temperature 5": (text_request("a", temperature=5), "sampling.temperature"),
    "temperature inf": (text_request("a", temperature=float("inf")), "sampling.temperature"),
    "top_p 0": (text_request("a", top_p=0), "sampling.top_p"),
    "top_p NaN": (text_request("a", top_p=NAN), "sampling.top_p"),
    "top_k -5": (text_request("a", top_k=-5), "sampling.top_k"),
    "min_p 2": (text_request("a", min_p=2), "sampling.min_p"),
    "n 0": (text_request("a", n=0), "sampling.n"),
    "n too large": (text_request("a", n=20_000), "sampling.n"),
    "max_tokens 0": (text_request("a", max_tokens=0), "sampling.max_tokens"),
    "until_context false": (text_request("a", until_context=False), "sampling.until_context"),
    "min above max": (text_request("a", max_tokens=3, min_tokens=4), "sampling.min_tokens"),
    "logprobs 21": (text_request("a", logprobs=21), "sampling.logprobs"),
    "prompt_logprobs -2": (text_request("a", prompt_logprobs=-2), "sampling.prompt_logprobs"),
    "stop id outside": (request(lambda r: r.sampling.stop_token_ids.append(999)), "sampling.stop_token_ids"),
    "empty stop": (request(lambda r: r.text_options.stop.append("")), "text_options.stop"),
    "many stops": (request(lambda r: r.text_options.stop.extend(["x"] * 257)), "text_options.stop"),
    "long stop": (request(lambda r: r.text_options.stop.append("x" * 4097)), "text_options.stop"),
    "empty bad word": (request(lambda r: r.text_options.bad_words.append("")), "text_options.bad_words"),
    "many bad words": (request(lambda r: r.text_options.bad_words.extend(["x"] * 129)), "text_options.bad_words"),
    "long bad word": (request(lambda r: r.text_options.bad_words.append("x" * 1025)), "text_options.bad_words"),
    "many bad sequences": (
        request(lambda r: r.text_options.bad_words.extend(chr(ord("!") + i) for i in range(65))),
        "text_options.bad_words",
    ),
    "bad word of many tokens": (
        request(lambda r: r.text_options.bad_words.extend(["ok", "x" * 1024])),
        "text_options.bad_words[1]",
    ),
    "prompt start too far": (text_request("abc", prompt_logprob_start=3), "sampling.prompt_logprob_start"),
    "truncate to 0": (
        request(lambda r: setattr(r.text_options, "truncate_prompt_tokens", 0)),
        "text_options.truncate_prompt_tokens",
    ),
    "interval 0": (request(lambda r: setattr(r, "stream_interval", 0)), "stream_interval"),
    "long id": (request(lambda r: setattr(r, "request_id", "x" * 257)), "request_id"),
    "unknown kind": (request(lambda r: setattr(r, "output_kind", 17)), "output_kind"),
    "infinite time": (request(lambda r: setattr(r.sampling.time_limit, "seconds", -1)), "sampling.time_limit"),
}


@pytest.mark.parametrize(("bad", "field"), TABLE.values(), ids=TABLE.keys())
async def test_each_bad_field_is_named(client: Client, bad: pb.GenerateRequest, field: str) -> None:
    assert list(await violated_fields(client, bad)) == [field]


async def test_all_violations_are_named_at_once(client: Client) -> None:
    bad = text_request("x" * 600, temperature=NAN, top_p=0, top_k=-5, n=0, max_tokens=0)
    bad.text_options.stop.append("")
    bad.stream_interval = 0
    assert set(await violated_fields(client, bad)) == {
        "prompt.text",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.n",
        "sampling.max_tokens",
        "text_options.stop",
        "stream_interval",
    }


async def test_an_id_outside_the_vocabulary_is_told_with_place_and_limit(client: Client) -> None:
    assert await violated_fields(client, ids(7, 4_000_000_000)) == {
        "prompt.token_ids.ids[1]": "must be between 0 and 257; got 4000000000",
    }


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("length", [512, 600])
async def test_a_prompt_that_leaves_no_room_is_told_all_numbers(client: Client, as_ids: bool, length: int) -> None:
    bad = text_request("x" * length, max_tokens=7)
    if as_ids:
        bad.prompt.token_ids.ids.extend(b"x" * length)
    (message,) = (await violated_fields(client, bad)).values()
    for number in (str(length), "512", "7"):
        assert number in message


async def test_the_longest_prompt_that_leaves_room_is_served(client: Client) -> None:
    outcome = await client.generate(text_request("x" * 511, max_tokens=7))
    assert outcome.error is None
    assert outcome.usage.output_tokens == 1


async def test_a_five_megabyte_prompt_is_refused_by_its_size(client: Client) -> None:
    (message,) = (await violated_fields(client, text_request("x" * 5_000_000))).values()
    assert "5000000" in message
    bad = chat({"role": "user", "content": "x" * 5_000_000})
    assert list(await violated_fields(client, bad)) == ["prompt.chat"]


async def test_the_templates_own_words_reach_the_client(client: Client) -> None:
    fields = await violated_fields(client, chat({"role": "user", "content": "boom"}))
    assert "no booms here" in fields["prompt.chat"]


async def test_unknown_models_are_not_found(client: Client) -> None:
    error = await refusal(client, request(lambda r: setattr(r, "model", "gpt-9")))
    assert error.code == grpc.StatusCode.NOT_FOUND
    assert "gpt-9" in error.message
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await client.models.GetModel(models_pb2.GetModelRequest(name="gpt-9"))
    assert failure.value.code() == grpc.StatusCode.NOT_FOUND


async def test_fields_of_a_newer_contract_are_refused_by_number_and_place(client: Client) -> None:
    newer = text_request("abc", max_tokens=2)
    wire = newer.SerializeToString()
    # Field 900 of the request, and field 901 inside sampling (field 3), both varints of value 1.
    inside = b"\xa8\x38\x01"
    wire += b"\xa0\x38\x01" + bytes([3 << 3 | 2, len(inside)]) + inside
    assert set(await violated_fields(client, pb.GenerateRequest.FromString(wire))) == {"900", "sampling.901"}


NOT_BUILT = {
    "sampling.thinking_token_budget": text_request("a", thinking_token_budget=5),
    "adapter": request(lambda r: setattr(r, "adapter", "x")),
    "resume": request(lambda r: r.resume.SetInParent()),
    "data_parallel_rank": request(lambda r: setattr(r, "data_parallel_rank", 0)),
    "prompt.embeds": pb.GenerateRequest(prompt=pb.Prompt(embeds=pb.Tensor(dtype="float32"))),
    "prompt.media": request(lambda r: r.prompt.media.add()),
    "prompt.chat.messages.parts.media": chat({"role": "user", "parts": [pb.ContentPart(media=pb.MediaItem())]}),
}


@pytest.mark.parametrize(("field", "asked"), NOT_BUILT.items(), ids=NOT_BUILT.keys())
async def test_what_is_not_built_is_refused_by_name(client: Client, field: str, asked: pb.GenerateRequest) -> None:
    error = await refusal(client, asked)
    assert error.code == grpc.StatusCode.UNIMPLEMENTED
    assert field in error.message


async def test_defaults_stated_openly_are_served(client: Client) -> None:
    plain = text_request("abc", max_tokens=2, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, top_k=0)
    assert (await client.generate(plain)).text() == "de"


@pytest.mark.parametrize(
    ("call", "bad"),
    [
        ("LoadAdapter", admin_pb2.LoadAdapterRequest()),
        ("UnloadAdapter", admin_pb2.UnloadAdapterRequest()),
        ("UpdateWeights", admin_pb2.UpdateWeightsRequest()),
        ("FlushPrefixCache", admin_pb2.FlushPrefixCacheRequest()),
        ("DrainCore", admin_pb2.DrainCoreRequest()),
    ],
)
async def test_admin_calls_are_refused_by_name(client: Client, call: str, bad: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await getattr(client.admin, call)(bad)
    assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert call in (failure.value.details() or "")


async def test_tokenize_and_detokenize_name_what_is_bad(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await client.generation.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="")))
    assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await client.generation.Detokenize(pb.DetokenizeRequest(token_ids=[1, 500]))
    assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "500" in (failure.value.details() or "")


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (chat(*[USER] * 16_385), "prompt.chat.messages"),
        (chat(USER, tools=["x"] * 16_385), "prompt.chat.tools"),
        (chat({"role": "user", "parts": [pb.ContentPart()] * 16_385}), "prompt.chat.messages.parts and tool_calls"),
        (request(lambda r: r.prompt.media.extend([pb.MediaItem()] * 16_385)), "prompt.media"),
        (request(lambda r: r.resume.completions.extend([pb.ResumePoint()] * 16_385)), "resume.completions"),
    ],
    ids=["messages", "tools", "parts", "media", "resume points"],
)
async def test_what_is_in_too_many_pieces_is_refused_without_looking_at_each(
    client: Client, bad: pb.GenerateRequest, field: str
) -> None:
    assert await violated_fields(client, bad) == {field: "at most 16384 items; got 16385"}


@pytest.mark.parametrize(
    "bad",
    [
        chat(*[{"role": "wizard"}] * 16_000),
        chat({"role": "é" * 1_000_000}),
        chat(USER, tools=["%"] * 16_000),
        request(lambda r: r.sampling.logit_bias.update(dict.fromkeys(range(100_000), NAN))),
    ],
    ids=["many roles", "one long role", "many tools", "many biases"],
)
async def test_a_refusal_of_any_length_is_told_as_what_it_is(client: Client, bad: pb.GenerateRequest) -> None:
    assert await violated_fields(client, bad)


@pytest.mark.parametrize("bad", [b"\x0a\xff", b"\xff" * 30, b"\x12\x02\x0a\x00\x0b"])
@pytest.mark.parametrize("call", ["GenerationService/Generate", "GenerationService/Tokenize", "ModelService/GetLoad"])
async def test_bytes_that_are_no_message_are_the_clients_fault(client: Client, call: str, bad: bytes) -> None:
    send: Any = client.channel.unary_stream(f"/headrace.gateway_api.v1.{call}", None, None)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await send(bad, timeout=10).read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes" in (error.value.details() or "")
