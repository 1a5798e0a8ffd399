"""Names of KV blocks, against the formula of the contract written out by hand."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.block_hashes import BlockKeys, PromptItem, block_hashes, root_hash

ROOT = hashlib.sha256(b"any 32 bytes").digest()
PLAIN = BlockKeys()


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def on_wire(digest):
    return int.from_bytes(digest[:8], "little")


def key(tag, value):
    return bytes([tag]) + len(value).to_bytes(4, "little") + value


def ids(*tokens):
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def test_a_block_is_named_by_the_one_before_it_and_its_tokens():
    first = sha(ROOT, ids(1, 2))
    second = sha(first, ids(300, 70_000))
    assert block_hashes(ROOT, [1, 2, 300, 70_000], 2, PLAIN) == [on_wire(first), on_wire(second)]


def test_names_are_these_for_ever():
    """Computed with sha256sum; a gateway and a core one release apart must agree."""
    root = root_hash("")
    assert root.hex() == "0e2497fedaa7ed5b7a4da79168bdfddeb9391b7ccd4d5686bc79cd2dc52b4669"
    assert root_hash("2").hex() == "b3be0a353c4733fc7165c8d5339d88c2fdf75f2aeb67e799cb64c967eaea3af3"
    keys = BlockKeys.of_first_block(cache_salt="s").with_items([PromptItem("img", ((2, 1),))], 2)
    assert block_hashes(root, [1, 2, 300, 70_000], 2, keys) == [12655894453923548404, 6036553716878947123]


def test_only_full_blocks_have_names():
    assert block_hashes(ROOT, [1, 2, 3], 4, PLAIN) == []
    assert len(block_hashes(ROOT, [1, 2, 3, 4, 5], 4, PLAIN)) == 1


def test_ids_may_come_as_a_list_or_as_an_array_of_any_integers():
    tokens = [5, 6, 7, 2**31 - 1]
    want = block_hashes(ROOT, tokens, 2, PLAIN)
    for dtype in (np.int32, np.int64, np.uint32):
        assert block_hashes(ROOT, np.array(tokens, dtype), 2, PLAIN) == want


def test_adapter_salt_and_embeddings_stand_in_the_first_block_only_in_this_order():
    keys = BlockKeys.of_first_block(adapter_digest="ad", cache_salt="sält", prompt_embeds_digest="e0")
    first = sha(ROOT, ids(0, 0), key(1, b"ad"), key(2, "sält".encode()), key(3, b"e0"))
    second = sha(first, ids(0, 0))
    assert block_hashes(ROOT, [0, 0, 0, 0], 2, keys) == [on_wire(first), on_wire(second)]


@pytest.mark.parametrize(
    ("given_keys", "tagged"),
    [
        ({"adapter_digest": "x"}, key(1, b"x")),
        ({"cache_salt": "x"}, key(2, b"x")),
        ({"prompt_embeds_digest": "x"}, key(3, b"x")),
        ({}, b""),
    ],
)
def test_a_key_counts_only_if_it_is_not_empty(given_keys, tagged):
    assert BlockKeys.of_first_block(**given_keys).of_block(0) == tagged


def test_an_item_stands_in_every_block_that_its_ranges_touch_with_its_offset_from_there():
    # blocks of 4: |0 1 2 i|i r i i|8 9 . .|. . . j|   i: item "aa", r: a mark between its rows, j: item "b"
    items = [PromptItem("aa", ((3, 2), (6, 2))), PromptItem("b", ((15, 1),))]
    keys = BlockKeys.of_first_block(cache_salt="s").with_items(items, 4)
    assert keys.of_block(0) == key(2, b"s") + key(4, b"aa" + struct.pack("<i", 3))
    assert keys.of_block(1) == key(4, b"aa" + struct.pack("<i", -1))
    assert keys.of_block(2) == b""
    assert keys.of_block(3) == key(4, b"b" + struct.pack("<i", 3))


def test_items_in_one_block_stand_in_their_order():
    keys = PLAIN.with_items([PromptItem("a", ((0, 1),)), PromptItem("b", ((2, 1),))], 4)
    assert keys.of_block(0) == key(4, b"a" + struct.pack("<i", 0)) + key(4, b"b" + struct.pack("<i", 2))


def test_an_empty_range_touches_nothing():
    assert PLAIN.with_items([PromptItem("a", ((4, 0),))], 4).by_block == {}


ITEM = PromptItem("same", ((1, 3),))
DIFFERENT = [
    PLAIN,
    BlockKeys.of_first_block(adapter_digest="same"),
    BlockKeys.of_first_block(adapter_digest="changed"),
    BlockKeys.of_first_block(cache_salt="same"),
    BlockKeys.of_first_block(prompt_embeds_digest="same"),
    BlockKeys.of_first_block(adapter_digest="same", cache_salt="same"),
    PLAIN.with_items([ITEM], 4),
    PLAIN.with_items([PromptItem("other", ((1, 3),))], 4),
    PLAIN.with_items([PromptItem("same", ((2, 2),))], 4),
    PLAIN.with_items([PromptItem("same", ((1, 1),)), PromptItem("same", ((2, 2),))], 4),
]


def test_p10_items_offsets_adapters_and_salts_of_equal_text_all_name_different_blocks():
    names = {tuple(block_hashes(ROOT, range(8), 4, keys)) for keys in DIFFERENT}
    assert len(names) == len(DIFFERENT)
    assert len({second for _, second in names}) == len(DIFFERENT)  # what isolates a block isolates all after it


def test_each_version_of_the_weights_has_its_own_root():
    assert len({root_hash(""), root_hash("1"), root_hash("2")}) == 3
    assert root_hash("1") == root_hash("1")
    assert len(root_hash("1")) == 32


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_names_agree_exactly_as_far_as_the_full_blocks_do(one, other, size):
    names_of_one, names_of_other = (block_hashes(ROOT, tokens, size, PLAIN) for tokens in (one, other))
    for i, (a, b) in enumerate(zip(names_of_one, names_of_other, strict=False)):
        assert (a == b) == (one[: (i + 1) * size] == other[: (i + 1) * size])


@given(TOKENS, st.integers(1, 5), st.text(max_size=5))
def test_every_name_follows_from_the_formula(tokens, size, salt):
    digest, want = ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        extra = key(2, salt.encode()) if salt and not start else b""
        digest = sha(digest, ids(*tokens[start : start + size]), extra)
        want.append(on_wire(digest))
    assert block_hashes(ROOT, tokens, size, BlockKeys.of_first_block(cache_salt=salt)) == want
