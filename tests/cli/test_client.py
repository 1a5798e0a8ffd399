"""headrace.client, against the fake gateway."""

import pytest

from headrace.client import AsyncClient, Client, chat_prompt, text_prompt, token_prompt
from headrace.common.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from headrace.gateway_api.v1 import generation_pb2 as pb


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
    with Client(gateway.address) as client, pytest.raises(DeadlineExceeded):
        list(client.generate(pb.GenerateRequest(prompt=token_prompt([777])), deadline_s=0.2))


def test_an_absent_server_is_unavailable():
    from headrace.common.addresses import free_port

    with Client(f"127.0.0.1:{free_port('127.0.0.1')}") as client, pytest.raises(Unavailable):
        client.get_model()


def test_an_address_that_is_none_is_refused_at_once():
    with pytest.raises(ValueError, match="must be host:port"):
        Client("localhost")
