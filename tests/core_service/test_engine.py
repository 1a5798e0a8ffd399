"""The engine's thread with the fake runner: what each client gets, whatever happens."""

import pytest
from engine_client import VOCAB, Client, Gate, request
from google.rpc import code_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.common.errors import Unavailable
from headrace.common.params import ModelLimits
from headrace.common.v1.params_pb2 import FinishReason, SamplingParams
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import AdmissionLimits


def test_each_client_gets_its_own_rows(make_engine):
    engine = make_engine()
    one, two = Client(engine), Client(engine)
    engine.add(one.id, [request(0), request(5, prompt=(50,))])
    engine.add(two.id, [request(0, prompt=(100,))])
    one.wait(0, 5)
    two.wait(0)
    assert one.tokens == {0: [4, 5, 6, 7], 5: [51, 52, 53, 54]}
    assert two.tokens == {0: [101, 102, 103, 104]}


def test_a_bad_request_gets_a_terminal_row_and_its_neighbours_run(make_engine):
    engine = make_engine()
    client = Client(engine)
    engine.add(client.id, [request(0, temperature=-1.0, top_p=0.0), request(1)])
    client.wait(0, 1)
    assert client.finished[0].reason == FinishReason.FINISH_REASON_ERROR
    assert client.finished[0].code == code_pb2.INVALID_ARGUMENT
    assert "sampling.temperature" in client.finished[0].message
    assert "sampling.top_p" in client.finished[0].message
    assert client.tokens == {1: [4, 5, 6, 7]}


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"prompt": ()}, code_pb2.INVALID_ARGUMENT, "prompt_token_ids: must hold at least one token"),
        ({"prompt": (1, 1000)}, code_pb2.INVALID_ARGUMENT, "prompt_token_ids[1]: must be between 0 and 999; got 1000"),
        ({"prompt": (1,) * 512}, code_pb2.INVALID_ARGUMENT, "512 prompt tokens leave no room in max_model_len = 512"),
        ({"prompt": (1,) * 100}, code_pb2.INVALID_ARGUMENT, "do not fit into the KV cache of 64 tokens"),
        ({"top_k": -5}, code_pb2.INVALID_ARGUMENT, "sampling.top_k"),
        ({"logprobs": 21}, code_pb2.INVALID_ARGUMENT, "sampling.logprobs"),
        ({"stop_token_ids": [5000]}, code_pb2.INVALID_ARGUMENT, "sampling.stop_token_ids"),
        ({"stop_token_ids": list(range(300))}, code_pb2.INVALID_ARGUMENT, "at most 256 ids; got 300"),
        (
            {"children": [pb.Child(slot=0, index=3), pb.Child(slot=1, index=3)]},
            code_pb2.INVALID_ARGUMENT,
            "children: must have an index of its own each",
        ),
        ({"presence_penalty": 2.5}, code_pb2.INVALID_ARGUMENT, "sampling.presence_penalty"),
        ({"logit_bias": {5000: 1.0}}, code_pb2.INVALID_ARGUMENT, "sampling.logit_bias"),
        ({"thinking_token_budget": 5}, code_pb2.UNIMPLEMENTED, "sampling.thinking_token_budget"),
    ],
)
def test_what_cannot_run_is_refused_by_name(make_engine, changes, code, says):
    engine = make_engine(num_blocks=5)
    client = Client(engine)
    engine.add(client.id, [request(0, **changes)])
    client.wait(0)
    assert client.finished[0].code == code
    assert says in client.finished[0].message


