"""The tree of cached prefixes, with blocks of 2 tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.block_hashes import BlockKeys, PromptItem, root_hash
from headrace.core_service.prefix_cache import ROOT, PrefixCache

SIZE = 2
NO_KEYS = BlockKeys()


def as_bytes(tokens):
    return np.array(tokens, np.int32).tobytes()


def store_all(cache, blocks, tokens, keys=NO_KEYS):
    """Stores a sequence's full blocks; returns the last node."""
    node = ROOT
    contents = keys.contents(as_bytes(tokens), SIZE, len(blocks))
    for block, content in zip(blocks, contents, strict=True):
        node = cache.store(block, node, content)
    return node


def find(cache, tokens, keys=NO_KEYS):
    return cache.match(as_bytes(tokens), len(tokens) // SIZE, keys)


def test_the_longest_stored_prefix_is_found_with_its_last_node():
    cache = PrefixCache(SIZE)
    last = store_all(cache, [1, 2, 3], [1, 2, 3, 4, 5, 6])
    assert find(cache, [1, 2, 3, 4, 5, 6]) == ([1, 2, 3], last)
    assert find(cache, [1, 2, 3, 4, 9, 9])[0] == [1, 2]
    assert find(cache, [9, 9, 3, 4]) == ([], ROOT)


def test_no_more_blocks_are_found_than_asked_for():
    cache = PrefixCache(SIZE)
    store_all(cache, [1, 2, 3], [1, 2, 3, 4, 5, 6])
    assert cache.match(as_bytes([1, 2, 3, 4, 5, 6]), 1, BlockKeys())[0] == [1]
    assert cache.match(as_bytes([1, 2, 3, 4, 5, 6]), 0, BlockKeys()) == ([], ROOT)


def test_the_same_tokens_after_another_prefix_are_another_content():
    cache = PrefixCache(SIZE)
    store_all(cache, [1, 2], [1, 1, 7, 7])
    store_all(cache, [3, 4], [2, 2, 7, 7])
    assert find(cache, [1, 1, 7, 7])[0] == [1, 2]
    assert find(cache, [2, 2, 7, 7])[0] == [3, 4]
    assert find(cache, [7, 7])[0] == []


def test_what_isolates_the_first_block_isolates_all_and_items_isolate_from_where_they_stand():
    cache = PrefixCache(SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    salted = BlockKeys.of_first_block(cache_salt="a")
    image = BlockKeys().with_items([PromptItem("img", ((2, 2),))], SIZE)
    store_all(cache, [1, 2, 3], tokens)
    store_all(cache, [4, 5, 6], tokens, salted)
    store_all(cache, [7, 8, 9], tokens, image)
    assert find(cache, tokens)[0] == [1, 2, 3]
    assert find(cache, tokens, salted)[0] == [4, 5, 6]
    assert find(cache, tokens, image)[0] == [1, 8, 9]
    assert find(cache, tokens, BlockKeys().with_items([PromptItem("img", ((3, 1),))], SIZE))[0] == [1]


def test_p12_several_blocks_may_hold_one_content_and_the_first_that_lives_is_found():
    cache = PrefixCache(SIZE)
    for block in (1, 2, 3):
        store_all(cache, [block], [5, 5])
    assert find(cache, [5, 5])[0] == [1]
    cache.forget(2)
    assert find(cache, [5, 5])[0] == [1]
    cache.forget(1)
    assert find(cache, [5, 5])[0] == [3]
    cache.check_integrity()
    cache.forget(3)
    assert find(cache, [5, 5])[0] == []
    cache.check_integrity()


def test_a_block_that_is_not_cached_is_forgotten_in_vain():
    cache = PrefixCache(SIZE)
    cache.forget(7)
    cache.check_integrity()


def test_after_clear_nothing_is_found_and_nothing_hangs_on_what_was():
    cache = PrefixCache(SIZE)
    node = store_all(cache, [1, 2], [1, 2, 3, 4])
    assert cache.clear() == 2
    assert find(cache, [1, 2, 3, 4]) == ([], ROOT)
    assert cache.store(3, node, as_bytes([5, 6])) is None
    assert 3 not in cache
    assert store_all(cache, [1], [1, 2]) > node  # ids are never used twice
    cache.check_integrity()


def test_other_weights_find_nothing_and_start_other_chains():
    cache, told = PrefixCache(SIZE), Listener()
    cache.watch(told)
    store_all(cache, [1], [1, 2])
    assert cache.set_weights_version("2") == 1
    assert find(cache, [1, 2])[0] == []
    assert told.log == [("tree", root_hash(""), []), ("stored", as_bytes([1, 2])), ("tree", root_hash("2"), [])]


class Listener:
    """Keeps what it is told."""

    def __init__(self):
        self.log, self.present = [], {}

    def tree_is(self, root, nodes):
        self.log.append(("tree", root, [node.content for node in nodes]))
        self.present = {node.id: node for node in nodes}

    def node_stored(self, node):
        self.log.append(("stored", node.content))
        assert node.parent == ROOT or node.parent in self.present
        self.present[node.id] = node

    def node_removed(self, node):
        self.log.append(("removed", node.content))
        del self.present[node.id]
        assert all(other.parent != node.id for other in self.present.values())

    def check_integrity(self, nodes):
        if list(self.present.values()) != nodes:
            raise RuntimeError("told another tree")


def test_a_listener_is_told_the_tree_parents_first_and_then_each_change():
    cache, told = PrefixCache(SIZE), Listener()
    store_all(cache, [1, 2], [1, 2, 3, 4])
    cache.watch(told)
    store_all(cache, [3, 4], [1, 2, 5, 6])
    cache.forget(4)
    one, two, three = as_bytes([1, 2]), as_bytes([3, 4]), as_bytes([5, 6])
    assert told.log == [("tree", root_hash(""), [one, two]), ("stored", three), ("removed", three)]
    cache.check_integrity()
    cache.watch(None)
    cache.forget(2)
    assert len(told.log) == 3


def test_a_listener_is_told_a_content_once_however_many_blocks_hold_it():
    cache, told = PrefixCache(SIZE), Listener()
    cache.watch(told)
    for block in (1, 2):
        store_all(cache, [block], [1, 2])
    cache.forget(1)
    cache.forget(2)
    assert [entry[0] for entry in told.log] == ["tree", "stored", "removed"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache._node_of_block.pop(2),
        lambda cache: cache._nodes.pop(2),
        lambda cache: cache._nodes.pop(1),
        lambda cache: setattr(cache._nodes[2], "blocks", (2, 2)),
        lambda cache: cache._root.children.clear(),
        lambda cache: cache._listener.present.clear(),
    ],
)
def test_integrity_sees_every_kind_of_damage(damage):
    cache = PrefixCache(SIZE)
    cache.watch(Listener())
    store_all(cache, [1, 2], [1, 2, 3, 4])
    cache.check_integrity()
    damage(cache)
    with pytest.raises(RuntimeError):
        cache.check_integrity()


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=2, max_size=8), st.booleans()), max_size=12))
def test_the_tree_never_outlives_its_blocks(sequences):
    cache, stored, next_block = PrefixCache(SIZE), [], 1
    for tokens, evict in sequences:
        blocks = list(range(next_block, next_block + len(tokens) // SIZE))
        next_block += len(blocks)
        store_all(cache, blocks, tokens)
        stored.append(blocks)
        if evict:
            for block in reversed(stored.pop(0)):
                cache.forget(block)
        cache.check_integrity()
        assert len(cache._nodes) - 1 <= sum(len(blocks) for blocks in stored)
    for blocks in stored:
        for block in reversed(blocks):
            cache.forget(block)
    assert list(cache._nodes) == [ROOT]
    assert not cache._root.children
