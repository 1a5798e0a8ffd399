"""`cached_tokens` of a request, and the counters: prompt tokens that need not be computed, counted once a request."""

from hypothesis import given, settings
from hypothesis import strategies as st


def counted(harness):
    counters = harness.scheduler.counters
    return counters.prefix_query_tokens, counters.prefix_hit_tokens


def test_a_hit_counts_the_whole_blocks_found_and_never_the_last_token(make_any_harness):
    for length, cached in ((15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)):
        harness = make_any_harness()
        first = harness.request(range(length), max_tokens=1)
        harness.run()
        second = harness.request(range(length), max_tokens=1)
        harness.run()
        assert (first.cached_tokens, second.cached_tokens) == (0, cached)
        assert counted(harness) == (2 * length, cached)


def test_a_prompt_that_another_of_the_same_step_computes_is_a_hit(make_any_harness):
    harness = make_any_harness(budget=256)
    first, second = harness.request(range(40)), harness.request(range(40))
    harness.step()
    assert [count for _, count in harness.steps[0]] == [40, 8]
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    harness.run()
    assert counted(harness) == (80, 32)


def test_completions_of_one_request_count_it_once(make_any_harness):
    harness = make_any_harness(budget=256)
    first = harness.request(range(40), n=4)
    harness.run()
    assert (first.cached_tokens, counted(harness)) == (0, (40, 0))
    second = harness.request(range(40), n=4)
    harness.run()
    assert (second.cached_tokens, counted(harness)) == (32, (80, 32))


def test_what_a_preempted_request_finds_again_is_no_hit(make_any_harness):
    harness = make_any_harness(num_blocks=6, block_size=4)
    requests = [harness.request(range(first, first + 8), max_tokens=9) for first in (0, 100)]
    harness.run()
    assert sum(sequence.preemptions for request in requests for sequence in request.sequences)
    assert [request.cached_tokens for request in requests] == [0, 0]
    assert counted(harness) == (16, 0)


def test_generated_tokens_of_a_resumed_request_are_not_part_of_the_prompt(make_any_harness):
    harness = make_any_harness()
    harness.request(range(60), max_tokens=1)
    harness.run()
    resumed = harness.request(range(20), output=tuple(range(20, 50)), max_tokens=100)
    harness.run()
    assert resumed.cached_tokens == 20  # 48 were found
    assert counted(harness) == (80, 20)


def test_a_flush_and_a_salt_are_misses(make_any_harness):
    harness = make_any_harness()
    for _ in range(2):
        request = harness.request(range(40), max_tokens=1)
        harness.run()
        assert request.cached_tokens == 0
        assert harness.scheduler.reset_prefix_cache() == 2


PROMPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.integers(20, 40))
def test_hits_and_computed_tokens_of_requests_one_after_the_other_add_up(make_harness, prompts, num_blocks):
    harness = make_harness(num_blocks=num_blocks, block_size=4, budget=256)
    for stream, length, n in prompts:
        request = harness.request(range(100 * stream, 100 * stream + length), n=n, max_tokens=1)
        before = len(harness.steps)
        harness.run()
        computed = dict.fromkeys(request.sequences, 0)
        for step in harness.steps[before:]:
            for sequence, count in step:
                computed[sequence] += count
        if n == 1:
            assert request.cached_tokens + sum(computed.values()) == length
        assert request.cached_tokens % 4 == 0
        assert request.cached_tokens < length
    assert counted(harness) == (
        sum(length for _, length, _ in prompts),
        sum(request.cached_tokens for request in {s.request for s in harness.by_slot.values()}),
    )
    harness.assert_idle()


def test_a_prompt_that_reads_no_cache_is_not_counted_as_looked_up(make_harness):
    harness = make_harness()
    for skip in (False, True):
        harness.request(range(40), skip_reading_prefix_cache=skip, max_tokens=1)
        harness.run()
    assert counted(harness) == (40, 0)
    uncached = make_harness(caching=False)
    uncached.request(range(40), max_tokens=1)
    uncached.run()
    assert counted(uncached) == (0, 0)
