from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.request import Request

VOCAB = 1000

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
ABORT = FinishReason.FINISH_REASON_ABORT
DEADLINE = FinishReason.FINISH_REASON_DEADLINE
TIME_LIMIT = FinishReason.FINISH_REASON_TIME_LIMIT


def only(request):
    (sequence,) = request.sequences
    return sequence


def expected_output(prompt, count):
    return [(prompt[-1] + 1 + i) % VOCAB for i in range(count)]


def shares(step):
    return [count for _, count in step]


def test_output_follows_the_prompt_and_ends_at_max_tokens(make_any_harness):
    harness = make_any_harness()
    sequence = only(harness.request([5, 6, 7], max_tokens=3))
    harness.run()
    assert harness.tokens[sequence] == [8, 9, 10]
    assert harness.finished[sequence].reason == LENGTH
    harness.assert_idle()


def test_long_prompts_are_computed_in_chunks_of_what_budget_is_left(make_harness):
    harness = make_harness(budget=32)
    first = harness.request(list(range(40)), max_tokens=2)
    second = harness.request(list(range(100, 130)), max_tokens=2)
    harness.run()
    assert [shares(step) for step in harness.steps] == [[32], [8, 24], [1, 6], [1]]
    assert harness.tokens[only(first)] == [40, 41]
    assert harness.tokens[only(second)] == [130, 131]


def test_decodes_go_on_while_a_long_prompt_is_computed(make_harness):
    harness = make_harness(budget=16)
    short = only(harness.request([1], max_tokens=10))
    harness.step()
    harness.request(list(range(200, 300)), max_tokens=1)
    for _ in range(5):
        harness.step()
    assert len(harness.tokens[short]) == 6


def test_no_more_than_max_num_seqs_run_at_once(make_any_harness):
    harness = make_any_harness(max_num_seqs=2)
    for i in range(5):
        harness.request([i + 1], max_tokens=3)
    harness.run()
    assert max(len(step) for step in harness.steps) == 2
    harness.assert_idle()


@pytest.mark.parametrize(
    ("params", "eos", "reason", "stop_token", "count"),
    [
        ({}, (3,), STOP, None, 2),
        ({"ignore_eos": True}, (3,), LENGTH, None, 4),
        ({"stop_token_ids": (4,)}, (), STOP, 4, 3),
        ({"stop_token_ids": (4,)}, (3,), STOP, None, 2),
        ({}, (900, 3), STOP, 3, 2),
        ({"ignore_eos": True}, (900, 3), LENGTH, None, 4),
        ({"stop_token_ids": (5,), "max_tokens": 4}, (), STOP, 5, 4),
        ({"stop_token_ids": (*range(100, 110), 3)}, (), STOP, 3, 2),
    ],
)
def test_stop_rules(make_any_harness, params, eos, reason, stop_token, count):
    """End of sequence before stop ids before length; only the primary end token leaves stop_token_id unset."""
    harness = make_any_harness()
    sequence = only(harness.request([1], eos=eos, **params))
    harness.run()
    record = harness.finished[sequence]
    assert (record.reason, record.stop_token_id) == (reason, stop_token)
    assert harness.tokens[sequence] == expected_output([1], count)


def test_stop_tokens_are_forbidden_until_min_tokens(make_harness):
    harness = make_harness()
    harness.request([1], eos=(3,), stop_token_ids=(7,), min_tokens=2, max_tokens=3)
    forbidden = []
    execute = harness.runner.execute

    def spy(batch):
        forbidden.append({i: sorted(ids.tolist()) for i, ids in batch.sampling.forbidden_ids.items()})
        return execute(batch)

    harness.runner.execute = spy
    harness.run()
    assert forbidden == [{0: [3, 7]}, {0: [3, 7]}]  # the third token was never drawn: token 3 came as the second


def test_the_context_ends_an_output_before_max_tokens(make_any_harness):
    harness = make_any_harness(max_model_len=10)
    sequence = only(harness.request([1] * 7, max_tokens=500, min_tokens=0))
    harness.run()
    assert len(harness.tokens[sequence]) == 3
    assert harness.finished[sequence].reason == LENGTH


def test_a_failed_draw_ends_only_its_own_request(make_any_harness):
    harness = make_any_harness()
    bad, good = only(harness.request([1])), only(harness.request([50]))
    execute = harness.runner.execute

    def fail_first(batch):
        result = execute(batch)
        result.token_ids[0] = -1
        harness.runner.execute = execute
        return result

    harness.runner.execute = fail_first
    harness.run()
    assert harness.finished[bad].reason == FinishReason.FINISH_REASON_ERROR
    assert harness.tokens[bad] == []
    assert harness.tokens[good] == [51, 52, 53, 54]
    harness.assert_idle()


