import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_service.free_blocks import FreeBlockQueue


def make_queue(num_blocks=6):
    return FreeBlockQueue(range(1, num_blocks + 1))


def test_blocks_start_in_order():
    assert list(make_queue(4)) == [1, 2, 3, 4]


def test_taking_starts_at_the_front_and_keeps_the_order():
    queue = make_queue(4)
    assert queue.take(3) == [1, 2, 3]
    assert (list(queue), len(queue)) == ([4], 1)


def test_taking_more_than_there_is_takes_nothing():
    queue = make_queue(2)
    with pytest.raises(IndexError, match="3 blocks wanted, 2 are free"):
        queue.take(3)
    assert list(queue) == [1, 2]


def test_blocks_leave_from_the_middle_and_both_ends():
    queue = make_queue(5)
    queue.remove([3])
    assert list(queue) == [1, 2, 4, 5]
    queue.remove([1, 5])
    assert list(queue) == [2, 4]


def test_appended_blocks_are_reused_last_in_their_order():
    queue = make_queue(5)
    taken = queue.take(3)
    queue.append(taken)
    assert list(queue) == [4, 5, 1, 2, 3]


def test_the_last_prepended_block_is_reused_first():
    queue = make_queue(5)
    queue.take(3)
    queue.prepend([1, 2, 3])
    assert list(queue) == [3, 2, 1, 4, 5]


def test_a_drained_queue_fills_again():
    queue = make_queue(3)
    assert queue.take(3) == [1, 2, 3]
    assert list(queue) == []
    queue.append([2])
    queue.prepend([3])
    queue.append([1])
    assert queue.take(3) == [3, 2, 1]


def test_no_blocks_change_nothing():
    queue = make_queue(2)
    queue.append([])
    queue.prepend([])
    queue.remove([])
    assert queue.take(0) == []
    assert list(queue) == [1, 2]


def test_a_block_cannot_be_free_twice_nor_removed_twice():
    queue = make_queue(2)
    with pytest.raises(ValueError, match="free already"):
        queue.append([1])
    with pytest.raises(ValueError, match="free already"):
        queue.prepend([1])
    queue.remove([1])
    with pytest.raises(ValueError, match="not free"):
        queue.remove([1])


@given(st.data())
def test_the_queue_behaves_like_a_list(data):
    queue, model = make_queue(), [1, 2, 3, 4, 5, 6]
    for _ in range(data.draw(st.integers(0, 20))):
        operation = data.draw(st.sampled_from(["take", "remove", "append", "prepend"]))
        if operation == "take":
            count = data.draw(st.integers(0, len(model)))
            taken, model = model[:count], model[count:]
            assert queue.take(count) == taken
            continue
        inside = operation == "remove"
        candidates = [block for block in range(1, 7) if (block in model) == inside]
        blocks = data.draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []
        if operation == "remove":
            queue.remove(blocks)
            model = [block for block in model if block not in blocks]
        elif operation == "append":
            queue.append(blocks)
            model = model + blocks
        else:
            queue.prepend(blocks)
            model = blocks[::-1] + model
        assert list(queue) == model
        assert len(queue) == len(model)
        assert all((block in queue) == (block in model) for block in range(1, 7))
