"""Bad requests to the running pair: each is refused with every violated field named, and the next request works."""

import json
from typing import Any

import grpc
import pytest
from pair_requests import PairClient, make_request, violated_fields

from headrace.common.model_files import resolve_model
from headrace.common.tokenizer_files import load_tokenizer_files
from headrace.gateway_api.v1 import admin_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb

VOCAB_SIZE = 49152
MAX_MODEL_LEN = 8192
NAN, INFINITY = float("nan"), float("inf")

pytestmark = pytest.mark.model


def chat(*messages: tuple[str, str], **fields: Any) -> pb.Prompt:
    return pb.Prompt(
        chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages], **fields)
    )


def with_text_options(**options: Any) -> pb.GenerateRequest:
    request = make_request("hello", max_tokens=1)
    request.text_options.MergeFrom(pb.TextOptions(**options))
    return request


def with_unknown_field(message: Any, number: int) -> None:
    """As a newer client would send it: a field that this release has never heard of."""
    key = number << 3  # a varint
    message.MergeFromString(bytes([key & 0x7F | 0x80, key >> 7, 1]))


def unknown_request_field() -> pb.GenerateRequest:
    request = make_request("hello")
    with_unknown_field(request, 99)
    return request


def unknown_fields_inside() -> pb.GenerateRequest:
    request = make_request(chat(("user", "hello")))
    with_unknown_field(request.sampling, 77)
    with_unknown_field(request.prompt.chat.messages[0], 88)
    return request


def unknown_enum_value() -> pb.GenerateRequest:
    request = make_request("hello")
    request.MergeFromString(bytes([5 << 3, 9]))  # output_kind = 9
    return request


def all_wrong_at_once() -> pb.GenerateRequest:
    request = make_request(
        [1, VOCAB_SIZE], n=0, temperature=-1, top_p=0, top_k=-5, max_tokens=0, stop_token_ids=[VOCAB_SIZE], stop=[""]
    )
    request.stream_interval = 0
    return request


# Name of the case: the request, and the fields that its refusal must name, with parts of what is said of each.
CASES: dict[str, tuple[pb.GenerateRequest, dict[str, list[str]]]] = {
    "no prompt": (make_request(pb.Prompt()), {"prompt": []}),
    "empty text": (make_request(""), {"prompt.text": []}),
    "no token ids": (make_request([]), {"prompt.token_ids.ids": []}),
    "no chat messages": (make_request(chat()), {"prompt.chat.messages": []}),
    "ids out of range": (
        make_request([1, VOCAB_SIZE, 2, 2**32 - 1]),
        {
            "prompt.token_ids.ids[1]": [str(VOCAB_SIZE - 1), f"got {VOCAB_SIZE}"],
            "prompt.token_ids.ids[3]": [f"got {2**32 - 1}"],
        },
    ),
    "ids too long": (
        make_request([1000] * MAX_MODEL_LEN, max_tokens=7),
        {"prompt.token_ids": [f"has {MAX_MODEL_LEN} tokens", f"max_model_len is {MAX_MODEL_LEN}", "max_tokens is 7"]},
    ),
    "text too long": (
        make_request(" sea" * 9000, max_tokens=5),
        {"prompt.text": ["has 9000 tokens", f"max_model_len is {MAX_MODEL_LEN}", "max_tokens is 5"]},
    ),
    "text of 5 MB": (
        make_request("sea " * 1_250_000),
        {"prompt.text": ["got 5000000", f"max_model_len is {MAX_MODEL_LEN}"]},
    ),
    "chat of 5 MB": (make_request(chat(("user", "sea " * 1_250_000))), {"prompt.chat": ["got 5000000"]}),
    "chat too long": (
        make_request(chat(("user", " sea" * 9000))),
        {"prompt.chat": [f"max_model_len is {MAX_MODEL_LEN}"]},
    ),
    "temperature -1": (make_request("hello", temperature=-1), {"sampling.temperature": ["got -1"]}),
    "temperature 5": (make_request("hello", temperature=5), {"sampling.temperature": ["got 5"]}),
    "temperature NaN": (make_request("hello", temperature=NAN), {"sampling.temperature": ["got nan"]}),
    "temperature infinite": (make_request("hello", temperature=INFINITY), {"sampling.temperature": ["got inf"]}),
    "top_p 0": (make_request("hello", top_p=0), {"sampling.top_p": ["got 0"]}),
    "top_p NaN": (make_request("hello", top_p=NAN), {"sampling.top_p": ["got nan"]}),
    "top_k -5": (make_request("hello", top_k=-5), {"sampling.top_k": ["got -5"]}),
    "min_p 2": (make_request("hello", min_p=2), {"sampling.min_p": ["got 2"]}),
    "n 0": (make_request("hello", n=0), {"sampling.n": ["got 0"]}),
    "n too large": (make_request("hello", n=1_000_000), {"sampling.n": ["got 1000000"]}),
    "max_tokens 0": (make_request("hello", max_tokens=0), {"sampling.max_tokens": ["got 0"]}),
    "min_tokens over max_tokens": (
        make_request("hello", max_tokens=3, min_tokens=4),
        {"sampling.min_tokens": ["(3)", "got 4"]},
    ),
    "until_context false": (make_request("hello", until_context=False), {"sampling.until_context": []}),
    "logprobs 21": (make_request("hello", logprobs=21), {"sampling.logprobs": ["20", "got 21"]}),
    "stop token out of range": (
        make_request("hello", stop_token_ids=[VOCAB_SIZE]),
        {"sampling.stop_token_ids": [f"got {VOCAB_SIZE}"]},
    ),
    "empty stop string": (make_request("hello", stop=["end", ""]), {"text_options.stop": []}),
    "stop strings without text": (with_text_options(stop=["end"], detokenize=False), {"text_options.stop": []}),
    "truncation to nothing": (
        with_text_options(truncate_prompt_tokens=0),
        {"text_options.truncate_prompt_tokens": ["got 0"]},
    ),
    "invalid role": (
        make_request(chat(("user", "hello"), ("wizard", "abracadabra"))),
        {"prompt.chat.messages[1].role": ["wizard", "user"]},
    ),
    "tools that are no JSON": (make_request(chat(("user", "hello"), tools=["{"])), {"prompt.chat.tools[0]": ["JSON"]}),
    "unknown field": (unknown_request_field(), {"99": ["99", "GenerateRequest"]}),
    "unknown fields inside": (
        unknown_fields_inside(),
        {"sampling.77": ["SamplingParams"], "prompt.chat.messages[0].88": ["ChatMessage"]},
    ),
    "unknown output kind": (unknown_enum_value(), {"output_kind": ["9"]}),
    "all wrong at once": (
        all_wrong_at_once(),
        {
            "prompt.token_ids.ids[1]": [],
            "sampling.n": [],
            "sampling.temperature": [],
            "sampling.top_p": [],
            "sampling.top_k": [],
            "sampling.max_tokens": [],
            "sampling.stop_token_ids": [],
            "text_options.stop": [],
            "stream_interval": [],
        },
    ),
}


