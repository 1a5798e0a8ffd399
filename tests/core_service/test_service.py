"""EngineCoreService over real gRPC on loopback, with the fake runner behind it."""

import asyncio
import contextlib
import hashlib

import grpc
import pytest
import structlog
from core_harness import add, read_until_finished, request, running_core, status_of

from headrace.common.errors import Unavailable
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service import gateway_stream, service

FILES = TokenizerFiles({"tokenizer.json": b"{}" + b" " * 100_000, "chat_template.jinja": b""})


@pytest.fixture
async def make_core():
    async with contextlib.AsyncExitStack() as cores:

        async def make(step_time_s=0.0, opened=True):
            return await cores.enter_async_context(running_core(step_time_s, opened=opened))

        yield make


async def test_before_the_model_is_loaded_every_call_is_unavailable(make_core):
    core = await make_core(opened=False)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await core.stub.GetCoreInfo(pb.GetCoreInfoRequest())
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    code, details = await status_of(await core.connect())
    assert (code, "loading" in details) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_requests_stream_their_tokens_and_slots_are_free_after_the_terminal_row(make_core):
    core = await make_core()
    call = await core.welcomed()
    for _ in range(3):
        await call.write(add(request(0), request(9, prompt=(50,))))
        tokens, finished = await read_until_finished(call, 0, 9)
        assert tokens == {0: [4, 5, 6], 9: [51, 52, 53]}
        assert finished[0].reason == FinishReason.FINISH_REASON_LENGTH
    call.cancel()


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        ({"contract_version": "9.0"}, "contract version 9.0"),
        ({"required_features": ["telepathy"]}, "telepathy"),
        ({"model": "other"}, "serves fake, not other"),
        ({"tokenizer_digest": "another"}, "tokenizer"),
    ],
)
async def test_a_gateway_that_expects_another_core_is_refused(make_core, hello, says):
    core = await make_core()
    code, details = await status_of(await core.connect(**hello))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert says in details


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([add(request(0, max_tokens=900)), add(request(0))], "slot: 0 is in use"),
        ([add(request(1 << 20))], "slot: must be below 1048576"),
        ([pb.ConnectRequest(hello=pb.Hello())], "must be add or abort"),
        ([pb.ConnectRequest()], "must be add or abort"),
        ([pb.ConnectRequest(abort=pb.AbortRequests(slots=[1]))], "of one length"),
    ],
)
async def test_a_breach_of_the_protocol_ends_the_stream_by_name(make_core, messages, says):
    core = await make_core(step_time_s=0.01)
    call = await core.welcomed()
    neighbour = await core.welcomed()
    await neighbour.write(add(request(0)))
    for message in messages:
        await call.write(message)
    code, details = await status_of(call)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert says in details
    tokens, _ = await read_until_finished(neighbour, 0)
    assert tokens == {0: [4, 5, 6]}
    neighbour.cancel()


async def test_a_stream_without_hello_is_refused(make_core):
    core = await make_core()
    call = core.stub.Connect()
    await call.write(add(request(0)))
    code, details = await status_of(call)
    assert (code, "hello" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_broken_stream_aborts_its_requests(make_core):
    core = await make_core(step_time_s=0.01)
    call = await core.welcomed()
    await call.write(add(*(request(i, max_tokens=900) for i in range(10))))
    await call.read()
    call.cancel()
    async with asyncio.timeout(10):
        while core.engine.num_live or not core.engine.load().steps:
            await asyncio.sleep(0.01)
    load = (await core.stub.GetLoad(pb.GetLoadRequest())).stats
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, 64)


async def test_a_quiet_stream_gets_heartbeats(make_core, monkeypatch):
    monkeypatch.setattr(gateway_stream, "HEARTBEAT_S", 0.05)
    core = await make_core()
    call = await core.welcomed()
    async with asyncio.timeout(10):
        message = await call.read()
    assert message.heartbeat.healthy
    assert message.heartbeat.stats.free_blocks == 64
    call.cancel()


async def test_a_gateway_that_does_not_read_is_cut_off_and_others_go_on(make_core, monkeypatch):
    monkeypatch.setattr(gateway_stream, "MAX_OUTBOX_BYTES", 1 << 20)
    core = await make_core()
    slow, other = await core.welcomed(), await core.welcomed()
    # Prompt log-probabilities, about 100 KB a request, fill the connection's window; nobody reads them.
    requests = [request(slot, prompt=(1,) * 900, max_tokens=1) for slot in range(120)]
    for message in requests:
        message.sampling.prompt_logprobs = 20
    await slow.write(add(*requests))
    await other.write(add(request(0)))
    tokens, _ = await read_until_finished(other, 0)
    assert tokens == {0: [4, 5, 6]}
    code, _ = await status_of(slow)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    other.cancel()


async def test_drain_tells_gateways_finishes_what_runs_and_cuts_the_rest_at_the_end(make_core):
    core = await make_core(step_time_s=0.02)
    call = await core.welcomed()
    await call.write(add(request(0, max_tokens=5), request(1, max_tokens=1000)))
    await call.read()
    drain = pb.DrainRequest()
    drain.grace.FromMilliseconds(600)
    drained = asyncio.ensure_future(_answer(core.stub.Drain(drain)))
    kinds, finished = [], {}
    async with asyncio.timeout(20):
        while 1 not in finished:
            message = await call.read()
            kinds.append(message.WhichOneof("message"))
            finished.update({record.slot: record for record in message.step.finished})
    answer = await drained
    # The drained core ends its streams at once, and yet no terminal row is lost.
    core.service.end_streams(Unavailable("gone"))
    assert "draining" in kinds
    assert finished[0].reason == FinishReason.FINISH_REASON_LENGTH
    assert finished[1].reason == FinishReason.FINISH_REASON_ABORT
    assert finished[1].code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert (answer.finished, answer.handed_over) == (1, 1)
    code, _ = await status_of(await core.connect())
    assert code == grpc.StatusCode.UNAVAILABLE
    call.cancel()


