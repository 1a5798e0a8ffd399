"""WatchKvEvents over real gRPC, with a real engine and the fake runner behind it."""

import asyncio
import contextlib
import functools
import random

import grpc
import numpy as np
import pytest
from core_harness import BLOCK, PATIENCE_S, VOCAB, add, read_until_finished, request, running_core, status_of

from headrace.common.block_hashes import BlockKeys, block_hashes, root_hash
from headrace.common.errors import Unavailable
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service import kv_events
from headrace.core_service.kv_event_feed import KvEventFeed

PLAIN = BlockKeys()


class Watcher:
    """What a gateway does with the messages of WatchKvEvents."""

    def __init__(self, core):
        self.call = core.stub.WatchKvEvents(pb.WatchKvEventsRequest())
        self.hashes, self.root, self.num_cleared = set(), b"", 0

    def take(self, message):
        if message.cleared:
            self.hashes, self.root = set(), message.root_hash
            self.num_cleared += 1
        assert self.hashes.isdisjoint(message.stored)
        assert self.hashes.issuperset(message.removed)
        self.hashes = self.hashes.union(message.stored).difference(message.removed)

    async def read_until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                message = await self.call.read()
                assert message is not grpc.aio.EOF
                self.take(message)

    async def started(self):
        """Waits for the snapshot."""
        await self.read_until(lambda: self.root)
        return self

    def num_foretold(self, tokens, keys=PLAIN):
        """How many blocks of a request this core holds."""
        hashes = block_hashes(self.root, tokens, BLOCK, keys)
        return next((i for i, one in enumerate(hashes) if one not in self.hashes), len(hashes))


def num_found(core, tokens, keys=PLAIN):
    """How many of all full blocks the core itself finds; it must be idle."""
    return len(core.blocks.find_cached(np.array(tokens, np.int32).tobytes(), len(tokens) + 1, keys)[0])


def num_cached(core):
    return len(core.blocks._cache._all_nodes())


async def run(core, call, *requests):
    await call.write(add(*requests))
    tokens, _ = await read_until_finished(call, *(one.children[0].slot for one in requests))
    await asyncio.wrap_future(core.engine.check_integrity())
    return tokens


@contextlib.asynccontextmanager
async def watched_core(**options):
    async with running_core(**options) as core:
        call = await core.welcomed()
        yield core, call, await Watcher(core).started()


async def test_before_the_model_is_loaded_nobody_can_watch():
    async with running_core(opened=False) as core:
        code, details = await status_of(core.stub.WatchKvEvents(pb.WatchKvEventsRequest()))
        assert (code, "loading" in details) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_the_first_message_starts_a_snapshot_of_what_is_cached():
    async with running_core() as core:
        prompt = list(range(40))
        await run(core, await core.welcomed(), request(0, prompt))
        watcher = await Watcher(core).started()
        assert watcher.root == root_hash("")
        assert watcher.hashes == set(block_hashes(root_hash(""), prompt, BLOCK, PLAIN))


async def test_blocks_of_prompt_and_output_appear_as_they_are_full():
    async with watched_core() as (core, call, watcher):
        prompt = list(range(40))
        tokens = await run(core, call, request(0, prompt, max_tokens=30))
        everything = [*prompt, *tokens[0]]
        await watcher.read_until(lambda: len(watcher.hashes) == 4)  # the last token is not computed
        assert watcher.num_foretold(everything) == 4
        assert watcher.num_foretold([9, *everything]) == 0


