import random

import pytest
from gateway_harness import RecordingSink
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.errors import Overloaded
from headrace.gateway.slots import SlotTable


@given(st.lists(st.one_of(st.integers(1, 5), st.none()), max_size=60), st.randoms(use_true_random=False))
def test_a_slot_is_never_given_twice_before_its_release(actions: list[int | None], choices: random.Random) -> None:
    table = SlotTable()
    live: dict[int, RecordingSink] = {}
    for action in actions:
        if action is not None:
            sinks = [RecordingSink() for _ in range(action)]
            slots = table.allocate("id", sinks)
            assert not live.keys() & set(slots)
            live.update(zip(slots, sinks, strict=True))
        elif live:
            slot = choices.choice(sorted(live))
            assert table.sinks([slot]) == [live[slot]]
            assert table.release(slot) is live.pop(slot)
        assert table.num_live == len(live)
    assert {id(sink) for sink in table.clear()} == {id(sink) for sink in live.values()}


def test_freed_slots_are_taken_again_so_the_table_stays_small() -> None:
    table = SlotTable()
    for _ in range(100):
        (slot,) = table.allocate("id", [RecordingSink()])
        assert slot == 0
        table.release(slot)


def test_a_full_table_refuses_without_taking_anything() -> None:
    table = SlotTable(max_slots=3)
    table.allocate("a", [RecordingSink(), RecordingSink()])
    with pytest.raises(Overloaded, match="3 slots"):
        table.allocate("b", [RecordingSink(), RecordingSink()])
    assert table.num_live == 2


@pytest.mark.parametrize("slot", [0, 2, 7])
def test_a_free_slot_has_no_sink(slot: int) -> None:
    table = SlotTable()
    freed, held = table.allocate("a", [RecordingSink(), RecordingSink()])
    table.release(freed)
    with pytest.raises(KeyError, match=f"slot {slot} is not in use"):
        table.sinks([held, slot])
    with pytest.raises(KeyError):
        table.release(slot)
    assert not table.holds(slot, "a")


def test_a_snapshot_keeps_its_sinks() -> None:
    table = SlotTable()
    first = RecordingSink()
    table.allocate("a", [first])
    before = table.snapshot()
    table.release(0)
    table.allocate("b", [RecordingSink()])
    assert before.sinks([0]) == [first]
    assert before.holds(0, "a")
    assert table.holds(0, "b")
