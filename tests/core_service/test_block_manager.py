"""Block accounting and the prefix cache, with blocks of 16 tokens and 10 usable blocks unless said.

Facts that other engines' tests state as well carry their number there, P1 to P9 (P10 to P12 are with block hashes, KV
events and the prefix cache). Block 0 is the null block, ids start at 1. Where hashes are their subject, ours is what
can be found: contents are compared in full, there is no hash to look at.
"""

import numpy as np
import pytest

from headrace.common.block_hashes import BlockKeys
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.prefix_cache import ROOT

SIZE = 16
PLAIN = BlockKeys()


MADE: list[BlockManager] = []


def make_manager(num_blocks=11, block_size=SIZE, caching=True):
    MADE.append(BlockManager(num_blocks, block_size, enable_prefix_caching=caching))
    return MADE[-1]


@pytest.fixture(autouse=True)
def _every_manager_is_sound_at_the_end():
    """Whoever holds blocks then is taken at its word."""
    MADE.clear()
    yield
    for manager in MADE:
        manager.check_integrity([[block] * count for block, count in enumerate(manager._references)])


def as_bytes(tokens):
    return np.array(tokens, np.int32).tobytes()


class Running:
    """A sequence that takes blocks and stores its full ones as the scheduler does."""

    def __init__(self, manager, tokens, salt=""):
        self.manager, self.tokens, self.stored = manager, [], 0
        self.keys = BlockKeys.of_first_block(cache_salt=salt)
        self.hit, self.node = manager.find_cached(as_bytes(tokens), len(tokens), self.keys)
        fresh = manager.allocate(manager.blocks_for(len(tokens)) - len(self.hit), self.hit)
        assert fresh is not None
        self.blocks, self.stored = [*self.hit, *fresh], len(self.hit)
        self.append(tokens)

    def append(self, tokens):
        """Adds tokens, and a block where the last one is full; returns the new blocks."""
        size = self.manager.block_size
        self.tokens += tokens
        new = self.manager.allocate(self.manager.blocks_for(len(self.tokens)) - len(self.blocks))
        self.blocks += new
        for i in range(self.stored, len(self.tokens) // size):
            piece = as_bytes(self.tokens[i * size : (i + 1) * size])
            self.node = self.manager.store(self.blocks[i], self.node, self.keys.of_block(i), piece)
            self.stored = i + 1
        return new

    def free(self):
        self.manager.free(self.blocks)


def find(manager, tokens, salt=""):
    return manager.find_cached(as_bytes(tokens), len(tokens), BlockKeys.of_first_block(cache_salt=salt))[0]


def free_order(manager):
    return list(manager._free)


def state(manager):
    return list(manager._references), free_order(manager)


COMMON = list(range(48))


def test_p1_equal_prefixes_share_blocks_are_freed_tail_first_and_taken_in_the_order_of_the_queue():
    manager = make_manager()
    first = Running(manager, COMMON + [100] * 7)
    assert first.blocks == [1, 2, 3, 4]
    second = Running(manager, COMMON + [200] * 5)
    assert (second.blocks, second.hit) == ([1, 2, 3, 5], [1, 2, 3])
    manager.check_integrity([first.blocks, second.blocks])
    first.free()
    second.free()
    assert free_order(manager) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    third = Running(manager, COMMON + [300] * 6)
    assert third.hit == [1, 2, 3]
    third.free()
    order = free_order(manager)
    everything = Running(manager, [7] * 160)
    assert (everything.blocks, everything.hit) == (order, [])
    assert manager.num_free == 0


def test_p2_a_block_can_be_found_once_it_is_full_and_decoding_takes_one_when_it_is():
    manager = make_manager()
    sequence = Running(manager, list(range(55)))
    assert len(sequence.blocks) == 4
    assert sequence.append(list(range(55, 59))) == []
    assert find(manager, range(80)) == [1, 2, 3]
    assert sequence.append(list(range(59, 78))) == [5]
    assert find(manager, range(80)) == [1, 2, 3, 4]


def test_p3_empty_blocks_are_reused_before_cached_ones_and_cached_ones_oldest_first():
    manager = make_manager()
    first = Running(manager, list(range(87)))
    second = Running(manager, list(range(500, 548)))
    assert manager.num_free == 1
    first.free()
    assert free_order(manager) == [6, 10, 5, 4, 3, 2, 1]
    second.free()
    assert free_order(manager) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    third = Running(manager, [*range(32), 900, 901, 902])
    assert (third.hit, third.blocks) == ([1, 2], [1, 2, 6])
    assert manager.num_free == 7


def test_p4_a_reused_block_loses_its_old_content_also_if_it_gets_none_that_can_be_found():
    manager = make_manager(num_blocks=2)
    Running(manager, list(range(16))).free()
    assert find(manager, range(17)) == [1]
    partial = Running(manager, [5, 6])
    assert partial.blocks == [1]
    assert find(manager, range(17)) == []
    partial.free()
    assert find(manager, range(17)) == []


def test_p5_a_hit_block_is_never_the_one_evicted_for_the_same_request():
    manager = make_manager(num_blocks=3)
    a, b, c = list(range(16)), list(range(16, 32)), list(range(32, 48))
    Running(manager, a + b).free()
    sequence = Running(manager, a + c)
    assert (sequence.hit, sequence.blocks) == ([1], [1, 2])
    assert find(manager, [*a, *b, 0]) == [1]


def test_p6_without_caching_nothing_is_found_and_the_pool_still_ends():
    manager = make_manager(num_blocks=5, block_size=4, caching=False)
    sequence = Running(manager, list(range(10)))
    assert len(sequence.blocks) == 3
    sequence.free()
    again = Running(manager, list(range(10)))
    assert again.hit == []
    assert manager.allocate(1) is not None
    assert manager.allocate(1) is None


def test_p7_salts_isolate_and_only_the_first_block_names_them():
    manager = make_manager()
    tokens = list(range(50))
    sequence = Running(manager, tokens, salt="one")
    assert find(manager, tokens, salt="one") == [1, 2, 3]
    assert find(manager, tokens, salt="two") == []
    assert find(manager, tokens) == []
    adapter = BlockKeys.of_first_block(adapter_digest="one")
    assert manager.find_cached(as_bytes(tokens), 50, adapter)[0] == []
    assert [sequence.keys.of_block(i) for i in (1, 2)] == [b"", b""]


def test_p8_no_room_changes_nothing():
    manager = make_manager()
    held = Running(manager, COMMON)
    gone = Running(manager, list(range(100, 148)))
    gone.free()
    before = state(manager)
    assert manager.allocate(8, shared=held.blocks) is None
    assert manager.allocate(5, shared=gone.blocks) is None
    assert manager.allocate(4, shared=gone.blocks, keep_free=1) is None
    assert state(manager) == before
    assert manager.allocate(4, shared=gone.blocks) is not None


def test_p9_a_reset_leaves_what_is_held_to_its_holders_and_shares_it_no_more():
    """Elsewhere a reset fails while a block is in use; an operator who wants the cache gone should not have to wait."""
    manager = make_manager()
    running = Running(manager, list(range(40)))  # two full blocks, and half of a third
    Running(manager, list(range(500, 516))).free()
    assert manager.reset_prefix_cache() == 3
    assert find(manager, range(49)) == []
    assert find(manager, range(500, 517)) == []
    running.append(list(range(40, 64)))
    assert find(manager, range(65)) == []  # neither what was half written nor what came later
    manager.check_integrity([running.blocks])
    again = Running(manager, list(range(64)))
    assert again.hit == []
    assert set(again.blocks).isdisjoint(running.blocks)
    running.free()
    again.free()
    manager.check_integrity([])
    assert find(manager, range(65)) == again.blocks
    assert manager.num_free == manager.num_usable


def test_a_first_block_that_was_half_written_at_a_reset_is_not_shared_when_it_is_full():
    manager = make_manager()
    running = Running(manager, list(range(8)))
    manager.set_weights_version("2")
    running.append(list(range(8, 16)))
    assert find(manager, range(17)) == []
    running.free()
    fresh = Running(manager, list(range(16)))
    assert fresh.blocks == running.blocks  # the very block, written anew
    assert find(manager, range(17)) == fresh.blocks


def test_other_weights_find_nothing_that_was_computed_before():
    manager = make_manager()
    Running(manager, COMMON).free()
    assert manager.set_weights_version("2") == 3
    assert find(manager, [*COMMON, 0]) == []
    Running(manager, COMMON).free()
    assert len(find(manager, [*COMMON, 0])) == 3
    manager.check_integrity([])


def test_the_last_token_is_never_a_hit():
    manager = make_manager()
    Running(manager, list(range(32)))
    assert len(find(manager, range(32))) == 1
    assert len(find(manager, range(33))) == 2


def test_equal_content_in_two_blocks_is_found_as_long_as_one_lives():
    manager = make_manager()
    first = manager.allocate(1)
    second = manager.allocate(1)
    tokens = as_bytes(range(16))
    assert manager.store(first[0], ROOT, b"", tokens) == manager.store(second[0], ROOT, b"", tokens)
    manager.free(first)
    manager.allocate(9)  # evicts the first copy
    assert find(manager, range(17)) == second


def test_only_what_nobody_else_holds_counts_as_unshared():
    manager = make_manager()
    first = Running(manager, COMMON + [100] * 7)
    Running(manager, COMMON + [200] * 5)
    assert manager.num_unshared(first.blocks) == 1


def test_freeing_what_is_not_held_is_an_error():
    manager = make_manager()
    blocks = manager.allocate(1)
    manager.free(blocks)
    with pytest.raises(ValueError, match="not held"):
        manager.free(blocks)


@pytest.mark.parametrize(
    "damage",
    [
        lambda manager, held: manager._references.__setitem__(held[0], 2),
        lambda manager, held: manager._references.__setitem__(0, 1),
        lambda manager, held: manager._free.append([held[0]]),
        lambda manager, held: manager._free.take(1),
        lambda manager, held: setattr(manager._free, "_length", 3),
        lambda manager, held: manager._not_shared.add(held[0]),
        lambda manager, held: manager._cache._nodes.popitem(),
    ],
)
def test_integrity_sees_every_kind_of_damage(damage):
    manager = BlockManager(11, SIZE)
    held = Running(manager, list(range(20))).blocks
    manager.check_integrity([held])
    damage(manager, held)
    with pytest.raises(RuntimeError):
        manager.check_integrity([held])


def test_integrity_sees_a_holder_that_nobody_knows_and_one_that_holds_nothing():
    manager = make_manager()
    held = Running(manager, list(range(20))).blocks
    with pytest.raises(RuntimeError, match="1 references, but 0 holders"):
        manager.check_integrity([])
    with pytest.raises(RuntimeError, match="0 references, but 1 holders"):
        manager.check_integrity([held, [9]])