def test_abort_ends_a_request_once_and_ignores_strangers(make_engine):
    gate = Gate()
    engine = make_engine(gate)
    client, stranger = Client(engine), Client(engine)
    engine.add(client.id, [request(0, max_tokens=None), request(1)])
    gate.steps.release(2)
    client.wait_for_tokens(0)
    engine.abort(stranger.id, [0], ["r0"])
    engine.abort(client.id, [0, 0, 7], ["another", "r0", "r7"])
    engine.abort(client.id, [0], ["r0"])
    gate.open()
    client.wait(0, 1)
    assert client.finished[0].reason == FinishReason.FINISH_REASON_ABORT
    assert client.finished[0].code == code_pb2.CANCELLED
    assert client.finished[1].reason == FinishReason.FINISH_REASON_LENGTH
    assert stranger.messages == []


def test_a_client_that_goes_away_leaves_nothing_behind(make_engine):
    gate = Gate()
    engine = make_engine(gate)
    client, other = Client(engine), Client(engine)
    engine.add(client.id, [request(i, max_tokens=None) for i in range(12)])
    gate.steps.release(3)
    client.wait_for_tokens(0)
    engine.disconnect(client.id)
    engine.add(other.id, [request(0)])
    gate.open()
    other.wait(0)
    assert engine.num_live == 0
    load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, 64)
    assert client.finished == {}


def test_queue_limits_refuse_with_a_delay_but_let_resumed_requests_pass(make_engine):
    gate = Gate()
    engine = make_engine(gate, max_num_seqs=1, max_waiting_requests=2)
    client = Client(engine)
    engine.add(client.id, [request(i) for i in range(4)])
    engine.add(client.id, [request(9, resumes=1)])
    gate.open()
    client.wait(0, 1, 2, 3, 9)
    refused = [slot for slot, record in client.finished.items() if record.code == code_pb2.RESOURCE_EXHAUSTED]
    assert refused == [2, 3]
    assert client.finished[3].retryable
    assert client.finished[3].HasField("retry_delay")


def test_followers_count_as_waiting_and_too_many_children_are_refused_for_good(make_engine):
    gate = Gate()
    engine = make_engine(gate, max_num_seqs=1, max_waiting_requests=4)
    gate.open()
    client = Client(engine)
    four, five = ([pb.Child(slot=first + i, index=i) for i in range(n)] for first, n in ((0, 4), (10, 5)))
    engine.add(client.id, [request(0, children=five, internal_id="five")])
    client.wait(*range(10, 15))
    assert client.finished[10].code == code_pb2.INVALID_ARGUMENT
    assert "sampling.n: must be at most 4" in client.finished[10].message
    gate = engine._runner = Gate()
    engine.add(client.id, [request(0, children=four, internal_id="four"), request(20)])
    gate.open()
    client.wait(*range(4), 20)
    assert client.finished[20].code == code_pb2.RESOURCE_EXHAUSTED


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_number_that_the_contract_can_carry_kills_the_engine(make_engine, data):
    engine = make_engine()
    client = Client(engine)
    unsigned = st.sampled_from([0, 1, 2, 300, 2**31 - 1, 2**31, 2**32 - 1])
    signed = st.sampled_from([-(2**31), -2, -1, 0, 1, 20, 2**31 - 1])
    odd_float = st.sampled_from([0.0, 1.0, 1e30, -1e30, float("nan"), float("inf"), 1e-45])
    sampling = SamplingParams()
    for field in SamplingParams.DESCRIPTOR.fields:
        if data.draw(st.booleans()):
            continue
        values = {
            field.TYPE_UINT32: unsigned,
            field.TYPE_INT32: signed,
            field.TYPE_FLOAT: odd_float,
            field.TYPE_UINT64: st.integers(0, 2**64 - 1),
            field.TYPE_BOOL: st.booleans(),
        }.get(field.type)
        if values is not None and not field.is_repeated:
            setattr(sampling, field.name, data.draw(values))
        elif values is not None:
            getattr(sampling, field.name).extend(data.draw(st.lists(values, max_size=3)))
    message = pb.EngineCoreRequest(
        internal_id="r",
        prompt_token_ids=data.draw(st.lists(unsigned, max_size=3)),
        eos_token_ids=data.draw(st.lists(unsigned, max_size=2)),
        sampling=sampling,
        children=[pb.Child(slot=0, index=data.draw(unsigned), seed=2**64 - 1)],
        priority=data.draw(signed),
        resumes=data.draw(unsigned),
    )
    message.age.seconds = data.draw(st.sampled_from([0, -5, 315_576_000_000]))
    if data.draw(st.booleans()):
        message.timeout.seconds = data.draw(st.sampled_from([0, 1, 315_576_000_000]))
    engine.add(client.id, [message])
    client.wait(0)
    assert engine.alive


