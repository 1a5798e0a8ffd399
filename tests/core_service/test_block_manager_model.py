"""The block manager against a model that is too simple to be wrong: lists, and tuples of whole prefixes.

Random sequences start, grow, end; the cache is emptied, the weights change, somebody watches. After each step the same
blocks must be handed out, found and free in the same order, every reference explained, and a watcher must know exactly
the contents that can be found.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.common.block_hashes import BlockKeys, block_hashes, root_hash
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.kv_event_feed import KvEventFeed
from headrace.core_service.kv_event_reader import KvEventReader

SIZE = 2
# Beginnings of a few streams, so that prefixes are often equal.
STREAMS = ([0] * 9, [0, 0, 0, 1, 1, 1, 0, 0, 0], [1] * 9)
TOKENS = st.builds(lambda stream, length: stream[:length], st.sampled_from(STREAMS), st.integers(1, 9))
SALTS = st.sampled_from(["", "", "a"])


class Sequence:
    """What runs: its blocks as both see them, and whether its blocks may still be shared."""

    def __init__(self, salt):
        self.salt, self.tokens, self.blocks, self.node = salt, [], [], None
        self.num_stored, self.sound = 0, True

    def prefix(self, num_blocks):
        return self.salt, tuple(self.tokens[: num_blocks * SIZE])


def as_bytes(tokens):
    return np.array(tokens, np.int32).tobytes()


class BlockManagerAgainstModel(RuleBasedStateMachine):
    """`free`: the queue; `contents`: block → whole prefix, in the order of storing."""

    @initialize(num_usable=st.integers(2, 12))
    def start_empty(self, num_usable):
        self.manager = BlockManager(num_usable + 1, SIZE)
        self.free = list(range(1, num_usable + 1))
        self.contents = {}
        self.running = []
        self.version = ""
        self.feed, self.reader, self.told = None, KvEventReader(), set()

    def model_match(self, salt, tokens):
        found = []
        for i in range(1, (len(tokens) - 1) // SIZE + 1):
            prefix = salt, tuple(tokens[: i * SIZE])
            blocks = [block for block, content in self.contents.items() if content == prefix]
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def model_take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.contents.pop(block, None)
        return taken

    @rule(tokens=TOKENS, salt=SALTS)
    def start(self, tokens, salt):
        sequence = Sequence(salt)
        keys = BlockKeys.of_first_block(cache_salt=salt)
        hit, sequence.node = self.manager.find_cached(as_bytes(tokens), len(tokens), keys)
        assert hit == self.model_match(salt, tokens)
        need = self.manager.blocks_for(len(tokens)) - len(hit)
        fresh = self.manager.allocate(need, hit)
        if need > len([block for block in self.free if block not in hit]):
            assert fresh is None
            return
        assert fresh is not None
        self.free = [block for block in self.free if block not in hit]
        assert fresh == self.model_take(need)
        sequence.blocks, sequence.num_stored = [*hit, *fresh], len(hit)
        self.running.append(sequence)
        self.store_full(sequence, tokens)

    def store_full(self, sequence, tokens):
        sequence.tokens += tokens
        keys = BlockKeys.of_first_block(cache_salt=sequence.salt)
        for i in range(sequence.num_stored, len(sequence.tokens) // SIZE):
            piece = as_bytes(sequence.tokens[i * SIZE : (i + 1) * SIZE])
            if sequence.node is not None:
                sequence.node = self.manager.store(sequence.blocks[i], sequence.node, keys.of_block(i), piece)
            assert (sequence.node is not None) == sequence.sound
            if sequence.sound:
                self.contents[sequence.blocks[i]] = sequence.prefix(i + 1)
            sequence.num_stored = i + 1

    @rule(which=st.integers(0, 9), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, which, tokens):
        if not self.running:
            return
        sequence = self.running[which % len(self.running)]
        need = self.manager.blocks_for(len(sequence.tokens) + len(tokens)) - len(sequence.blocks)
        fresh = self.manager.allocate(need)
        if need > len(self.free):
            assert fresh is None
            return
        assert fresh == self.model_take(need)
        sequence.blocks += fresh
        self.store_full(sequence, tokens)

    @rule(which=st.integers(0, 9))
    def end(self, which):
        if not self.running:
            return
        sequence = self.running[which % len(self.running)]
        self.running.remove(sequence)
        self.manager.free(sequence.blocks)
        held = {block for other in self.running for block in other.blocks}
        unheld = [block for block in reversed(sequence.blocks) if block not in held]
        for block in unheld:
            self.free = [*self.free, block] if block in self.contents else [block, *self.free]

    @rule(new_version=st.booleans())
    def empty_the_cache(self, new_version):
        if new_version:
            self.version += "x"
            forgotten = self.manager.set_weights_version(self.version)
        else:
            forgotten = self.manager.reset_prefix_cache()
        assert forgotten == len(self.contents)
        self.contents = {}
        for sequence in self.running:
            sequence.sound = False

    @rule(max_queued=st.sampled_from([2, 100]))
    def watch(self, max_queued):
        self.feed, self.reader, self.told = KvEventFeed(lambda: None, max_queued=max_queued), KvEventReader(), set()
        self.feed.add_reader(self.reader)
        self.manager.watch(self.feed)

    @rule()
    def watch_no_more(self):
        self.manager.watch(None)
        self.feed = None

    @rule()
    def read(self):
        if self.feed is None:
            return
        if self.feed.ask_for_tree():
            self.manager.watch(self.feed)
        while self.feed.hash_some():
            pass
        root = root_hash(self.version)
        while (message := self.reader.take_message()) is not None:
            assert set(message.stored).isdisjoint(message.removed)
            if message.cleared:
                self.told = set()
            assert message.root_hash == (root if message.cleared else b"")
            assert self.told.isdisjoint(message.stored)
            assert self.told.issuperset(message.removed)
            self.told = self.told.union(message.stored).difference(message.removed)
        assert self.told == {
            block_hashes(root, tokens, SIZE, BlockKeys.of_first_block(cache_salt=salt))[-1]
            for salt, tokens in self.contents.values()
        }

    @invariant()
    def the_model_and_the_manager_agree(self):
        self.manager.check_integrity([sequence.blocks for sequence in self.running])
        assert list(self.manager._free) == self.free
        assert self.manager.num_free == len(self.free)

    def teardown(self):
        for sequence in getattr(self, "running", ()):
            self.manager.free(sequence.blocks)
        if hasattr(self, "manager"):
            self.manager.check_integrity([])
            assert self.manager.num_free == self.manager.num_usable


BlockManagerAgainstModel.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
test_random_use_agrees_with_the_model = BlockManagerAgainstModel.TestCase
