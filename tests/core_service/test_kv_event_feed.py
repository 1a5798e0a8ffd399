"""From changes of the prefix tree to the messages of each reader, without an engine. Blocks of 2 tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.common.block_hashes import BlockKeys, block_hashes, root_hash
from headrace.core_service import kv_event_feed, kv_event_reader
from headrace.core_service.kv_event_feed import KvEventFeed
from headrace.core_service.kv_event_reader import MAX_HASHES, KvEventReader
from headrace.core_service.prefix_cache import ROOT, PrefixCache

SIZE = 2


class Told:
    """A reader, and what somebody who reads its messages holds present."""

    def __init__(self, feed):
        self.reader, self.hashes, self.root = KvEventReader(), set(), None
        feed.add_reader(self.reader)

    def read(self):
        """Reads all there is; returns the messages. Each one must obey the contract."""
        messages = []
        while (message := self.reader.take_message()) is not None:
            messages.append(message)
            assert max(len(message.stored), len(message.removed)) <= kv_event_reader.MAX_HASHES
            assert set(message.stored).isdisjoint(message.removed)
            assert bool(message.root_hash) == message.cleared
            if message.cleared:
                self.hashes, self.root = set(), message.root_hash
            assert self.hashes.isdisjoint(message.stored)
            assert self.hashes.issuperset(message.removed)
            self.hashes = self.hashes.union(message.stored).difference(message.removed)
        return messages


class World:
    """A prefix tree with a feed; sequences are stored in blocks of their own."""

    def __init__(self, **limits):
        self.cache = PrefixCache(SIZE)
        self.woken, self.present, self.next_block = 0, {}, 1
        self.feed = KvEventFeed(self.wake, **limits)

    def wake(self):
        self.woken += 1

    def watch(self):
        self.cache.watch(self.feed)

    def store(self, tokens):
        """Caches a sequence, by its tokens; what of it is cached already is not stored again."""
        node: int | None = ROOT
        for end in range(SIZE, len(tokens) + 1, SIZE):
            piece = np.array(tokens[end - SIZE : end], np.int32).tobytes()
            assert node is not None
            known = self.cache._nodes[node].children.get(piece)
            if known is not None:
                node = known.id
                continue
            node = self.cache.store(self.next_block, node, piece)
            self.present[tuple(tokens[:end])] = self.next_block
            self.next_block += 1

    def forget(self, prefix):
        """Evicts a prefix that no other one continues."""
        self.cache.forget(self.present.pop(tuple(prefix)))

    def clear(self):
        self.cache.clear()
        self.present = {}

    def leaves(self):
        return [one for one in self.present if not any(o[: len(one)] == one and o != one for o in self.present)]

    def hash_all(self):
        """What the service does when it is woken."""
        if self.feed.ask_for_tree():
            self.watch()
        while self.feed.hash_some():
            pass

    def expected(self):
        root = root_hash("")
        return {block_hashes(root, prefix, SIZE, BlockKeys())[-1] for prefix in self.present}


def test_a_reader_is_told_what_is_present_and_then_each_change():
    world = World()
    world.store([1, 2, 3, 4])
    world.watch()
    told = Told(world.feed)
    world.hash_all()
    first = told.read()
    assert [message.cleared for message in first] == [True]
    assert told.root == root_hash("")
    assert told.hashes == world.expected()
    assert len(told.hashes) == 2
    world.store([1, 2, 5, 6])
    world.forget([1, 2, 3, 4])
    world.hash_all()
    (message,) = told.read()
    assert (message.cleared, len(message.stored), len(message.removed)) == (False, 1, 1)
    assert told.hashes == world.expected()


def test_an_empty_cache_is_told_too_so_that_a_reader_knows_the_root():
    world = World()
    world.watch()
    told = Told(world.feed)
    world.hash_all()
    (message,) = told.read()
    assert (message.cleared, message.root_hash, list(message.stored)) == (True, root_hash(""), [])


def test_a_late_reader_is_told_at_once_and_the_early_one_not_again():
    world = World()
    world.watch()
    early = Told(world.feed)
    world.store([1, 2])
    world.hash_all()
    early.read()
    late = Told(world.feed)
    assert late.read()[0].cleared
    assert early.read() == []
    assert early.hashes == late.hashes == world.expected()


def test_what_came_and_went_or_went_and_came_unread_is_not_told():
    world = World()
    world.store([1, 2])
    world.watch()
    told = Told(world.feed)
    world.hash_all()
    told.read()
    world.store([3, 4])
    world.hash_all()
    world.forget([3, 4])
    world.forget([1, 2])
    world.hash_all()
    world.store([1, 2])
    world.hash_all()
    assert told.read() == []


def test_what_waits_for_a_reader_is_bounded_by_what_is_present_and_a_messages_worth_of_removals(monkeypatch):
    monkeypatch.setattr(kv_event_reader, "MAX_HASHES", 5)
    world = World()
    world.watch()
    told = Told(world.feed)
    for i in range(20):
        world.store([i, i])
    world.hash_all()
    told.read()
    for i in range(200):
        world.store([1000 + i, 0])
        world.forget(next(iter(world.present)))
        world.hash_all()
        assert len(told.reader._stored) <= len(world.present)
        assert len(told.reader._removed) <= 5
    messages = told.read()
    assert [message.cleared for message in messages] == [True, False, False, False]
    assert told.hashes == world.expected()


def test_a_snapshot_comes_in_messages_of_at_most_16384_hashes_of_which_the_first_says_so():
    world = World()
    for i in range(2 * MAX_HASHES + 100):
        world.store([i, i])
    world.watch()
    told = Told(world.feed)
    world.hash_all()
    messages = told.read()
    assert MAX_HASHES == 16_384
    assert [len(message.stored) for message in messages] == [MAX_HASHES, MAX_HASHES, 100]
    assert [message.cleared for message in messages] == [True, False, False]
    assert max(message.ByteSize() for message in messages) < 256 * 1024
    assert told.hashes == world.expected()


def test_a_reset_clears_what_readers_hold():
    world = World()
    world.store([1, 2])
    world.watch()
    told = Told(world.feed)
    world.hash_all()
    told.read()
    world.clear()
    world.store([5, 6])
    world.hash_all()
    (message,) = told.read()
    assert (message.cleared, len(message.stored), len(message.removed)) == (True, 1, 0)


@pytest.mark.parametrize("hashed_before", [True, False], ids=["after the snapshot", "before it"])
def test_a_queue_that_overflows_is_dropped_and_the_tree_is_told_anew(hashed_before):
    world = World(max_queued=10)
    world.store([1, 2])
    world.watch()
    told = Told(world.feed)
    if hashed_before:
        world.hash_all()
        told.read()
    woken = world.woken
    for i in range(100):
        world.store([i, i])
        assert len(world.feed._queue) <= 11
    assert world.woken > woken  # somebody must ask
    world.cache.check_integrity()
    assert not world.feed.hash_some()  # nothing can be done before the tree is known
    assert world.feed.ask_for_tree()
    assert not world.feed.ask_for_tree()
    world.store([7, 8, 9, 10])
    world.watch()
    world.store([7, 8, 11, 12])
    world.hash_all()
    assert told.read()[0].cleared
    assert told.hashes == world.expected()
    for i in range(100, 200):  # and it can overflow once more
        world.store([i, i])
    world.hash_all()
    told.read()
    assert told.hashes == world.expected()


@pytest.mark.parametrize("event", ["reset", "overflow"])
def test_what_happens_to_the_tree_while_changes_are_hashed_overtakes_them(monkeypatch, event):
    world = World(max_queued=10)
    world.watch()
    told = Told(world.feed)
    world.hash_all()
    world.store([1, 2, 3, 4])
    hashed = kv_event_feed._hashed

    def hash_and_be_overtaken(*arguments):
        monkeypatch.setattr(kv_event_feed, "_hashed", hashed)
        result = hashed(*arguments)
        if event == "reset":
            world.clear()
        for i in range(3 if event == "reset" else 30):
            world.store([i, i])
        return result

    monkeypatch.setattr(kv_event_feed, "_hashed", hash_and_be_overtaken)
    world.hash_all()
    world.hash_all()
    told.read()
    assert told.hashes == world.expected()


def test_the_engine_wakes_the_event_loop_once_for_many_changes():
    world = World()
    world.watch()
    world.hash_all()
    woken = world.woken
    for i in range(50):
        world.store([i, i])
    assert world.woken == woken + 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda feed: feed._digests.popitem(),
        lambda feed: feed._digests.__setitem__(999, b""),
        lambda feed: feed._queue.popleft(),
    ],
)
def test_integrity_sees_a_feed_that_knows_another_tree(damage):
    world = World()
    world.store([1, 2])
    world.watch()
    world.hash_all()
    world.store([3, 4])
    world.cache.check_integrity()
    damage(world.feed)
    with pytest.raises(RuntimeError, match="the KV event feed and the prefix tree disagree"):
        world.cache.check_integrity()


TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_readers_that_read_when_they_like_all_end_with_what_is_present(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_event_feed, "SLICE", 3)
        patch.setattr(kv_event_reader, "MAX_HASHES", 4)
        world = World(max_queued=data.draw(st.sampled_from([3, 1000])))
        readers: list[Told] = []
        world.watch()
        for _ in range(data.draw(st.integers(1, 40))):
            what = data.draw(st.sampled_from(["store", "store", "forget", "hash", "read", "ask", "join", "clear"]))
            if what == "store":
                world.store(data.draw(TOKENS))
            elif what == "forget" and world.present:
                world.forget(data.draw(st.sampled_from(world.leaves())))
            elif what == "hash":
                world.feed.hash_some()
            elif what == "read" and readers:
                data.draw(st.sampled_from(readers)).read()
            elif what == "ask" and world.feed.ask_for_tree():
                world.watch()
            elif what == "join":
                readers.append(Told(world.feed))
            elif what == "clear":
                world.clear()
            world.cache.check_integrity()
        if world.feed.ask_for_tree() or world.feed._lost:
            world.watch()
        world.hash_all()
        for told in readers:
            told.read()
            assert told.hashes == world.expected()
