import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_service.sampling.philox import RandomStream, philox_4x32_10, random_bits, uniform_below

# From Random123's `kat_vectors`: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
UINT64 = st.integers(0, 2**64 - 1)


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, output: str) -> None:
    assert (philox_4x32_10(words(counter), words(key)) == words(output)).all()


def test_columns_do_not_influence_each_other() -> None:
    counters = np.hstack([words(counter) for counter, _, _ in KNOWN_ANSWERS])
    keys = np.hstack([words(key) for _, key, _ in KNOWN_ANSWERS])
    outputs = np.hstack([words(output) for _, _, output in KNOWN_ANSWERS])
    assert (philox_4x32_10(counters, keys) == outputs).all()


def test_bits_are_the_first_words_of_seed_position_and_stream() -> None:
    seed, position = 0x0123456789ABCDEF, 77
    output = philox_4x32_10(words(f"{position:x} {RandomStream.TOKEN:x} 0 0"), words("89abcdef 01234567"))
    bits = random_bits(np.array([seed], np.uint64), np.array([position], np.int32), RandomStream.TOKEN)
    assert bits.tolist() == [int(output[0, 0]) | int(output[1, 0]) << 32]


def test_seeds_and_positions_give_different_bits() -> None:
    seeds = np.array([0, 1, 2**32, 2**63, 2**64 - 1], dtype=np.uint64)
    positions = np.arange(1000, dtype=np.int32)
    bits = random_bits(np.repeat(seeds, 1000), np.tile(positions, 5), RandomStream.TOKEN)
    assert len(set(bits.tolist())) == 5000


def test_no_rows_give_no_bits() -> None:
    assert random_bits(np.empty(0, np.uint64), np.empty(0, np.int32), RandomStream.TOKEN).shape == (0,)


@given(st.lists(st.tuples(UINT64, st.integers(1, 2**63 - 1)), min_size=1))
@settings(deadline=None)
def test_uniform_below_is_the_exact_high_product(pairs: list[tuple[int, int]]) -> None:
    bits = np.array([pair[0] for pair in pairs], np.uint64)
    bound = np.array([pair[1] for pair in pairs], np.int64)
    assert uniform_below(bits, bound).tolist() == [b * n >> 64 for b, n in pairs]


def test_uniform_below_stays_below_at_the_extremes() -> None:
    bits = np.array([0, 2**64 - 1, 2**64 - 1, 2**64 - 1], dtype=np.uint64)
    bound = np.array([5, 1, 5, 2**63 - 1], dtype=np.int64)
    assert uniform_below(bits, bound).tolist() == [0, 0, 4, 2**63 - 2]
