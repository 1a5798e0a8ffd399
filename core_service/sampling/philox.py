"""Random numbers as a pure function: Philox 4x32-10 over (seed, output position, stream).

There is no generator and no state. The number that draws a token depends only on the request's seed and on the token's
position in its output, so batching, preemption, restarts and a resume on another core change nothing. Only integer
operations are used: every device gives the same bits.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11. Checked against
the known-answer vectors of the authors' Random123 library.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from headrace.core_service.batch import Int32Array, Int64Array, UInt64Array

UInt32Array = NDArray[np.uint32]

_ROUNDS = 10
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
# The paper's round constants, for the words (0, 2) of the counter and (0, 1) of the key.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


class RandomStream(IntEnum):
    """What a random number is for; numbers of different streams are independent. Values are part of the sampling
    law."""

    TOKEN = 0


def philox_4x32_10(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Encrypt each counter with its key: uint32 `counter` [4, n] and `key` [2, n] give uint32 [4, n]."""
    # 32-bit words live in 64-bit lanes, so that a product keeps its high half. Words (0, 2) and (1, 3) are handled as
    # pairs: half as many numpy calls.
    multiplied = counter[0::2].astype(np.uint64)  # [2, n]
    carried = counter[1::2].astype(np.uint64)  # [2, n]
    rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None]
    round_keys = (key.astype(np.uint64) + rounds * _KEY_STEPS) & _LOW_WORD  # [rounds, 2, n]
    for round_key in round_keys:
        product = (multiplied * _MULTIPLIERS)[::-1]  # each half meets the other pair
        multiplied = (product >> _WORD_BITS) ^ carried ^ round_key
        carried = product & _LOW_WORD
    output = np.empty(counter.shape, dtype=np.uint32)
    output[0::2] = multiplied
    output[1::2] = carried
    return output


def random_bits(seed: UInt64Array, position: Int32Array, stream: RandomStream) -> UInt64Array:
    """64 random bits for each (seed, position): key = seed, counter = (position, stream, 0, 0); low word first.

    `seed` and `position` are [n], positions are at least 0; so is the result.
    """
    counter = np.zeros((4, len(seed)), dtype=np.uint32)
    counter[0] = position
    counter[1] = stream
    key = np.stack([seed & _LOW_WORD, seed >> _WORD_BITS]).astype(np.uint32)
    words = philox_4x32_10(counter, key).astype(np.uint64)
    bits: UInt64Array = words[0] | (words[1] << _WORD_BITS)
    return bits


def uniform_below(bits: UInt64Array, bound: Int64Array) -> Int64Array:
    """Integers in [0, bound): floor(bits * bound / 2**64), exactly; `bound` is between 1 and 2**63 - 1.

    A value's chance differs from 1 / bound by less than 2**-64.
    """
    # 64 x 64 bits from four 32 x 32 products; none of the sums below can pass 64 bits.
    bits_low, bits_high = bits & _LOW_WORD, bits >> _WORD_BITS
    bound_low, bound_high = bound.astype(np.uint64) & _LOW_WORD, bound.astype(np.uint64) >> _WORD_BITS
    middle = bits_high * bound_low + (bits_low * bound_low >> _WORD_BITS)
    carry = (bits_low * bound_high + (middle & _LOW_WORD)) >> _WORD_BITS
    value: Int64Array = (bits_high * bound_high + (middle >> _WORD_BITS) + carry).astype(np.int64)
    return value
