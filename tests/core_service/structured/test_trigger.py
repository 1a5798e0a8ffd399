"""A trigger sees its ids wherever they first appear."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core_service.structured.trigger import Trigger

IDS = st.lists(st.integers(0, 2), max_size=5).map(tuple)


@given(ids=IDS, output=st.lists(st.integers(0, 2), max_size=40))
def test_a_trigger_is_seen_with_the_first_token_that_completes_it(ids, output):
    trigger = Trigger(ids)
    for length in range(len(output) + 1):
        ends = [end for end in range(length + 1) if tuple(output[max(end - len(ids), 0) : end]) == ids]
        assert trigger.seen == bool(ends)
        if trigger.seen or length == len(output):
            return
        trigger.push(output[length])
