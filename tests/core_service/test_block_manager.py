"""Block accounting and the prefix cache, with blocks of 16 tokens and 10 usable blocks unless said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_service.block_keys import BlockKeys
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.prefix_cache import ROOT

SIZE = 16


def make_manager(num_blocks=11, block_size=SIZE, caching=True):
    return BlockManager(num_blocks, block_size, enable_prefix_caching=caching)


def as_bytes(tokens):
    return np.array(tokens, np.int32).tobytes()


def run_sequence(manager, tokens, extra=()):
    """Allocates a sequence as the scheduler does and stores its full blocks; returns (blocks, blocks that hit)."""
    cached, node = manager.find_cached(as_bytes(tokens), len(tokens), BlockKeys(extra))
    fresh = manager.allocate(manager.blocks_for(len(tokens)) - len(cached), cached)
    if fresh is None:
        return None
    blocks = [*cached, *fresh]
    for i in range(len(cached), len(tokens) // manager.block_size):
        piece = tokens[i * manager.block_size : (i + 1) * manager.block_size]
        node = manager.store(blocks[i], node, BlockKeys(extra).of_block(i), as_bytes(piece))
    return blocks, cached


def free_order(manager):
    return list(manager._free)


def test_equal_prefixes_share_blocks_and_are_freed_tail_first():
    manager = make_manager()
    common = list(range(48))
    first, _ = run_sequence(manager, common + [100] * 7)
    assert first == [1, 2, 3, 4]
    second, hit = run_sequence(manager, common + [200] * 5)
    assert (second, hit) == ([1, 2, 3, 5], [1, 2, 3])
    manager.check_integrity([first, second])
    manager.free(first)
    manager.free(second)
    assert free_order(manager) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    third, hit = run_sequence(manager, common + [300] * 6)
    assert hit == [1, 2, 3]
    manager.free(third)
    order = free_order(manager)
    everything, hit = run_sequence(manager, [7] * 160)
    assert (everything, hit) == (order, [])
    assert manager.num_free == 0


def test_empty_blocks_are_reused_before_cached_ones():
    manager = make_manager()
    first, _ = run_sequence(manager, list(range(87)))
    second, _ = run_sequence(manager, list(range(500, 548)))
    assert manager.num_free == 1
    manager.free(first)
    assert free_order(manager) == [6, 10, 5, 4, 3, 2, 1]
    manager.free(second)
    assert free_order(manager) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    third, hit = run_sequence(manager, [*range(32), 900, 901, 902])
    assert (hit, third) == ([1, 2], [1, 2, 6])
    assert manager.num_free == 7


def test_reused_block_loses_its_old_content():
    manager = make_manager(num_blocks=2)
    blocks, _ = run_sequence(manager, list(range(16)))
    manager.free(blocks)
    blocks, _ = run_sequence(manager, [5, 6])
    manager.free(blocks)
    assert manager.find_cached(as_bytes(range(17)), 17, BlockKeys()) == ([], ROOT)


def test_a_hit_block_is_never_the_one_evicted_for_the_same_request():
    manager = make_manager(num_blocks=3)
    a, b, c = list(range(16)), list(range(16, 32)), list(range(32, 48))
    blocks, _ = run_sequence(manager, a + b)
    manager.free(blocks)
    blocks, hit = run_sequence(manager, a + c)
    assert hit == [1]
    assert blocks == [1, 2]


def test_without_caching_nothing_is_found():
    manager = make_manager(num_blocks=5, block_size=4, caching=False)
    blocks, _ = run_sequence(manager, list(range(10)))
    assert len(blocks) == 3
    manager.free(blocks)
    blocks, hit = run_sequence(manager, list(range(10)))
    assert hit == []
    manager.allocate(1)
    assert manager.allocate(1) is None


def test_salts_isolate_and_only_the_first_block_names_them():
    manager = make_manager()
    tokens = list(range(50))
    one = (("cache_salt", "one"),)
    run_sequence(manager, tokens, one)
    assert manager.find_cached(as_bytes(tokens), 50, BlockKeys(one))[0] == [1, 2, 3]
    assert manager.find_cached(as_bytes(tokens), 50, BlockKeys((("cache_salt", "two"),)))[0] == []
    assert manager.find_cached(as_bytes(tokens), 50, BlockKeys((("adapter", "one"),)))[0] == []
    assert manager.find_cached(as_bytes(tokens), 50, BlockKeys())[0] == []


def test_no_room_changes_nothing():
    manager = make_manager()
    held, _ = run_sequence(manager, list(range(48)))
    gone, _ = run_sequence(manager, list(range(100, 148)))
    manager.free(gone)
    before = (list(manager._references), free_order(manager))
    assert manager.allocate(8, shared=held) is None
    assert manager.allocate(5, shared=gone) is None
    assert (list(manager._references), free_order(manager)) == before


def test_the_last_token_is_never_a_hit():
    manager = make_manager()
    run_sequence(manager, list(range(32)))
    assert len(manager.find_cached(as_bytes(range(32)), 32, BlockKeys())[0]) == 1
    assert len(manager.find_cached(as_bytes(range(33)), 33, BlockKeys())[0]) == 2


def test_reset_forgets_content_but_not_holders():
    manager = make_manager()
    blocks, _ = run_sequence(manager, list(range(48)))
    _, node = manager.find_cached(as_bytes(range(49)), 49, BlockKeys())
    assert manager.reset_prefix_cache() == 3
    assert manager.find_cached(as_bytes(range(49)), 49, BlockKeys())[0] == []
    # What would hang on a forgotten prefix is not stored either.
    assert manager.store(blocks[0], node, (), as_bytes(range(16))) is None
    manager.check_integrity([blocks])
    manager.free(blocks)
    manager.check_integrity([])


def test_equal_content_in_two_blocks_is_found_as_long_as_one_lives():
    manager = make_manager()
    first = manager.allocate(1)
    second = manager.allocate(1)
    tokens = as_bytes(range(16))
    assert manager.store(first[0], ROOT, (), tokens) == manager.store(second[0], ROOT, (), tokens)
    manager.free(first)
    manager.allocate(9)  # evicts the first copy
    assert manager.find_cached(as_bytes(range(17)), 17, BlockKeys())[0] == second


def test_freeing_what_is_not_held_is_an_error():
    manager = make_manager()
    blocks = manager.allocate(1)
    manager.free(blocks)
    with pytest.raises(ValueError, match="not held"):
        manager.free(blocks)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_integrity_holds_under_random_use(data):
    manager = make_manager(num_blocks=9, block_size=4)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["run", "run", "free", "grow", "reset"]))
        if action == "run":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
            ran = run_sequence(manager, tokens, (("cache_salt", "s"),) if data.draw(st.booleans()) else ())
            if ran is not None:
                held.append(ran[0])
        elif action == "free" and held:
            manager.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif action == "grow" and held:
            fresh = manager.allocate(1)
            if fresh is not None:
                held[0].extend(fresh)
        elif action == "reset":
            manager.reset_prefix_cache()
        manager.check_integrity(held)
    for blocks in held:
        manager.free(blocks)
    manager.check_integrity([])
    assert manager.num_free == manager.num_usable