async def _answer(call):
    return await call


async def test_the_tokenizers_files_come_in_chunks_with_their_digest_also_while_weights_load(make_core):
    core = await make_core(opened=False)
    core.service.offer_tokenizer(FILES)
    files: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    async for piece in core.stub.GetTokenizer(pb.GetTokenizerRequest()):
        assert len(piece.data) <= 64 * 1024
        files[piece.file_name] = files.get(piece.file_name, b"") + piece.data
        digests[piece.file_name] = piece.sha256
    assert files == FILES.files
    assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


async def test_each_completion_leaves_one_log_line_with_its_request_id(make_core):
    core = await make_core()
    call = await core.welcomed()
    with structlog.testing.capture_logs() as lines:
        good, bad = request(0), request(1, prompt=())
        good.external_id, bad.external_id = "mine", "yours"
        await call.write(add(good, bad))
        await read_until_finished(call, 0, 1)
    ended = {line["request_id"]: line["code"] for line in lines if line["event"] == "completion ended"}
    assert ended == {"mine": "OK", "yours": "INVALID_ARGUMENT"}
    call.cancel()


async def test_a_request_too_large_for_the_stream_goes_by_blob(make_core):
    core = await make_core()
    body = request(0, prompt=(7,) * 1000, max_tokens=2)
    data = body.SerializeToString()
    digest = hashlib.sha256(data).hexdigest()

    async def pieces():
        yield pb.PutBlobRequest(digest=digest, size_bytes=len(data), data=data[:100])
        yield pb.PutBlobRequest(data=data[100:])

    assert not (await core.stub.PutBlob(pieces())).existed
    assert (await core.stub.PutBlob(pieces())).existed
    call = await core.welcomed()
    head = pb.EngineCoreRequest(internal_id="r3", body_digest=digest, children=[pb.Child(slot=3)])
    await call.write(add(head))
    tokens, _ = await read_until_finished(call, 3)
    assert tokens == {3: [8, 9]}
    lost = pb.EngineCoreRequest(internal_id="r4", body_digest="0" * 64, children=[pb.Child(slot=4)])
    await call.write(add(lost))
    _, finished = await read_until_finished(call, 4)
    assert finished[4].code == grpc.StatusCode.NOT_FOUND.value[0]
    call.cancel()


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([pb.PutBlobRequest(digest="xyz")], grpc.StatusCode.INVALID_ARGUMENT),
        ([pb.PutBlobRequest(digest="0" * 64, size_bytes=3, data=b"abc")], grpc.StatusCode.DATA_LOSS),
        ([pb.PutBlobRequest(digest="0" * 64, size_bytes=3, data=b"abcd")], grpc.StatusCode.INVALID_ARGUMENT),
        ([pb.PutBlobRequest(digest="0" * 64, size_bytes=5 << 20)], grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_bad_blobs_are_refused_and_take_no_room(make_core, pieces, code):
    core = await make_core()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await core.stub.PutBlob(iter(pieces))
    assert error.value.code() == code
    assert core.blobs.num_bytes == 0
    with core.blobs.room_for(4 << 20):
        pass


async def test_a_blob_that_never_ends_keeps_its_room_for_a_limited_time(make_core, monkeypatch):
    core = await make_core()
    monkeypatch.setattr(service, "BLOB_ARRIVAL_S", 0.2)
    call = core.stub.PutBlob()
    await call.write(pb.PutBlobRequest(digest="0" * 64, size_bytes=4 << 20, data=b"a"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    with core.blobs.room_for(4 << 20):
        pass


@pytest.mark.parametrize("call", ["Connect", "PutBlob", "GetBlob", "GetLoad"])
async def test_bytes_that_are_no_message_are_the_senders_fault(make_core, call):
    core = await make_core()
    send = core.channel.stream_stream(f"/headrace.core_api.v1.EngineCoreService/{call}", None, None)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await send(iter([b"\xff" * 9]), timeout=10).read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_equal_blobs_are_read_once_for_each_time_that_they_were_put(make_core):
    core = await make_core()
    assert core.blobs.put(b"same") == core.blobs.put(b"same")
    digest = core.blobs.put(b"same")
    for _ in range(3):
        assert [piece.data async for piece in core.stub.GetBlob(pb.GetBlobRequest(digest=digest))] == [b"same"]
    assert core.blobs.num_bytes == 0


async def test_a_blob_is_read_once(make_core):
    core = await make_core()
    digest = core.blobs.put(b"x" * 600_000)
    data = b"".join([piece.data async for piece in core.stub.GetBlob(pb.GetBlobRequest(digest=digest))])
    assert data == b"x" * 600_000
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await core.stub.GetBlob(pb.GetBlobRequest(digest=digest)).read()
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


async def test_flush_and_what_is_not_there_yet(make_core):
    core = await make_core()
    call = await core.welcomed()
    await call.write(add(request(0, prompt=(1,) * 40)))
    await read_until_finished(call, 0)
    assert (await core.stub.FlushPrefixCache(pb.FlushPrefixCacheRequest())).blocks == 2
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await core.stub.LoadAdapter(pb.LoadAdapterRequest())
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "LoadAdapter" in str(error.value.details())
    call.cancel()
