"""Fixtures of the gateway's tests: a gateway on loopback before one fake core."""

from collections.abc import AsyncIterator

import pytest
from gateway_harness import Client, Gateway, model_files, next_letter, running_gateway, serving

from headrace.common.tokenizer_files import TokenizerFiles
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.fakes import FakeBehaviour, FakeCore, fake_core_info, serve_fake_core


@pytest.fixture(scope="session")
def files() -> TokenizerFiles:
    return model_files()


@pytest.fixture
def behaviour() -> FakeBehaviour:
    return FakeBehaviour(next_token=next_letter)


@pytest.fixture
def info(files: TokenizerFiles) -> core_pb.CoreInfo:
    return fake_core_info(files)


@pytest.fixture
def core(files: TokenizerFiles, info: core_pb.CoreInfo, behaviour: FakeBehaviour) -> FakeCore:
    return FakeCore(files, info, behaviour)


@pytest.fixture
async def gateway(core: FakeCore) -> AsyncIterator[Gateway]:
    async with serve_fake_core(core) as address, running_gateway(address) as running:
        await serving(running.client)
        yield running
        assert core.breaches == []


@pytest.fixture
def client(gateway: Gateway) -> Client:
    return gateway.client
