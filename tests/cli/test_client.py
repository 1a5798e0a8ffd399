"""headrace.client, against the fake gateway."""

from concurrent import futures

import grpc
import pytest

from headrace.client import AsyncClient, Client, _request_error, chat_prompt, text_prompt, token_prompt
from headrace.common.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, Unavailable, Unimplemented
from headrace.gateway_api.v1 import generation_pb2 as pb
from headrace.gateway_api.v1 import generation_pb2_grpc


def test_sync_calls_return_what_the_server_says(gateway):
    with Client(gateway.address) as client:
        messages = list(client.generate(pb.GenerateRequest(prompt=text_prompt("a b"))))
        assert messages[-1].usage.output_tokens == 16
        assert list(client.tokenize(text_prompt("abc")).token_ids) == [0, 3]
        assert client.tokenize(chat_prompt([("user", "x")])).rendered == "<chat>"
        assert client.detokenize([1]) == " w1"
        assert client.get_model().name == "fake"
        assert client.get_load().live_requests == 3
        assert client.health() == "SERVING"


async def test_async_calls_return_what_the_server_says(gateway):
    async with AsyncClient(gateway.address) as client:
        messages = [message async for message in client.generate(pb.GenerateRequest(prompt=token_prompt([1, 2])))]
        assert messages[-1].usage.output_tokens == 16
        assert list((await client.tokenize(text_prompt("abc"))).token_ids) == [0, 3]
        assert await client.detokenize([1]) == " w1"
        assert (await client.get_model()).name == "fake"
        assert (await client.get_load()).live_requests == 3
        assert await client.health() == "SERVING"


async def test_failures_are_typed_errors_with_their_violations(gateway):
    bad = pb.GenerateRequest(prompt=text_prompt(""))
    with Client(gateway.address) as client:
        with pytest.raises(InvalidRequest) as caught:
            list(client.generate(bad))
        assert caught.value.violations[0].field == "prompt"
        with pytest.raises(NotFound):
            client.get_model("none")
    async with AsyncClient(gateway.address) as async_client:
        with pytest.raises(InvalidRequest):
            _ = [message async for message in async_client.generate(bad)]
        with pytest.raises(NotFound):
            await async_client.get_model("none")


def test_closing_the_generator_cancels_the_call(gateway):
    with Client(gateway.address) as client:
        messages = client.generate(pb.GenerateRequest(prompt=token_prompt([777])))
        next(messages)
        messages.close()
        assert gateway.cancelled.wait(20)


async def test_closing_the_async_generator_cancels_the_call(gateway):
    async with AsyncClient(gateway.address) as client:
        messages = client.generate(pb.GenerateRequest(prompt=token_prompt([777])))
        await anext(messages)
        await messages.aclose()
        assert gateway.cancelled.wait(20)


def test_a_deadline_ends_the_call(gateway):
    with Client(gateway.address) as client, pytest.raises(DeadlineExceeded, match=r"^the deadline of 200 ms passed$"):
        list(client.generate(pb.GenerateRequest(prompt=token_prompt([777])), deadline_s=0.2))


def test_an_absent_server_is_unavailable():
    from headrace.common.addresses import free_port

    with (
        Client(f"127.0.0.1:{free_port('127.0.0.1')}") as client,
        pytest.raises(Unavailable, match=": connection refused; is a"),
    ):
        client.get_model()


def test_an_address_that_is_none_is_refused_at_once():
    with pytest.raises(ValueError, match="must be host:port"):
        Client("localhost")


async def test_a_server_without_our_services_is_no_gateway():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    said = f"^{address} is not a headrace gateway"
    with Client(address) as client, pytest.raises(Unimplemented, match=said):
        client.get_model()
    async with AsyncClient(address) as async_client:
        with pytest.raises(Unimplemented, match=said):
            await async_client.get_model()
    server.stop(0).wait()


def test_what_the_server_itself_does_not_implement_is_said_in_its_words(gateway):
    with grpc.insecure_channel(gateway.address) as channel, pytest.raises(grpc.RpcError) as caught:
        generation_pb2_grpc.GenerationServiceStub(channel).Embed(pb.EmbedRequest())
    error = _request_error(caught.value, gateway.address, None)  # type: ignore[arg-type]  # has the same methods
    assert error.message == "the fake model generates only"


def test_a_request_that_is_too_large_names_the_limit(gateway):
    with Client(gateway.address) as client:  # the fake has gRPC's own limit of 4 MiB
        with pytest.raises(Overloaded, match=r"the server takes at most 4194304 bytes .*--max-message-bytes"):
            client.tokenize(text_prompt("a" * (5 << 20)))
        with pytest.raises(Overloaded, match=f"this client sends at most {64 << 20} bytes"):
            client.tokenize(text_prompt("a" * (65 << 20)))
