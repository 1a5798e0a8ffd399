"""Priorities, ageing, chunks and queue limits, seen from outside the scheduler."""

import pytest
from google.rpc import code_pb2

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.request import SequenceState


def only(request):
    (sequence,) = request.sequences
    return sequence


def shares(step):
    return [count for _, count in step]


def running(harness):
    return [s for s in harness.by_slot.values() if s.state is SequenceState.RUNNING]


# -- shares of the budget ----------------------------------------------------------------------------------------------


def test_a_long_prompt_takes_at_most_its_threshold_while_others_want_their_share(make_harness):
    harness = make_harness(
        num_blocks=300, budget=1024, max_model_len=2048, config={"long_prefill_token_threshold": 400}
    )
    for start in range(3):
        harness.request(list(range(start * 300, start * 300 + 800)), max_tokens=1)
    harness.step()
    assert shares(harness.steps[0]) == [400, 400, 224]
    harness.run()
    harness.assert_idle()


def test_the_threshold_does_not_hold_back_a_prompt_that_is_alone(make_harness):
    harness = make_harness(
        num_blocks=300, budget=1024, max_model_len=2048, config={"long_prefill_token_threshold": 400}
    )
    harness.request(list(range(900)), max_tokens=1)
    harness.step()
    assert shares(harness.steps[0]) == [900]


def test_every_prompt_may_have_its_even_share_of_the_budget(make_harness):
    harness = make_harness(
        num_blocks=300, budget=1024, max_model_len=2048, config={"long_prefill_token_threshold": 400}
    )
    for start in (0, 1):
        harness.request(list(range(start, start + 800)), max_tokens=1)
    harness.step()
    assert shares(harness.steps[0]) == [512, 512]


def test_without_chunking_a_prompt_waits_until_it_fits_whole_and_nobody_overtakes_it(make_harness):
    harness = make_harness(budget=32, config={"enable_chunked_prefill": False})
    first = only(harness.request(list(range(20)), max_tokens=3))
    second = only(harness.request(list(range(100, 120)), max_tokens=1))
    third = only(harness.request([500], max_tokens=1))
    harness.step()
    assert shares(harness.steps[0]) == [20]
    harness.step()
    assert [s for s, _ in harness.steps[1]] == [first, second, third]
    assert shares(harness.steps[1]) == [1, 20, 1]
    harness.run()
    harness.assert_idle()


def test_equal_prompts_that_arrive_together_are_computed_once(make_any_harness):
    harness = make_any_harness(budget=256)
    prompt = list(range(64))
    requests = [harness.request([*prompt, 900 + i], max_tokens=2) for i in range(4)]
    harness.step()
    harness.step()
    assert shares(harness.steps[0]) == [65, 1, 1, 1]
    harness.run()
    assert [r.cached_tokens for r in requests] == [0, 64, 64, 64]
    for i, request in enumerate(requests):
        assert harness.tokens[only(request)] == [901 + i, 902 + i]
    harness.assert_idle()


def test_the_watermark_keeps_blocks_free_for_those_that_run(make_harness):
    harness = make_harness(num_blocks=11, config={"watermark": 0.5})
    harness.request(list(range(64)), max_tokens=4)
    harness.request(list(range(100, 132)), max_tokens=4)
    harness.step()
    assert len(running(harness)) == 1, "4 of 10 blocks are taken, and 5 must stay free"
    harness.run()
    harness.assert_idle()


def test_the_watermark_does_not_stop_a_request_that_would_run_alone(make_harness):
    harness = make_harness(num_blocks=11, config={"watermark": 1.0})
    sequence = only(harness.request(list(range(150)), max_tokens=2))
    harness.run()
    assert len(harness.tokens[sequence]) == 2


# -- priorities --------------------------------------------------------------------------------------------------------


def test_low_priority_gives_its_blocks_to_high_priority_when_they_run_out(make_any_harness):
    harness = make_any_harness(num_blocks=6, budget=128)
    low = only(harness.request(list(range(32)), priority=5, max_tokens=20))
    harness.step()
    high = only(harness.request(list(range(100, 132)), priority=0, max_tokens=10))
    harness.run()
    assert low.preemptions >= 1
    assert high.preemptions == 0
    assert harness.tokens[low] == list(range(32, 52))
    harness.assert_idle()


@pytest.mark.parametrize(
    ("priorities", "arrivals", "runs", "queue"),
    [([3, 2, 0], [1, 2, 3], 2, [1, 0]), ([1, 1, 1], [3, 1, 2], 1, [2, 0])],
)
def test_the_queue_is_in_order_of_priority_and_arrival(make_harness, priorities, arrivals, runs, queue):
    harness = make_harness(max_num_seqs=1)
    requests = [
        harness.request([i + 1], priority=priority, arrival=arrival)
        for i, (priority, arrival) in enumerate(zip(priorities, arrivals, strict=True))
    ]
    harness.step()
    assert running(harness) == [only(requests[runs])]
    assert [s.request for s in harness.scheduler._life.waiting] == [requests[i] for i in queue]