def test_prompt_logits_that_give_no_probabilities_end_only_that_request(make_any_harness):
    harness = make_any_harness()
    bad = only(harness.request([1, 2, 3], prompt_logprobs=0))
    good = only(harness.request([50], max_tokens=2))
    execute = harness.runner.execute

    def lose_a_row(batch):
        result = execute(batch)
        parts = [replace(part, rows=part.rows[:1]) for part in result.prompt_logprobs]
        return replace(result, prompt_logprobs=tuple(parts))

    harness.runner.execute = lose_a_row
    harness.run()
    assert harness.finished[bad].reason == FinishReason.FINISH_REASON_ERROR
    assert harness.tokens[good] == [51, 52]
    harness.assert_idle()


def test_a_cached_prefix_is_not_computed_again(make_any_harness):
    harness = make_any_harness()
    prompt = list(range(40))
    harness.request(prompt, max_tokens=1)
    harness.run()
    again = harness.request(prompt, max_tokens=1)
    harness.run()
    assert shares(harness.steps[-1]) == [8]
    assert again.cached_tokens == 32


def test_skip_reading_prefix_cache_computes_the_whole_prompt_but_stores_it(make_any_harness):
    harness = make_any_harness()
    prompt = list(range(40))
    for skip in (True, True, False):
        request = harness.request(prompt, max_tokens=1, skip_reading_prefix_cache=skip)
        harness.run()
    assert [sum(shares(step)) for step in harness.steps] == [40, 40, 8]
    assert request.cached_tokens == 32


def test_the_latest_arrival_is_preempted_and_finishes_with_the_same_tokens(make_any_harness):
    harness = make_any_harness(num_blocks=6, block_size=4)
    first = only(harness.request(list(range(8)), max_tokens=9))
    second = only(harness.request(list(range(100, 108)), max_tokens=9))
    harness.run()
    assert second.preemptions > 0
    assert first.preemptions == 0
    assert harness.tokens[first] == expected_output([7], 9)
    assert harness.tokens[second] == expected_output([107], 9)
    harness.assert_idle()


def test_a_lower_priority_value_runs_sooner_and_is_not_the_victim(make_any_harness):
    harness = make_any_harness(max_num_seqs=1)
    order = [only(harness.request([10 * p], priority=p, max_tokens=1)) for p in (3, 2, 0)]
    harness.run()
    assert [step[0][0] for step in harness.steps] == order[::-1]
    harness = make_any_harness(num_blocks=6, block_size=4)
    low = only(harness.request(list(range(8)), priority=5, max_tokens=9))
    harness.step()
    high = only(harness.request(list(range(100, 108)), priority=0, max_tokens=9))
    harness.run()
    assert high.preemptions == 0
    assert low.preemptions > 0
    harness.assert_idle()


def test_equal_priorities_run_in_order_of_arrival_whatever_the_order_of_adding(make_any_harness):
    harness = make_any_harness(max_num_seqs=1)
    sequences = {a: only(harness.request([a], arrival=float(a), max_tokens=1)) for a in (3, 1, 2)}
    harness.run()
    assert [step[0][0] for step in harness.steps] == [sequences[a] for a in (1, 2, 3)]


def test_an_output_that_outgrows_the_pool_alone_ends_as_length_with_its_tokens(make_any_harness):
    harness = make_any_harness(num_blocks=4, block_size=4)
    sequence = only(harness.request([1, 2, 3, 4, 5], max_tokens=100))
    harness.run()
    assert harness.finished[sequence].reason == LENGTH
    assert harness.tokens[sequence] == expected_output([5], 12 - 5 + 1)
    harness.assert_idle()


def test_min_tokens_beyond_the_context_ends_as_length(make_any_harness):
    harness = make_any_harness(max_model_len=10)
    sequence = only(harness.request([1] * 7, max_tokens=4_000_000_000, min_tokens=3_000_000_000))
    harness.run()
    assert harness.finished[sequence].reason == LENGTH


def test_resumed_output_counts_as_output(make_any_harness):
    harness = make_any_harness()
    sequence = only(harness.request([1, 2], output=[3, 4], max_tokens=4))
    harness.step()
    harness.run()
    assert harness.tokens[sequence] == [5, 6]
    assert harness.finished[sequence].reason == LENGTH


def test_expired_requests_are_never_scheduled(make_any_harness):
    harness = make_any_harness(max_num_seqs=1)
    running = only(harness.request([1], max_tokens=5))
    late = only(harness.request([2], deadline=2.5))
    limited = only(harness.request([3], time_limit_s=3.5))
    harness.run()
    assert harness.finished[running].reason == LENGTH
    assert harness.finished[late].reason == DEADLINE
    assert harness.finished[limited].reason == TIME_LIMIT
    assert all(owner is running for step in harness.steps for owner, _ in step)
    harness.assert_idle()