async def assert_next_request_works(client: PairClient) -> None:
    outcome = await client.generate(make_request("The capital of France is", max_tokens=1))
    assert outcome.error is None
    assert outcome.text() == " Paris"


@pytest.mark.parametrize("name", CASES)
async def test_a_bad_request_is_refused_by_every_violated_field(client, name):
    request, expected = CASES[name]
    outcome = await client.generate(request)
    assert outcome.messages == []
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.INVALID_ARGUMENT
    fields = violated_fields(outcome.error)
    assert set(fields) == set(expected)
    for field, parts in expected.items():
        assert field in (outcome.error.details() or "")
        for part in parts:
            assert part in fields[field]
    await assert_next_request_works(client)


async def test_bad_requests_do_no_harm_to_a_stream_beside_them(client):
    good = make_request("The capital of France is", max_tokens=40, ignore_eos=True)
    alone = await client.generate(good)
    call = client.generation.Generate(good)
    ids: list[int] = []
    for request, _ in CASES.values():
        message = await call.read()
        ids += [i for output in message.outputs for i in output.token_ids]
        assert (await client.generate(request)).error is not None
    while (message := await call.read()) is not grpc.aio.EOF:
        ids += [i for output in message.outputs for i in output.token_ids]
    assert ids == alone.token_ids()


async def test_an_unknown_model_is_not_found(client):
    request = make_request("hello")
    request.model = "gpt-17"
    outcome = await client.generate(request)
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.NOT_FOUND
    assert "gpt-17" in (outcome.error.details() or "")
    assert "demo" in (outcome.error.details() or "")
    await assert_next_request_works(client)


async def test_a_request_id_can_be_live_only_once(client):
    request = make_request("Once", max_tokens=2000, ignore_eos=True)
    request.request_id = "mine"
    call = client.generation.Generate(request)
    await call.read()
    again = await client.generate(request)
    call.cancel()
    assert again.error is not None
    assert again.error.code() == grpc.StatusCode.ALREADY_EXISTS
    await assert_next_request_works(client)


