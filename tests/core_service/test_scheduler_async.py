"""Planning a step while the one before it computes: nothing is lost, drawn twice or computed for nobody."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.request import SequenceState

VOCAB = 1000


def only(request):
    (sequence,) = request.sequences
    return sequence


def expected_output(prompt, count):
    return [(prompt[-1] + 1 + i) % VOCAB for i in range(count)]


@pytest.fixture
def harness(make_harness):
    return make_harness(overlap=True)


def test_the_next_step_is_planned_before_the_result_of_this_one_is_taken_in(harness):
    sequence = only(harness.request([5], max_tokens=3))
    harness.step()
    assert harness.tokens[sequence] == [], "its first step is under way"
    harness.step()
    assert (len(harness.steps), harness.tokens[sequence]) == (2, [6])


def test_nothing_is_computed_beyond_max_tokens(harness):
    sequence = only(harness.request([5], max_tokens=3))
    harness.run()
    assert [count for step in harness.steps for _, count in step] == [1, 1, 1]
    assert harness.tokens[sequence] == [6, 7, 8]
    harness.assert_idle()


def test_a_stop_costs_one_token_that_nobody_sees(harness):
    sequence = only(harness.request([5], stop_token_ids=(7,), max_tokens=10))
    harness.run()
    assert harness.tokens[sequence] == [6, 7]
    assert len(harness.steps) == 3, "the third was under way when the stop token came"
    harness.assert_idle()


@pytest.mark.parametrize("steps", range(1, 6))
def test_abort_while_a_token_is_drawn_ends_it_once_and_frees_all(harness, steps):
    request = harness.request(list(range(100)), n=2, max_tokens=8)
    other = only(harness.request([500], max_tokens=8))
    for _ in range(steps):
        harness.step()
    for sequence in request.sequences:
        harness.abort(sequence)
    for sequence in request.sequences:
        assert sequence.state is SequenceState.FINISHED
    harness.run()
    assert harness.tokens[other] == expected_output([500], 8)
    harness.assert_idle()


def test_abort_in_the_last_step_is_not_lost(harness):
    sequence = only(harness.request([5], max_tokens=1))
    harness.step()
    harness.abort(sequence)
    harness.run()
    assert harness.finished[sequence].reason == FinishReason.FINISH_REASON_ABORT
    assert harness.tokens[sequence] == []
    harness.assert_idle()


def test_a_preempted_sequence_still_gets_the_token_that_was_being_drawn(make_harness):
    """5 usable blocks: both need a third one at the same time, and one step is under way."""
    harness = make_harness(overlap=True, num_blocks=6, budget=128)
    first = only(harness.request(list(range(32)), max_tokens=24))
    second = only(harness.request(list(range(100, 132)), max_tokens=24))
    while not second.preemptions:
        harness.step()
    assert len(harness.tokens[second]) == len(second.output) > 0
    harness.run()
    assert harness.tokens[first] == expected_output([31], 24)
    assert harness.tokens[second] == expected_output([131], 24)
    harness.assert_idle()


def test_a_preempted_sequence_can_end_by_the_token_that_was_being_drawn(make_harness):
    harness = make_harness(overlap=True, num_blocks=6, budget=128)
    harness.request(list(range(32)), max_tokens=24)
    # Its 17th output token needs the block that is not there; the 16th is drawn meanwhile, and is a stop token.
    second = only(harness.request(list(range(100, 132)), max_tokens=24, stop_token_ids=(147,)))
    harness.run()
    assert harness.tokens[second] == expected_output([131], 16)
    assert harness.finished[second].reason == FinishReason.FINISH_REASON_STOP
    harness.assert_idle()


def test_a_preempted_sequence_starts_again_only_after_the_token_that_was_being_drawn(make_harness):
    """What pushes it out needs less than it freed, since its prompt is cached: it could go on at once."""
    harness = make_harness(overlap=True, num_blocks=8, block_size=4, budget=12, max_num_seqs=4, max_model_len=28)
    request = harness.request([0, 1, 2, 3, 4, 5], n=2, max_tokens=5, priority=1)
    harness.request([0], max_tokens=1)
    for _ in range(4):
        harness.step()
    harness.request(list(range(9)), max_tokens=1)
    harness.run()
    assert sum(sequence.preemptions for sequence in request.sequences)
    for sequence in request.sequences:
        assert harness.tokens[sequence] == [6, 7, 8, 9, 10]
    harness.assert_idle()


def test_a_reset_of_the_cache_with_a_step_under_way_loses_nothing(harness):
    requests = [harness.request(list(range(s, s + 40)), max_tokens=12) for s in (0, 200)]
    for _ in range(20):
        harness.step()
        harness.scheduler.reset_prefix_cache()
    harness.run()
    for request in requests:
        assert harness.tokens[only(request)] == expected_output(request.prompt.tolist(), 12)
    harness.assert_idle()


def test_an_output_that_fills_the_pool_alone_keeps_the_token_that_was_being_drawn(make_harness):
    harness = make_harness(overlap=True, num_blocks=4, block_size=4, max_model_len=100)
    sequence = only(harness.request([1, 2, 3], max_tokens=None))
    harness.run()
    assert harness.tokens[sequence] == expected_output([3], 10)
    assert harness.finished[sequence].reason == FinishReason.FINISH_REASON_LENGTH
    harness.assert_idle()


def test_a_failed_draw_with_the_next_step_under_way_ends_only_its_own_request(harness):
    bad = only(harness.request([1], max_tokens=9))
    good = only(harness.request([50], max_tokens=9))
    execute, slots = harness.runner.execute, []

    def fail_once(batch):
        result = execute(batch)
        slots.append(len(batch.sample_index))
        if len(slots) == 3:
            result.token_ids[0] = -1
        return result

    harness.runner.execute = fail_once
    harness.run()
    assert harness.finished[bad].reason == FinishReason.FINISH_REASON_ERROR
    assert harness.tokens[bad] == [2, 3]
    assert harness.tokens[good] == expected_output([50], 9)
    harness.assert_idle()


def test_a_second_turn_finds_the_whole_first_one_in_the_cache(harness):
    first = only(harness.request(list(range(32)), max_tokens=17))
    harness.run()
    conversation = [*range(32), *harness.tokens[first]]
    second = harness.request([*conversation, 900], max_tokens=2)
    harness.run()
    assert second.cached_tokens == 48


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_outputs_are_those_of_planning_one_step_at_a_time(make_harness, data):
    """The same requests, added and stepped alike, give the same tokens and ends either way."""
    requests = data.draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "start": st.integers(0, 3),
                    "length": st.integers(1, 14),
                    "n": st.integers(1, 3),
                    "max_tokens": st.integers(1, 10),
                    "stop": st.none() | st.integers(1, 12),
                    "priority": st.integers(0, 2),
                    "steps": st.integers(0, 4),
                }
            ),
            min_size=1,
            max_size=8,
        )
    )
    size = data.draw(st.integers(8, 20))
    results = []
    for overlap in (False, True):
        harness = make_harness(
            overlap=overlap, num_blocks=size, block_size=4, max_num_seqs=4, budget=12, max_model_len=28
        )
        for one in requests:
            prompt = np.arange(one["start"] * 100, one["start"] * 100 + one["length"]).tolist()
            stops = () if one["stop"] is None else (prompt[-1] + one["stop"],)
            harness.request(
                prompt, n=one["n"], max_tokens=one["max_tokens"], stop_token_ids=stops, priority=one["priority"]
            )
            for _ in range(one["steps"]):
                harness.step()
        harness.run(most=1000)
        harness.assert_idle()
        results.append({s: (harness.tokens[q], harness.finished[q].reason) for s, q in harness.by_slot.items()})
    assert results[0] == results[1]
