"""Requests with a grammar: held while it is compiled, masked in every draw, ended when nothing may follow."""

from concurrent.futures import Future

import numpy as np
import pytest
from google.rpc import code_pb2

from headrace.common.errors import InvalidRequest, Violation
from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.request import SequenceState


class CountingGrammar:
    """Allows `most` tokens, none of which may be `forbidden`."""

    def __init__(self, most, forbidden, taken):
        self.most, self.forbidden, self.taken = most, forbidden, taken

    @property
    def exhausted(self):
        return self.taken >= self.most

    def accept(self, token):
        self.taken += 1
        return token != self.forbidden


class Compiled:
    def __init__(self, most=100, forbidden=None, refuses=False):
        self.most, self.forbidden, self.refuses = most, forbidden, refuses
        self.started: list[CountingGrammar] = []

    def start(self, output):
        if self.refuses:
            raise InvalidRequest([Violation("generated_token_ids", "do not fit the grammar")])
        self.started.append(CountingGrammar(self.most, self.forbidden, len(output)))
        return self.started[-1]


class Masks:
    def __init__(self, rows):
        self.rows = rows

    def wait(self):
        return np.full((len(self.rows), 32), -1, np.int32)


class Backend:
    """Remembers which places had how many tokens when masks were asked for."""

    def __init__(self):
        self.asked: list[list[int]] = []

    def compile(self, constraint, after, eos_token_ids):
        return Future()

    def begin_masks(self, rows, grammars):
        self.asked.append([grammar.taken for grammar in grammars])
        return Masks(rows)

    def close(self):
        pass


@pytest.fixture
def harness(make_any_harness):
    return make_any_harness(grammars=Backend(), budget=32)


def ready(harness, request, compiled):
    outputs = EngineOutputs()
    harness.scheduler.grammar_ready(request, compiled, outputs)
    harness._record(outputs)


def test_a_request_does_not_run_before_its_grammar_is_compiled_and_holds_nobody_up(harness):
    waits = harness.request([1], max_tokens=3, awaits_grammar=True)
    other = harness.request([50], max_tokens=3)
    harness.run()
    assert harness.tokens[other.sequences[0]] == [51, 52, 53]
    assert (waits.sequences[0].state, harness.scheduler.num_waiting) == (SequenceState.HELD, 1)
    ready(harness, waits, Compiled())
    harness.run()
    assert harness.tokens[waits.sequences[0]] == [2, 3, 4]
    harness.assert_idle()


def test_masks_are_asked_for_with_every_earlier_token_accepted(harness):
    request = harness.request([1], max_tokens=4, awaits_grammar=True)
    ready(harness, request, Compiled())
    harness.run()
    assert harness.scheduler._grammars.asked == [[0], [1], [2], [3]]


def test_children_have_a_place_each_in_one_grammar(harness):
    request = harness.request([1], n=3, max_tokens=4, awaits_grammar=True)
    compiled = Compiled()
    ready(harness, request, compiled)
    harness.run()
    assert [grammar.taken for grammar in compiled.started] == [4, 4, 4]
    harness.assert_idle()


def test_a_grammar_that_does_not_compile_ends_only_its_request(harness):
    bad = harness.request([1], n=2, awaits_grammar=True)
    good = harness.request([50], max_tokens=2)
    harness.step()
    outputs = EngineOutputs()
    error = InvalidRequest([Violation("sampling.structured_outputs.regex", "does not compile")])
    harness.scheduler.grammar_failed(bad, error, outputs)
    harness._record(outputs)
    harness.run()
    for sequence in bad.sequences:
        assert harness.finished[sequence].reason == FinishReason.FINISH_REASON_ERROR
        assert harness.finished[sequence].code == code_pb2.INVALID_ARGUMENT
        assert "sampling.structured_outputs.regex" in harness.finished[sequence].message
    assert harness.tokens[good.sequences[0]] == [51, 52]
    harness.assert_idle()


def test_generated_tokens_that_do_not_fit_end_the_request(harness):
    request = harness.request([1], output=(5,), awaits_grammar=True)
    ready(harness, request, Compiled(refuses=True))
    assert harness.finished[request.sequences[0]].code == code_pb2.INVALID_ARGUMENT
    harness.assert_idle()


def test_a_token_outside_the_grammar_ends_only_that_sequence_with_an_error(harness):
    bad = harness.request([1], max_tokens=9, awaits_grammar=True)
    good = harness.request([50], max_tokens=9, awaits_grammar=True)
    ready(harness, bad, Compiled(forbidden=3))
    ready(harness, good, Compiled(forbidden=3))
    harness.run()
    assert harness.finished[bad.sequences[0]].reason == FinishReason.FINISH_REASON_ERROR
    assert "grammar" in harness.finished[bad.sequences[0]].message
    assert len(harness.tokens[good.sequences[0]]) == 9
    harness.assert_idle()


def test_a_complete_grammar_stops_the_output_though_no_stop_token_came(harness):
    request = harness.request([1], max_tokens=9, ignore_eos=True, awaits_grammar=True)
    ready(harness, request, Compiled(most=3))
    harness.run()
    assert harness.tokens[request.sequences[0]] == [2, 3, 4]
    assert harness.finished[request.sequences[0]].reason == FinishReason.FINISH_REASON_STOP
    harness.assert_idle()


def test_preemption_keeps_the_place_in_the_grammar(make_any_harness):
    harness = make_any_harness(grammars=Backend(), num_blocks=6, budget=128)
    requests = [harness.request(list(range(s, s + 32)), max_tokens=24, awaits_grammar=True) for s in (0, 100)]
    compiled = Compiled()
    for request in requests:
        ready(harness, request, compiled)
    harness.run()
    assert requests[1].sequences[0].preemptions
    assert [grammar.taken for grammar in compiled.started] == [24, 24]
    harness.assert_idle()


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_abort_while_waiting_for_a_grammar_leaves_the_siblings_waiting(harness, aborted):
    request = harness.request([1], n=3, max_tokens=2, awaits_grammar=True)
    harness.abort(request.sequences[aborted])
    harness.step()
    compiled = Compiled()
    ready(harness, request, compiled)
    harness.run()
    assert len(compiled.started) == 2
    assert harness.finished[request.sequences[aborted]].reason == FinishReason.FINISH_REASON_ABORT
    for i, sequence in enumerate(request.sequences):
        assert harness.tokens[sequence] == ([] if i == aborted else [2, 3])
    harness.assert_idle()


def test_a_deadline_passes_while_waiting_for_a_grammar(harness):
    request = harness.request([1], deadline=3.0, awaits_grammar=True)
    assert harness.scheduler.next_expiry == 3.0
    for _ in range(4):
        harness.step()
    assert harness.finished[request.sequences[0]].reason == FinishReason.FINISH_REASON_DEADLINE
    ready(harness, request, Compiled())
    harness.assert_idle()


def test_tokens_that_wait_for_a_grammar_count_as_waiting(harness):
    waits = harness.request([1] * 20, max_tokens=1, n=2, awaits_grammar=True)
    aborted = harness.request([2] * 30, max_tokens=1, awaits_grammar=True)
    assert harness.scheduler.num_waiting_tokens == 50
    harness.abort(aborted.sequences[0])
    ready(harness, aborted, Compiled())  # too late
    harness.abort(waits.sequences[0])
    assert harness.scheduler.num_waiting_tokens == 20
    ready(harness, waits, Compiled())
    assert harness.scheduler.num_waiting_tokens == 20
    harness.run()
    assert harness.scheduler.num_waiting_tokens == 0
    harness.assert_idle()