def test_high_priority_does_not_wait_behind_low_when_all_rows_are_taken(make_any_harness):
    harness = make_any_harness(max_num_seqs=2)
    lows = [only(harness.request([100 * i + 1], priority=5, max_tokens=40)) for i in (1, 2)]
    harness.step()
    harness.step()
    high = only(harness.request([7], priority=0, max_tokens=3))
    harness.step()
    assert high in running(harness)
    assert lows[1] not in running(harness), "the later one makes way"
    harness.run()
    assert [s.preemptions for s in lows] == [0, 1]
    for i, low in zip((1, 2), lows, strict=True):
        assert harness.tokens[low] == [100 * i + 2 + k for k in range(40)]
    harness.assert_idle()


def test_nobody_is_pushed_out_twice(make_any_harness):
    harness = make_any_harness(max_num_seqs=1, config={"priority_ageing": 0.0})
    low = only(harness.request([1], priority=5, max_tokens=60))
    for _ in range(4):
        harness.step()
        harness.request([500], priority=0, max_tokens=2)
        for _ in range(8):
            harness.step()
    harness.run()
    assert low.preemptions == 1


def test_nobody_makes_way_if_that_would_not_be_enough(make_harness):
    harness = make_harness(num_blocks=11, max_num_seqs=2, budget=256)
    equal = only(harness.request(list(range(120)), priority=0, max_tokens=30))
    low = only(harness.request([500], priority=5, max_tokens=30))
    harness.step()
    harness.request(list(range(200, 250)), priority=0, max_tokens=1)
    for _ in range(3):
        harness.step()
    assert set(running(harness)) == {equal, low}, "pushing out the low one frees one block of the four that are needed"


def test_more_important_requests_push_out_for_blocks_too(make_harness):
    harness = make_harness(num_blocks=11, max_num_seqs=4)
    low = only(harness.request(list(range(120)), priority=5, max_tokens=30))
    harness.step()
    high = only(harness.request(list(range(200, 250)), priority=0, max_tokens=1))
    harness.step()
    assert running(harness) == [] or high in harness.finished
    assert low.preemptions == 1
    harness.run()
    assert len(harness.tokens[low]) == 30


@pytest.mark.parametrize(("ageing", "starves"), [(30.0, False), (0.0, True)])
def test_ageing_lets_low_priority_run_under_a_steady_stream_of_high_priority(make_any_harness, ageing, starves):
    harness = make_any_harness(max_num_seqs=1, config={"priority_ageing": ageing})
    harness.request([1], priority=0, max_tokens=2)
    low = only(harness.request([500], priority=1, max_tokens=1))
    for turn in range(60):
        harness.request([2 + turn], priority=0, max_tokens=2)
        harness.step()
        harness.step()
    assert (low not in harness.finished) == starves


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_is_refused_and_one_that_ran_is_not(make_any_harness):
    harness = make_any_harness(max_num_seqs=1, config={"max_waiting_time": 5.0})
    runs = only(harness.request([1], max_tokens=30))
    waits = harness.request([2], n=2)
    harness.run()
    assert len(harness.tokens[runs]) == 30
    for sequence in waits.sequences:
        record = harness.finished[sequence]
        assert record.reason == FinishReason.FINISH_REASON_ERROR
        assert (record.code, record.retryable) == (code_pb2.RESOURCE_EXHAUSTED, True)
        assert "max_waiting_time" in record.message
    harness.assert_idle()


def test_whoever_makes_way_also_leaves_what_the_watermark_keeps_free(make_any_harness):
    harness = make_any_harness(num_blocks=11, budget=256, config={"policy": "priority", "watermark": 0.3})
    low = [only(harness.request(range(s, s + 40), max_tokens=5, priority=5)) for s in (0, 100)]
    harness.step()
    harness.step()
    high = only(harness.request(range(200, 264), max_tokens=2, priority=0))
    harness.run()
    for sequence in low:
        assert harness.finished[sequence].reason == FinishReason.FINISH_REASON_LENGTH
    assert harness.tokens[high] == [264, 265]
    harness.assert_idle()


def test_nobody_makes_way_for_one_that_could_not_start_in_this_step(make_harness):
    """Blocks and rows are there: what is short is the budget, which a more important prompt uses up."""
    harness = make_harness(budget=16, max_num_seqs=3, config={"policy": "priority"})
    important = only(harness.request(range(160), max_tokens=1, priority=0))
    low = only(harness.request([900], max_tokens=30, priority=9))
    harness.step()
    harness.request([500], max_tokens=1, priority=5)
    for _ in range(5):
        harness.step()
        assert important.state is SequenceState.RUNNING
    assert not low.preemptions
    harness.run()
    harness.assert_idle()


def test_a_long_prompt_makes_way_for_a_more_important_request_that_needs_its_budget(make_any_harness):
    harness = make_any_harness(budget=8, config={"policy": "priority"})
    long = only(harness.request(range(400), max_tokens=1, priority=9))
    harness.step()
    urgent = only(harness.request([900], max_tokens=1, priority=-5))
    for _ in range(3):
        harness.step()
    assert harness.tokens[urgent] == [901]
    harness.run()
    assert harness.tokens[long] == [400]
    harness.assert_idle()