@pytest.mark.parametrize("seed", range(3))
async def test_a_watcher_foretells_exactly_what_each_request_would_find(seed):
    """Random requests, salts, aborts and flushes in a pool so small that it evicts and preempts all the time."""
    rng = random.Random(seed)
    streams = [[rng.randrange(VOCAB - 1) for _ in range(200)] for _ in range(4)]
    salts = ["", "", "a"]
    async with watched_core(num_blocks=24) as (core, call, watcher):
        late, asked = None, []
        for turn in range(25):
            batch = []
            for slot in range(rng.randint(1, 6)):
                prompt = rng.choice(streams)[: rng.randint(1, 150)]
                one = request(slot, prompt, max_tokens=rng.randint(1, 60))
                one.cache_salt = rng.choice(salts)
                batch.append(one)
            await call.write(add(*batch))
            if rng.random() < 0.3:
                aborted = rng.choice(batch)
                slots, names = [aborted.children[0].slot], [aborted.internal_id]
                await call.write(pb.ConnectRequest(abort=pb.AbortRequests(slots=slots, internal_ids=names)))
            outputs, _ = await read_until_finished(call, *range(len(batch)))
            for slot, one in enumerate(batch):
                asked.append(([*one.prompt_token_ids, *outputs.get(slot, [])], one.cache_salt))
            if turn == 12:
                late = await Watcher(core).started()
            if rng.random() < 0.15:
                await core.stub.FlushPrefixCache(pb.FlushPrefixCacheRequest())
        await asyncio.wrap_future(core.engine.check_integrity())
        assert core.engine.load().preemptions
        assert late is not None
        cached = {
            one
            for tokens, salt in asked
            for keys in [BlockKeys.of_first_block(cache_salt=salt)]
            for one in block_hashes(root_hash(""), tokens, BLOCK, keys)[: num_found(core, tokens, keys)]
        }
        assert len(cached) == num_cached(core)
        for one in (watcher, late):
            await one.read_until(lambda one=one: one.hashes == cached)
            for tokens, salt in asked:
                keys = BlockKeys.of_first_block(cache_salt=salt)
                assert one.num_foretold(tokens, keys) == num_found(core, tokens, keys)


async def test_a_flush_clears_what_watchers_hold():
    async with watched_core() as (core, call, watcher):
        await run(core, call, request(0, range(40)))
        await watcher.read_until(lambda: len(watcher.hashes) == 2)
        await core.stub.FlushPrefixCache(pb.FlushPrefixCacheRequest())
        await watcher.read_until(lambda: watcher.num_cleared == 2)
        assert not watcher.hashes
        await run(core, call, request(0, range(40)))
        await watcher.read_until(lambda: watcher.num_foretold(range(40)) == 2)


async def test_a_watcher_that_leaves_disturbs_nobody_and_after_the_last_one_the_engine_tells_nothing():
    async with watched_core() as (core, call, watcher):
        other = await Watcher(core).started()
        assert core.blocks._cache._listener is not None
        watcher.call.cancel()
        await run(core, call, request(0, range(40)))
        await other.read_until(lambda: other.num_foretold(range(40)) == 2)
        other.call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while core.blocks._cache._listener is not None:
                await asyncio.sleep(0.01)
        await run(core, call, request(0, range(100, 140)))
        again = await Watcher(core).started()
        assert again.num_foretold(range(40)) == again.num_foretold(range(100, 140)) == 2


async def test_too_many_watchers_are_refused_until_one_leaves(monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_READERS", 2)
    async with watched_core() as (core, _, watcher):
        await Watcher(core).started()
        code, details = await status_of(Watcher(core).call)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 readers watch this core's KV events already, which is the limit" in details
        watcher.call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while len(core.service._kv_events._feed.readers) == 2:
                await asyncio.sleep(0.01)
        await Watcher(core).started()


async def test_the_cores_end_is_a_status_for_those_who_watch_and_those_who_come():
    async with watched_core() as (core, _, watcher):
        core.service.end_streams(Unavailable("the core is going away", reason="DRAINING"))
        want = (grpc.StatusCode.UNAVAILABLE, "the core is going away")
        assert await status_of(watcher.call) == want
        assert await status_of(Watcher(core).call) == want


async def test_who_does_not_read_costs_bounded_memory_and_then_gets_a_new_snapshot(monkeypatch):
    monkeypatch.setattr(kv_events, "KvEventFeed", functools.partial(KvEventFeed, max_queued=8))
    async with running_core(num_blocks=24) as core:
        call = await core.welcomed()
        assert core.service._kv_events is not None
        with core.service._kv_events.reading() as stream:
            assert (await stream.next_message()).cleared
            for i in range(30):  # nobody reads, so nobody hashes
                await run(core, call, request(0, range(i, i + 40), max_tokens=1))
                assert len(stream._feed._queue) <= 8 + 24
            message = await asyncio.wait_for(stream.next_message(), PATIENCE_S)
            assert message.cleared
            await run(core, call, request(0, range(500, 540), max_tokens=1))
            told, new = set(message.stored), block_hashes(root_hash(""), range(500, 540), BLOCK, PLAIN)
            while not told.issuperset(new) or len(told) > num_cached(core):
                message = await asyncio.wait_for(stream.next_message(), PATIENCE_S)
                told = told.union(message.stored).difference(message.removed)
            assert len(told) == num_cached(core)
