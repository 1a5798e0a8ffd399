"""What a full KV block is called outside the core, so that a gateway can foretell which blocks a request would find.

The contract (WatchKvEventsResponse in engine_core.proto) defines the name: full block i of a sequence has

    H(i) = SHA-256(H(i-1) + token ids as little-endian uint32 + extra keys),    H(-1) = root_hash

and on the wire stand the first 8 bytes of H(i) as a little-endian integer. Extra keys say what a block's content
depends on besides the tokens up to its end. Each is a tag byte, a length as little-endian uint32, and that many bytes:

    block 0 only                       1 adapter digest    2 cache salt    3 digest of prompt embeddings (all ids are 0)
    each block that an item touches    4 the item's digest, then its first token's position minus the block's as int32

Chained, the extra keys of block 0 isolate all that follow it. Tags keep an adapter from ever equalling a salt.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

BYTES_PER_TOKEN = 4
_WIRE_BYTES = 8


class _Tag(IntEnum):
    ADAPTER = 1
    CACHE_SALT = 2
    PROMPT_EMBEDS = 3
    ITEM = 4


@dataclass(frozen=True, slots=True)
class PromptItem:
    """An image or another item inside a prompt: `ranges` are (first token, number of tokens), in order."""

    digest: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The extra keys of one request's blocks, by the block's position in the request; most blocks have none."""

    by_block: Mapping[int, bytes] = field(default_factory=dict)

    @classmethod
    def of_first_block(
        cls, *, adapter_digest: str = "", cache_salt: str = "", prompt_embeds_digest: str = ""
    ) -> "BlockKeys":
        """What isolates a whole request; what is empty does not count."""
        values = (
            (_Tag.ADAPTER, adapter_digest),
            (_Tag.CACHE_SALT, cache_salt),
            (_Tag.PROMPT_EMBEDS, prompt_embeds_digest),
        )
        keys = b"".join(_encoded(tag, value.encode()) for tag, value in values if value)
        return cls({0: keys} if keys else {})

    def with_items(self, items: Sequence[PromptItem], block_size: int) -> "BlockKeys":
        """The same with the items of a prompt, in the order of their first tokens."""
        by_block = dict(self.by_block)
        for item in items:
            for position in sorted(_blocks_touched(item, block_size)):
                offset = struct.pack("<i", item.ranges[0][0] - position * block_size)
                key = _encoded(_Tag.ITEM, item.digest.encode() + offset)
                by_block[position] = by_block.get(position, b"") + key
        return BlockKeys(by_block)

    def of_block(self, position: int) -> bytes:
        """The extra keys of the block at `position`."""
        return self.by_block.get(position, b"")

    def contents(self, token_bytes: bytes, block_size: int, num_blocks: int) -> Iterator[bytes]:
        """For each of the first `num_blocks` blocks, all that its content depends on besides the blocks before it.

        token_bytes are ids as little-endian 32-bit integers, enough for all these blocks.
        """
        block_bytes = block_size * BYTES_PER_TOKEN
        pieces = struct.iter_unpack(f"{block_bytes}s", memoryview(token_bytes)[: num_blocks * block_bytes])
        if not self.by_block:
            return (piece for (piece,) in pieces)
        keys_of = self.by_block.get
        return (piece + keys_of(position, b"") for position, (piece,) in enumerate(pieces))


def root_hash(weights_version: str) -> bytes:
    """H(-1) of the cores that serve this version of the weights."""
    return hashlib.sha256(b"headrace kv blocks\0" + weights_version.encode()).digest()


def chained(parent: bytes, content: bytes) -> bytes:
    """H(i), from H(i-1) and what `BlockKeys.contents` gives for block i."""
    return hashlib.sha256(parent + content).digest()


def wire_hashes(digests: Sequence[bytes]) -> list[int]:
    """The hashes as they stand on the wire."""
    words: NDArray[np.uint64] = np.frombuffer(b"".join(digests), "<u8")
    numbers: list[int] = words[:: hashlib.sha256().digest_size // _WIRE_BYTES].tolist()
    return numbers


def block_hashes(
    root: bytes, token_ids: Sequence[int] | NDArray[np.integer], block_size: int, keys: BlockKeys
) -> list[int]:
    """The hashes, as on the wire, of a request's full blocks. Ids are below 2³¹."""
    digest, digests = root, []
    token_bytes = np.asarray(token_ids, "<i4").tobytes()
    for content in keys.contents(token_bytes, block_size, len(token_ids) // block_size):
        digest = chained(digest, content)
        digests.append(digest)
    return wire_hashes(digests)


def _encoded(tag: _Tag, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def _blocks_touched(item: PromptItem, block_size: int) -> set[int]:
    return {
        position
        for first, length in item.ranges
        for position in range(first // block_size, -(-(first + length) // block_size))
        if length
    }
