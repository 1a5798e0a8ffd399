"""What ends the engine, loudly, and what must not."""

import threading
from concurrent.futures import Future

import pytest
import structlog
from engine_client import BLOCK, VOCAB, Client, Gate, request

from headrace.common.errors import EngineDeadError
from headrace.common.params import ModelLimits
from headrace.core_service.admission import AdmissionLimits
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.engine import Engine
from headrace.core_service.fakes import FakeRunner
from headrace.core_service.scheduler import Scheduler


def test_a_runner_that_raises_kills_the_engine_loudly():
    class Broken:
        def execute(self, batch):
            raise ValueError("boom")

    scheduler = Scheduler(BlockManager(8, BLOCK), SchedulerConfig(2, 64))
    engine = Engine(scheduler, Broken(), AdmissionLimits(ModelLimits(VOCAB, 64, 5), 112), BlobStore(1 << 20))
    died = threading.Event()
    engine.start(on_death=died.set)
    engine.add(engine.connect(lambda _: None), [request(0)])
    assert died.wait(10)
    assert not engine.healthy
    with pytest.raises(EngineDeadError):
        engine.connect(lambda _: None)


@pytest.mark.parametrize("checks", [True, False])
def test_a_block_that_went_astray_kills_an_engine_that_checks_when_idle(checks):
    blocks = BlockManager(8, BLOCK)
    engine = Engine(
        Scheduler(blocks, SchedulerConfig(2, 64)),
        FakeRunner(VOCAB, BLOCK),
        AdmissionLimits(ModelLimits(VOCAB, 64, 5), 112),
        BlobStore(1 << 20),
        check_when_idle=checks,
    )
    blocks.allocate(1)  # by nobody that the scheduler knows
    client, died = Client(engine), threading.Event()
    engine.add(client.id, [request(0)])
    with structlog.testing.capture_logs() as lines:
        engine.start(on_death=died.set)
        if checks:
            assert died.wait(10)
            assert "1 references, but 0 holders" in str(lines[0]["exc_info"])
            assert not engine.healthy
        else:
            client.wait(0)
            engine.stop()


class NeverCompiles:
    """A grammar backend whose futures stay as they are."""

    def __init__(self):
        self.compiling = []

    def compile(self, constraint, after, eos_token_ids):
        self.compiling.append(Future())
        return self.compiling[-1]

    def close(self):
        pass


def constrained(slot, **fields):
    message = request(slot, **fields)
    message.sampling.structured_outputs.json_object = True
    return message


def test_a_deadline_in_centuries_does_not_kill_an_engine_that_waits_for_a_grammar(make_engine):
    engine = make_engine(grammars=NeverCompiles())
    client = Client(engine)
    message = constrained(0)
    message.timeout.seconds = 315_000_000_000
    engine.add(client.id, [message])
    engine.add(client.id, [request(1)])
    client.wait(1)
    engine.abort(client.id, [0], ["r0"])
    client.wait(0)
    assert engine.alive


def test_a_request_that_ends_while_its_grammar_is_compiled_takes_the_compilation_with_it(make_engine):
    grammars = NeverCompiles()
    engine = make_engine(grammars=grammars)
    client = Client(engine)
    engine.add(client.id, [constrained(0), constrained(1)])
    engine.abort(client.id, [0], ["r0"])
    client.wait(0)
    engine.check_integrity().result(10)
    assert [future.cancelled() for future in grammars.compiling] == [True, False]
    engine.disconnect(client.id)


def test_who_gives_up_waiting_for_an_answer_does_not_kill_the_engine(make_engine):
    gate = Gate()
    engine = make_engine(gate)
    client = Client(engine)
    engine.add(client.id, [request(0)])
    calls = [engine.reset_prefix_cache() for _ in range(3)]
    for call in calls:
        call.cancel()
    gate.open()
    client.wait(0)
    assert engine.reset_prefix_cache().result(10) >= 0


def test_calls_to_an_engine_that_dies_fail():
    scheduler = Scheduler(BlockManager(8, BLOCK), SchedulerConfig(2, 64))
    limits = AdmissionLimits(ModelLimits(VOCAB, 64, 5), 112)
    engine = Engine(scheduler, FakeRunner(VOCAB, BLOCK), limits, BlobStore(1 << 20))
    go_on = threading.Event()

    def die(_):
        go_on.wait(10)
        raise ValueError("boom")

    engine._put(die)
    waiting = [engine.check_integrity() for _ in range(3)]
    engine.start(on_death=lambda: None)
    go_on.set()
    for call in waiting:
        with pytest.raises(EngineDeadError):
            call.result(10)
