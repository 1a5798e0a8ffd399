import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_service.free_blocks import FreeBlockQueue


def test_blocks_start_in_order():
    assert list(FreeBlockQueue(range(1, 5))) == [1, 2, 3, 4]


def test_pop_takes_the_front_until_empty():
    queue = FreeBlockQueue(range(1, 3))
    assert [queue.pop(), queue.pop()] == [1, 2]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_block_cannot_be_free_twice_nor_removed_twice():
    queue = FreeBlockQueue(range(1, 3))
    with pytest.raises(ValueError, match="free already"):
        queue.append(1)
    queue.remove(1)
    with pytest.raises(ValueError, match="not free"):
        queue.remove(1)


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "append", "prepend"]), st.integers(1, 6))))
def test_queue_behaves_like_a_list(operations):
    queue, model = FreeBlockQueue(range(1, 7)), [1, 2, 3, 4, 5, 6]
    for operation, block in operations:
        if operation == "pop" and model:
            assert queue.pop() == model.pop(0)
        elif operation == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        elif operation == "append" and block not in model:
            queue.append(block)
            model.append(block)
        elif operation == "prepend" and block not in model:
            queue.prepend(block)
            model.insert(0, block)
        assert list(queue) == model
        assert len(queue) == len(model)
        assert all((b in queue) == (b in model) for b in range(1, 7))
