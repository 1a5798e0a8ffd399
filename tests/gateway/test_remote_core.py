"""The stream to a core: found late, lost, found again, refused, draining, silent."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from gateway_harness import (
    Client,
    Gateway,
    eventually,
    model_files,
    next_letter,
    running_gateway,
    serving,
    text_request,
)

from headrace.common.errors import FailedPrecondition
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.core_api.v1.engine_core_pb2_grpc import EngineCoreServiceStub
from headrace.gateway.fakes import FakeBehaviour, FakeCore, fake_core_info, serve_fake_core
from headrace.gateway.model_catalog import fetch_tokenizer_files
from headrace.gateway.remote_core import LONGEST_RETRY_AFTER_REFUSAL_S, LONGEST_RETRY_S, retry_delay
from headrace.gateway_api.v1 import models_pb2


async def states(client: Client) -> list[str]:
    return [models_pb2.CoreState.Name(core.state).removeprefix("CORE_STATE_") for core in (await client.load()).cores]


async def in_state(client: Client, *wanted: str) -> None:
    async def reached() -> bool:
        return await states(client) == list(wanted)

    await eventually(reached)


async def test_a_core_that_comes_later_is_found(core: FakeCore) -> None:
    async with serve_fake_core(core) as address:
        pass  # learn a free port
    async with running_gateway(address) as gateway:
        outcome = await gateway.client.generate(text_request("A"))
        assert outcome.error is not None
        assert outcome.error.code() == grpc.StatusCode.UNAVAILABLE
        assert not (await gateway.client.models.ListModels(models_pb2.ListModelsRequest())).models
        await asyncio.sleep(0.5)
        async with serve_fake_core(core, int(address.rpartition(":")[2])):
            await serving(gateway.client)
            assert (await gateway.client.generate(text_request("A", max_tokens=3))).text() == "abc"


async def test_the_tokenizer_is_fetched_while_the_core_still_loads(core: FakeCore, behaviour: FakeBehaviour) -> None:
    behaviour.loading = True
    async with serve_fake_core(core) as address, running_gateway(address) as gateway:
        await eventually(lambda: core.tokenizer_fetches == 1)
        await asyncio.sleep(0.5)
        assert await states(gateway.client) == ["CONNECTING"]
        behaviour.loading = False
        await serving(gateway.client)
        assert (await gateway.client.generate(text_request("A", max_tokens=3))).text() == "abc"
        assert core.tokenizer_fetches == 1


async def test_a_lost_core_ends_its_streams_and_is_found_again(
    client: Client, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    behaviour.step_pause_s = 0.01
    running = [asyncio.create_task(client.generate(text_request("A", max_tokens=400))) for _ in range(5)]
    await eventually(lambda: core.stats.running == 5)
    await asyncio.sleep(0.1)
    core.break_streams()
    for outcome in await asyncio.gather(*running):
        assert outcome.error is not None
        assert outcome.error.code() == grpc.StatusCode.UNAVAILABLE
        assert outcome.usage.output_tokens == len(outcome.text())
    await serving(client)
    behaviour.step_pause_s = 0
    assert (await client.generate(text_request("A", max_tokens=3))).text() == "abc"
    assert len(core.hellos) == 2
    assert core.hellos[0].gateway_epoch == core.hellos[1].gateway_epoch


async def test_the_second_hello_names_model_and_tokenizer(client: Client, core: FakeCore) -> None:
    core.break_streams()
    await eventually(lambda: len(core.hellos) == 2)
    first, second = core.hellos
    assert (first.model, first.tokenizer_digest) == ("", "")
    assert (second.model, second.tokenizer_digest) == ("fake", core.info.tokenizer_digest)


async def test_a_killed_core_is_noticed(core: FakeCore, behaviour: FakeBehaviour) -> None:
    behaviour.step_pause_s = 0.01
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(contextlib.AsyncExitStack())
        address = await served.enter_async_context(serve_fake_core(core))
        gateway = await stack.enter_async_context(running_gateway(address))
        await serving(gateway.client)
        running = asyncio.create_task(gateway.client.generate(text_request("A", max_tokens=400)))
        await eventually(lambda: core.stats.running == 1)
        await served.aclose()
        outcome = await running
        assert outcome.error is not None
        assert outcome.error.code() == grpc.StatusCode.UNAVAILABLE
        await in_state(gateway.client, "CONNECTING")


async def test_an_output_ended_by_a_stop_string_survives_the_loss_of_its_core(
    client: Client, core: FakeCore, behaviour: FakeBehaviour
) -> None:
    def die(slot: int, internal_id: str) -> None:
        assert (slot, internal_id) == (0, core.requests[0].internal_id)
        core.break_streams()

    core.streams[0]._abort = die  # type: ignore[method-assign]
    request = text_request("A", max_tokens=400)
    request.text_options.stop.append("def")
    outcome = await client.generate(request)
    assert outcome.error is None
    assert outcome.text() == "abc"
    assert outcome.usage.output_tokens == 6


@pytest.fixture
async def two_cores(files: TokenizerFiles) -> AsyncIterator[tuple[FakeCore, FakeCore, Client]]:
    cores = [FakeCore(files, fake_core_info(files), FakeBehaviour(next_letter)) for _ in range(2)]
    async with (
        serve_fake_core(cores[0]) as first,
        serve_fake_core(cores[1]) as second,
        running_gateway(first, second) as gateway,
    ):
        await serving(gateway.client, 2)
        yield cores[0], cores[1], gateway.client


async def test_requests_go_to_the_core_with_less_work(two_cores: tuple[FakeCore, FakeCore, Client]) -> None:
    first, second, client = two_cores
    first.behaviour.step_pause_s = second.behaviour.step_pause_s = 0.01
    await asyncio.gather(*(client.generate(text_request("A", max_tokens=30)) for _ in range(10)))
    assert (len(first.requests), len(second.requests)) == (5, 5)


async def test_requests_of_a_session_stay_at_one_core(two_cores: tuple[FakeCore, FakeCore, Client]) -> None:
    first, second, client = two_cores
    for session in range(8):
        request = text_request("A", max_tokens=1)
        request.session_id = f"session-{session}"
        before = len(first.requests), len(second.requests)
        for _ in range(3):
            assert (await client.generate(request)).error is None
        after = len(first.requests), len(second.requests)
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 3]
    assert first.requests
    assert second.requests


async def test_a_draining_core_gets_nothing_new_and_finishes_what_it_has(
    two_cores: tuple[FakeCore, FakeCore, Client],
) -> None:
    first, second, client = two_cores
    first.behaviour.step_pause_s = second.behaviour.step_pause_s = 0.01
    running = [asyncio.create_task(client.generate(text_request("A", max_tokens=40))) for _ in range(2)]
    await eventually(lambda: first.stats.running == second.stats.running == 1)
    first.drain(grace_s=5)
    await in_state(client, "DRAINING", "SERVING")
    for _ in range(3):
        assert (await client.generate(text_request("A", max_tokens=1))).error is None
    assert (len(first.requests), len(second.requests)) == (1, 4)
    assert all(outcome.error is None for outcome in await asyncio.gather(*running))


@pytest.mark.parametrize("lost", ["healthy", "silent"])
async def test_a_core_without_progress_is_unhealthy_until_it_moves_again(
    client: Client, behaviour: FakeBehaviour, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.remote_core.SILENCE_LIMIT_S", 0.5)
    behaviour.heartbeat_s = 0.05
    setattr(behaviour, lost, lost == "silent")
    await in_state(client, "UNHEALTHY")
    outcome = await client.generate(text_request("A"))
    assert outcome.error is not None
    assert outcome.error.code() == grpc.StatusCode.UNAVAILABLE
    assert "unhealthy" in (outcome.error.details() or "")
    setattr(behaviour, lost, lost == "healthy")
    await in_state(client, "SERVING")


async def test_cores_that_do_not_fit_are_refused(files: TokenizerFiles) -> None:
    misfits = [
        fake_core_info(files, model="another"),
        fake_core_info(files, contract_version="7.0"),
        fake_core_info(files, tokenizer_digest="other"),
    ]
    good = FakeCore(files, fake_core_info(files), FakeBehaviour(next_letter))
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serve_fake_core(good))]
        for info in misfits:
            core = FakeCore(files, info, FakeBehaviour(next_letter))
            addresses.append(await stack.enter_async_context(serve_fake_core(core)))
        gateway = await stack.enter_async_context(running_gateway(addresses[0]))
        await serving(gateway.client)
        expectations = gateway.server._expectations()
        assert expectations.model == "fake"
        crowd = await stack.enter_async_context(running_gateway(*addresses))
        crowd.server._models = gateway.server._models
        await in_state(crowd.client, "SERVING", "CONNECTING", "CONNECTING", "CONNECTING")
        await asyncio.sleep(0.3)
        assert await states(crowd.client) == ["SERVING", "CONNECTING", "CONNECTING", "CONNECTING"]


async def test_another_chat_template_is_only_a_warning(
    client: Client, capsys: pytest.CaptureFixture[str], core: FakeCore, info: core_pb.CoreInfo
) -> None:
    info.template_digest = "other"
    core.break_streams()
    await eventually(lambda: len(core.hellos) == 2)
    await serving(client)
    assert "another chat template" in capsys.readouterr().out


async def test_a_damaged_tokenizer_is_refused(files: TokenizerFiles) -> None:
    other = model_files()
    core = FakeCore(
        TokenizerFiles({**other.files, "tokenizer.json": b"{}"}), fake_core_info(files), FakeBehaviour(next_letter)
    )
    async with serve_fake_core(core) as address, running_gateway(address) as gateway:
        await eventually(lambda: core.hellos)
        await asyncio.sleep(0.2)
        assert await states(gateway.client) == ["CONNECTING"]


def test_retries_are_quick_for_a_core_that_is_not_there_and_slow_for_one_that_refused() -> None:
    assert all(retry_delay(attempt, refused=False) <= LONGEST_RETRY_S for attempt in range(100))
    assert all(retry_delay(attempt, refused=True) <= LONGEST_RETRY_AFTER_REFUSAL_S for attempt in range(100))
    assert retry_delay(50, refused=True) > LONGEST_RETRY_S


@pytest.mark.parametrize("fact", ["model", "tokenizer_digest", "max_model_len"])
async def test_a_core_that_becomes_another_is_lost_and_its_requests_are_told(
    gateway: Gateway, core: FakeCore, behaviour: FakeBehaviour, fact: str
) -> None:
    behaviour.step_pause_s = 0.01
    running = asyncio.create_task(gateway.client.generate(text_request("A", max_tokens=400)))
    await eventually(lambda: core.stats.running == 1)
    other = core_pb.CoreInfo()
    other.CopyFrom(core.info)
    setattr(other, fact, 0 if fact == "max_model_len" else "another")
    core.streams[0].send(core_pb.ConnectResponse(welcome=core_pb.Welcome(info=other)))
    error = (await running).error
    assert error is not None
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    await serving(gateway.client)
    assert (await gateway.client.generate(text_request("A", max_tokens=3))).text() == "abc"


async def test_a_core_without_room_for_a_token_does_not_spoil_another(core: FakeCore, files: TokenizerFiles) -> None:
    useless = FakeCore(files, fake_core_info(files, max_model_len=0), core.behaviour)
    async with (
        serve_fake_core(core) as good,
        serve_fake_core(useless) as bad,
        running_gateway(bad, good) as gateway,
    ):
        await in_state(gateway.client, "CONNECTING", "SERVING")
        assert (await gateway.client.generate(text_request("A", max_tokens=3))).text() == "abc"


class EndlessTokenizer(FakeCore):
    """Sends a new file for ever."""

    async def GetTokenizer(
        self, request: core_pb.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[core_pb.GetTokenizerResponse]:
        for number in itertools.count():
            self.tokenizer_fetches = number
            yield core_pb.GetTokenizerResponse(file_name=f"{number}")


async def test_a_tokenizer_of_endless_files_is_refused(files: TokenizerFiles, behaviour: FakeBehaviour) -> None:
    core = EndlessTokenizer(files, fake_core_info(files), behaviour)
    async with serve_fake_core(core) as address:
        stub = EngineCoreServiceStub(grpc.aio.insecure_channel(address))
        with pytest.raises(FailedPrecondition, match="files"):
            await fetch_tokenizer_files(stub)