TEMPLATE = """\
{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('the system role is not supported') }}{% endif %}
{% if message.content == 'crash' %}{{ message.content.no_such_thing.at_all }}{% endif %}
{% if message.content == 'loop' %}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% endif %}
{{ message.role }}: {{ message.content }}
{% endfor %}"""


@pytest.fixture(scope="module")
def gateway_of_a_strict_template(tmp_path_factory, start_process, pair):
    """A gateway with a tokenizer directory of its own, whose chat template refuses some conversations."""
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, contents in load_tokenizer_files(resolve_model("demo").path).files.items():
        (directory / name).write_bytes(contents)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    gateway = start_process("gateway", "--core", pair.core.address, "--tokenizer", directory)
    gateway.wait_serving()
    return gateway


@pytest.mark.parametrize(
    ("role", "content", "said"),
    [
        ("system", "hello", "the system role is not supported"),
        ("user", "crash", "no_such_thing"),
        ("user", "loop", "time"),
    ],
)
async def test_a_template_that_raises_is_the_prompts_fault(gateway_of_a_strict_template, role, content, said):
    client = PairClient(gateway_of_a_strict_template.address)
    outcome = await client.generate(make_request(chat((role, content))))
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.INVALID_ARGUMENT
    fields = violated_fields(outcome.error)
    assert list(fields) == ["prompt.chat"]
    assert said in fields["prompt.chat"]
    assert (await client.generate(make_request(chat(("user", "hello")), max_tokens=1))).error is None
    await client.channel.close()


def sampling(**fields: Any) -> pb.GenerateRequest:
    return make_request("hello", **fields)


UNBUILT: dict[str, pb.GenerateRequest] = {
    "sampling.thinking_token_budget": sampling(thinking_token_budget=100),
    "adapter": pb.GenerateRequest(prompt=pb.Prompt(text="hello"), adapter="mine"),
    "resume": pb.GenerateRequest(prompt=pb.Prompt(text="hello"), resume=pb.Resume()),
    "data_parallel_rank": pb.GenerateRequest(prompt=pb.Prompt(text="hello"), data_parallel_rank=0),
    "prompt.embeds": make_request(pb.Prompt(embeds=pb.Tensor(dtype="float32", shape=[1, 576], data=bytes(4 * 576)))),
    "prompt.media": make_request(pb.Prompt(text="hello", media=[pb.MediaItem(mime_type="image/png", data=b"x")])),
}


@pytest.mark.parametrize("name", UNBUILT)
async def test_what_is_not_built_is_refused_by_name(client, name):
    outcome = await client.generate(UNBUILT[name])
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert name in (outcome.error.details() or "")
    await assert_next_request_works(client)


async def test_calls_that_are_not_built_are_refused_by_name(client):
    for stub, name, request in [
        (client.generation, "Embed", pb.EmbedRequest()),
        (client.generation, "Classify", pb.ClassifyRequest()),
        (client.generation, "Score", pb.ScoreRequest()),
        (client.admin, "LoadAdapter", admin_pb2.LoadAdapterRequest()),
        (client.admin, "UnloadAdapter", admin_pb2.UnloadAdapterRequest()),
        (client.admin, "UpdateWeights", admin_pb2.UpdateWeightsRequest()),
        (client.admin, "DrainCore", admin_pb2.DrainCoreRequest()),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(stub, name)(request)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert name in (refused.value.details() or "")


async def test_tokenize_and_detokenize_refuse_what_they_cannot_do(client):
    unknown = pb.TokenizeRequest(prompt=pb.Prompt(text="a"))
    with_unknown_field(unknown, 50)
    for call, request, field in [
        (client.generation.Tokenize, pb.TokenizeRequest(), "prompt"),
        (client.generation.Tokenize, unknown, "50"),
        (client.generation.Tokenize, pb.TokenizeRequest(prompt=chat(("wizard", "x"))), "prompt.chat.messages[0].role"),
        (client.generation.Detokenize, pb.DetokenizeRequest(token_ids=[VOCAB_SIZE]), "token_ids"),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert list(violated_fields(refused.value)) == [field]
    await assert_next_request_works(client)


async def test_no_refusal_is_logged_as_a_fault(pair, client):
    """Refusals are the clients' doing: neither side logs an error or a stack trace for them."""
    for request, _ in CASES.values():
        await client.generate(request)
    for process in (pair.gateway, pair.core):
        lines = [json.loads(line) for line in process.log.read_text().splitlines()]
        assert lines
        assert not [line for line in lines if line["level"] in ("error", "critical") or "exception" in line]
