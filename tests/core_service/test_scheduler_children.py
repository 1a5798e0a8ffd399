"""The completions of one request: the first computes the prompt, the others fork its blocks."""

import pytest

from headrace.common.v1.params_pb2 import FinishReason

VOCAB = 1000

ABORT = FinishReason.FINISH_REASON_ABORT


def expected_output(prompt, count):
    return [(prompt[-1] + 1 + i) % VOCAB for i in range(count)]


def shares(step):
    return [count for _, count in step]


def test_children_share_the_prompts_blocks_and_compute_it_once(make_harness):
    harness = make_harness(max_num_seqs=8, budget=256)
    request = harness.request(list(range(40)), n=4, max_tokens=3)
    harness.step()
    assert shares(harness.steps[0]) == [40, 8, 8, 8]
    harness.step()
    assert shares(harness.steps[1]) == [1, 1, 1, 1]
    assert harness.manager.num_usable - harness.manager.num_free == 2 + 4
    harness.run()
    for sequence in request.sequences:
        assert harness.tokens[sequence] == [40, 41, 42]
    harness.assert_idle()


def test_a_fork_whose_prefix_is_cached_elsewhere_too_still_runs(make_any_harness):
    """What it holds and what the cache would give it must not take room side by side for ever."""
    harness = make_any_harness(num_blocks=5, max_num_seqs=1)
    prompt = list(range(33))
    request = harness.request(prompt, n=2, max_tokens=2)
    harness.step()
    harness.scheduler.reset_prefix_cache()
    while request.sequences[0] not in harness.finished:
        harness.step()
    harness.request(prompt[:32], max_tokens=1, priority=-1)
    harness.run()
    assert harness.tokens[request.sequences[1]] == [33, 34]
    harness.assert_idle()


def test_logits_without_probabilities_end_the_whole_request_while_it_has_no_output(make_harness):
    harness = make_harness()
    request = harness.request([1, 2, 3], n=4)
    execute = harness.runner.execute

    def fail(batch):
        result = execute(batch)
        result.token_ids[:] = -1
        return result

    harness.runner.execute = fail
    harness.step()
    assert {harness.finished[s].reason for s in request.sequences} == {FinishReason.FINISH_REASON_ERROR}
    harness.assert_idle()


@pytest.mark.parametrize("caching", [True, False])
def test_children_go_on_when_their_leader_is_aborted_in_mid_prompt(make_any_harness, caching):
    harness = make_any_harness(budget=16, caching=caching)
    request = harness.request(list(range(40)), n=3, max_tokens=2)
    harness.step()
    harness.abort(request.sequences[0])
    harness.run()
    assert harness.finished[request.sequences[0]].reason == ABORT
    for sequence in request.sequences[1:]:
        assert harness.tokens[sequence] == [40, 41]
    harness.assert_idle()


def test_waiting_forks_give_their_hold_up_before_anyone_is_preempted_for_ever(make_any_harness):
    harness = make_any_harness(num_blocks=6, block_size=4, max_num_seqs=2)
    request = harness.request(list(range(10)), n=4, max_tokens=8)
    harness.run()
    for sequence in request.sequences:
        assert harness.tokens[sequence] == expected_output([9], 8)
    harness.assert_idle()