def test_draining_refuses_what_is_new_and_finishes_what_runs(make_engine):
    gate = Gate()
    engine = make_engine(gate)
    client = Client(engine)
    engine.add(client.id, [request(0)])
    engine.refuse_new(Unavailable("draining"))
    engine.add(client.id, [request(1)])
    gate.open()
    client.wait(0, 1)
    assert client.finished[0].reason == FinishReason.FINISH_REASON_LENGTH
    assert client.finished[1].code == code_pb2.UNAVAILABLE
    assert client.finished[1].retryable


def test_what_the_core_cuts_at_its_end_is_unavailable_not_cancelled(make_engine):
    gate = Gate()
    engine = make_engine(gate)
    client = Client(engine)
    engine.add(client.id, [request(0, max_tokens=None)])
    gate.steps.release(1)
    client.wait_for_tokens(0)
    engine.abort_all("going away")
    gate.open()
    client.wait(0)
    assert client.finished[0].reason == FinishReason.FINISH_REASON_ABORT
    assert client.finished[0].code == code_pb2.UNAVAILABLE


def test_logprobs_and_prompt_logprobs_reach_their_slots(make_engine):
    engine = make_engine()
    client = Client(engine)
    engine.add(
        client.id, [request(0), request(3, prompt=tuple(range(20)), logprobs=2, prompt_logprobs=1, max_tokens=2)]
    )
    client.wait(0, 3)
    rows = [
        (m.logprobs.slots[i], m.logprobs.positions[i], m.logprobs.token_ids[m.logprobs.offsets[i]])
        for m in client.messages
        for i in range(len(m.logprobs.slots))
    ]
    assert rows == [(3, 0, 20), (3, 1, 21)]
    prompt_rows = [
        (m.prompt_logprobs.positions[i], m.prompt_logprobs.token_ids[m.prompt_logprobs.offsets[i]])
        for m in client.messages
        for i in range(len(m.prompt_logprobs.slots))
    ]
    assert prompt_rows == [(i, i) for i in range(1, 20)]


def test_long_logprobs_are_split_or_become_blobs(make_engine):
    engine = make_engine()
    blobs = engine._blobs
    engine._limits = AdmissionLimits(ModelLimits(VOCAB, 512, VOCAB), 1024)
    client = Client(engine)
    engine.add(client.id, [request(0, prompt=tuple(range(200)), prompt_logprobs=900, max_tokens=1)])
    client.wait(0)
    seen: list[int] = []
    for message in client.messages:
        parts = [message.prompt_logprobs]
        parts += [pb.LogprobColumns.FromString(blobs.get(d)) for d in message.prompt_logprobs.blob_digests]
        for part in parts:
            seen.extend(part.positions)
    assert seen == list(range(1, 200))
    assert sum(message.HasField("prompt_logprobs") for message in client.messages) > 1


def test_timing_and_counts_are_told_at_the_end(make_engine):
    engine = make_engine()
    client = Client(engine)
    engine.add(client.id, [request(0, prompt=tuple(range(40)))])
    client.wait(0)
    engine.add(client.id, [request(1, prompt=tuple(range(40)), age=2.0)])
    client.wait(1)
    assert client.finished[1].cached_tokens == 32
    assert client.finished[1].timing.HasField("decode")
    assert engine.load().output_tokens == 8
