"""Who goes first and who makes way, with a clock that the tests set."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.params import SamplingParams
from headrace.core_service.request import Request, Sequence
from headrace.core_service.scheduling_policy import Cost, SchedulingPolicy, rank


def make_sequence(priority=0, arrival=0.0, serial=1, resumed=False):
    request = Request(
        internal_id=f"r{serial}",
        external_id="",
        client=1,
        prompt=np.array([1], np.int32),
        params=SamplingParams(),
        eos_token_ids=(),
        length_limit=10,
        priority=priority,
        arrival=arrival,
        received=arrival,
        resumed=resumed,
        serial=serial,
    )
    return Sequence(request, slot=serial, index=0, seed=0)


def in_order(policy, *sequences):
    return sorted(sequences, key=policy.queue_key)


def run(policy, sequence, now):
    sequence.kept_priority = policy.priority_at_admission(sequence, now)
    return sequence


def test_waiting_go_by_priority_then_by_arrival():
    policy = SchedulingPolicy(ageing_s=0)
    low, high, early = make_sequence(5, 0.0, 1), make_sequence(-1, 9.0, 2), make_sequence(5, -1.0, 3)
    assert in_order(policy, low, high, early) == [high, early, low]


def test_fcfs_does_not_read_priorities():
    policy = SchedulingPolicy(by_priority=False)
    late, early = make_sequence(-9, 2.0, 1), make_sequence(9, 1.0, 2)
    assert in_order(policy, late, early) == [early, late]
    assert not policy.makes_way_for(run(policy, early, 100.0), make_sequence(-9, 100.0, 3))


def test_what_was_resumed_goes_before_all_new_work():
    policy = SchedulingPolicy()
    new, resumed = make_sequence(-5, 0.0, 1), make_sequence(5, 10.0, 2, resumed=True)
    assert in_order(policy, new, resumed) == [resumed, new]


@pytest.mark.parametrize(("wait", "first"), [(29.0, "high"), (31.0, "low")])
def test_a_request_that_waits_30_seconds_longer_is_one_priority_ahead(wait, first):
    policy = SchedulingPolicy(ageing_s=30.0)
    low, high = make_sequence(1, 0.0, 1), make_sequence(0, wait, 2)
    assert in_order(policy, low, high)[0] is (low if first == "low" else high)


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 200)), min_size=2, max_size=8), st.floats(200, 900))
def test_the_order_of_those_that_wait_is_that_of_their_effective_priorities_at_any_time(requests, now):
    policy = SchedulingPolicy(ageing_s=30.0)
    waiting = [make_sequence(priority, arrival, i) for i, (priority, arrival) in enumerate(requests)]
    effective = [s.request.priority - (now - s.request.arrival) / 30.0 for s in in_order(policy, *waiting)]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(effective))


def test_a_more_important_request_takes_the_place_of_a_less_important_one_but_not_of_its_equal():
    policy = SchedulingPolicy()
    waiting = make_sequence(0, 10.0, 3)
    assert policy.makes_way_for(run(policy, make_sequence(1, 10.0, 1), 10.0), waiting)
    assert not policy.makes_way_for(run(policy, make_sequence(0, 10.0, 2), 10.0), waiting)


def test_a_request_keeps_the_age_that_it_was_admitted_with():
    policy = SchedulingPolicy(ageing_s=30.0)
    patient = run(policy, make_sequence(5, 0.0, 1), now=200.0)
    assert patient.kept_priority == pytest.approx(5 - 200 / 30)
    assert not policy.makes_way_for(patient, make_sequence(0, 200.0, 2))


def test_ageing_pushes_nobody_out():
    policy = SchedulingPolicy(ageing_s=30.0)
    running = run(policy, make_sequence(0, 1000.0, 1), now=1000.0)
    assert not policy.makes_way_for(running, make_sequence(0, 0.0, 2))


def test_nobody_makes_way_twice():
    policy = SchedulingPolicy()
    victim = run(policy, make_sequence(5, 0.0, 1), 0.0)
    victim.made_way = True
    assert not policy.makes_way_for(victim, make_sequence(0, 0.0, 2))


def no_cost(_):
    return Cost(1, 16)


def test_the_last_in_order_is_the_victim():
    policy = SchedulingPolicy(ageing_s=0)
    running = [run(policy, make_sequence(p, a, i), 0.0) for i, (p, a) in enumerate([(0, 5.0), (1, 1.0), (1, 2.0)])]
    assert policy.victim(running, no_cost) is running[2]
    assert sorted(running, key=rank) == running


def test_the_cheapest_victim_frees_most_for_what_it_must_compute_again():
    policy = SchedulingPolicy(cheapest_victim=True)
    first, long, short, shared = (run(policy, make_sequence(0, float(i), i), 0.0) for i in range(4))
    costs = {first: Cost(1, 1), long: Cost(63, 1000), short: Cost(2, 17), shared: Cost(0, 0)}
    assert policy.victim([first, long, short, shared], costs.__getitem__) is short


def test_the_cheapest_victim_is_never_the_first_in_order_nor_a_more_important_one():
    policy = SchedulingPolicy(cheapest_victim=True, ageing_s=0)
    first, middle, last = (run(policy, make_sequence(p, float(p), p), 0.0) for p in range(3))
    costs = {first: Cost(9, 1), middle: Cost(9, 1), last: Cost(1, 99)}
    assert policy.victim([first, middle, last], costs.__getitem__) is last
    assert policy.victim([first], costs.__getitem__) is first
