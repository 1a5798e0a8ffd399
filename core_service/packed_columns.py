"""Columns of numbers in protobuf's wire format, made by numpy: for messages too long to go through Python numbers.

https://protobuf.dev/programming-guides/encoding: a packed column is a tag, a length and its numbers; integers are
varints, 7 bits a byte, lowest first, with a top bit that says "more". A varint may be longer than it need be, so every
number of a column becomes one machine word that holds the largest, and no loop over numbers is needed. What a parser
makes of such a column, and sends on, has the usual form.

    number    ........ .....aaa aaaabbbb bbbccccc      bits of a word
    word      0aaaaaaa 1bbbbbbb 1ccccccc ...           its bytes, lowest last here
"""

import numpy as np
from numpy.typing import NDArray

from headrace.core_service.batch import FloatArray

_LENGTH_DELIMITED = 2
_MORE = 0x80


def packed_integers(field: int, numbers: NDArray[np.integer]) -> bytes:
    """A `repeated uint32` [n] of numbers from 0 to 2³² - 1, as field number `field`."""
    if not len(numbers):
        return b""
    bits = int(numbers.max()).bit_length()
    size = next(size for size in (1, 2, 4, 8) if bits <= 7 * size)
    rest = numbers.astype(f"<u{size}")
    encoded = rest & 0x7F
    for i in range(1, -(-bits // 7)):  # the group that byte i takes moves up by the i bits that say "more" below it
        encoded |= (rest & (0x7F << 7 * i)) << i
    encoded |= sum(_MORE << 8 * i for i in range(size - 1))
    return _column(field, encoded.tobytes())


def packed_floats(field: int, numbers: FloatArray) -> bytes:
    """A `repeated float` [n], as field number `field`."""
    return _column(field, numbers.astype("<f4", copy=False).tobytes()) if len(numbers) else b""


def _column(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH_DELIMITED) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= _MORE:
        encoded.append(number & (_MORE - 1) | _MORE)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