def test_a_time_limit_keeps_the_tokens_so_far(make_harness):
    harness = make_harness()
    sequence = only(harness.request([1], time_limit_s=3.5, max_tokens=100))
    harness.run()
    assert harness.tokens[sequence] == [2, 3, 4]
    assert harness.finished[sequence].reason == TIME_LIMIT


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_frees_everything_at_any_moment(make_harness, steps):
    harness = make_harness(budget=16)
    request = harness.request(list(range(40)), n=2, max_tokens=5)
    for _ in range(steps):
        harness.step()
    for sequence in request.sequences:
        harness.abort(sequence)
        harness.abort(sequence)  # a second abort is ignored
    harness.assert_idle()


def test_prompt_logprobs_cover_every_position_once_despite_chunks_and_preemption(make_any_harness):
    harness = make_any_harness(num_blocks=8, block_size=4, budget=5)
    positions: dict[Request, list[int]] = {}
    requests = [harness.request(list(range(s, s + 12)), prompt_logprobs=1, max_tokens=6) for s in (0, 100)]
    while harness.scheduler.has_work:
        outputs = harness.step()
        for part in outputs.prompt_logprobs if outputs else []:
            count = len(part.rows.rows)
            seen = positions.setdefault(part.sequence.request, [])
            seen.extend(range(part.first_position, part.first_position + count))
            targets = part.rows.token_ids[part.rows.offsets[:-1]].tolist()
            prompt = part.sequence.request.prompt.tolist()
            assert targets == prompt[part.first_position : part.first_position + count]
    for request in requests:
        assert positions[request] == list(range(1, 12))
    assert any(only(request).preemptions for request in requests)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_request_ends_once_with_its_own_tokens_under_random_pressure(make_any_harness, data):
    harness = make_any_harness(
        num_blocks=data.draw(st.integers(8, 20)),
        block_size=4,
        max_num_seqs=data.draw(st.integers(1, 5)),
        budget=data.draw(st.integers(1, 24)),
        caching=data.draw(st.booleans()),
        max_model_len=28,
        config={
            "policy": data.draw(st.sampled_from(["priority", "fcfs"])),
            "priority_ageing": data.draw(st.sampled_from([0.0, 3.0])),
            "preemption_victim": data.draw(st.sampled_from(["last", "cheapest"])),
            "watermark": data.draw(st.sampled_from([0.0, 0.3])),
            "long_prefill_token_threshold": data.draw(st.sampled_from([0, 3])),
        },
    )
    live = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort", "reset"]))
        if action == "add":
            start = data.draw(st.integers(0, 2)) * 100
            prompt = list(range(start, start + data.draw(st.integers(1, 14))))
            live.append(
                harness.request(
                    prompt,
                    n=data.draw(st.integers(1, 3)),
                    max_tokens=data.draw(st.integers(1, 10)),
                    priority=data.draw(st.integers(0, 2)),
                    deadline=data.draw(st.none() | st.integers(0, 40)),
                )
            )
        elif action == "step":
            harness.step()
        elif action == "abort" and live:
            harness.abort(data.draw(st.sampled_from(live)).sequences[0])
        elif action == "reset":
            harness.scheduler.reset_prefix_cache()
    harness.run()
    harness.assert_idle()
    for request in live:
        for sequence in request.sequences:
            tokens = harness.tokens[sequence]
            assert tokens == expected_output(request.prompt.tolist(), len(tokens))
            if harness.finished[sequence].reason == LENGTH:
                room = min(request.length_limit, harness.manager.num_usable * 4 + 1)
                assert len(request.prompt) + len(tokens) == room


def test_wide_rows_keep_their_content_when_the_table_grows(make_any_harness):
    harness = make_any_harness(num_blocks=200, budget=2048, max_model_len=2048)
    short = only(harness.request([7], max_tokens=30))
    harness.step()
    long = only(harness.request(np.arange(900).tolist(), max_tokens=3))
    harness.run()
    assert harness.tokens[short] == expected_output([7], 30)
    assert harness.tokens[long] == [900, 901, 902]


def test_times_go_on_after_a_preemption(make_any_harness):
    harness = make_any_harness()
    sequence = only(harness.request(list(range(20)), max_tokens=8))
    for _ in range(4):
        harness.step()
    before = sequence.first_token
    harness.scheduler._life.preempt(sequence)
    harness.step()
    harness.abort(sequence)
    assert sequence.first_token == before > 0
    assert sequence.last_token >= before
    harness.run()
    harness.assert_idle()
