"""What a prefix-aware router needs: who watches a core's KV events foretells what a request will find there."""

import asyncio
import random
from typing import Any

import grpc
import pytest
from pair_requests import PATIENCE_S, make_request

from headrace.common.block_hashes import BlockKeys, block_hashes
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_api.v1 import engine_core_pb2_grpc as pb_grpc

pytestmark = pytest.mark.model


async def test_who_watches_a_core_foretells_the_cached_tokens_of_requests_through_the_gateway(pair, client):
    async with grpc.aio.insecure_channel(pair.core.address) as channel:
        stub: Any = pb_grpc.EngineCoreServiceStub(channel)
        size = (await stub.GetCoreInfo(pb.GetCoreInfoRequest())).info.block_size
        call = stub.WatchKvEvents(pb.WatchKvEventsRequest())
        root = b""
        present: set[int] = set()

        def is_told(tokens, salt):
            return foretold(tokens, salt) == (len(tokens) - 1) // size * size

        def foretold(tokens, salt):
            keys = BlockKeys.of_first_block(cache_salt=salt)
            hashes = block_hashes(root, tokens[:-1], size, keys)  # the last prompt token is always computed
            return size * next((i for i, one in enumerate(hashes) if one not in present), len(hashes))

        base = random.Random().choices(range(1000, 40_000), k=150)
        seen: list[tuple[list[int], str]] = []
        for length, salt in [(100, ""), (100, ""), (150, ""), (60, "mine"), (150, "mine"), (16, ""), (17, "")]:
            # Once all that was stored before has been told; the last output token of each was never computed.
            async with asyncio.timeout(PATIENCE_S):
                while not root or not all(is_told(*one) for one in seen):
                    message = await call.read()
                    if message.cleared:
                        root, present = message.root_hash, set()
                    present = present.union(message.stored).difference(message.removed)
            request = make_request(base[:length], max_tokens=20, ignore_eos=True)
            request.cache_salt = salt
            expected = foretold(base[:length], salt)
            outcome = await client.generate(request)
            assert outcome.usage.cached_tokens == expected
            seen.append(([*base[:length], *outcome.token_ids()], salt))
        assert foretold(base, "mine") == 144
        assert foretold(base, "theirs") == 0
        call.cancel()
