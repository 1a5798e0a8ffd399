"""Speaks to an engine as the service does, with a runner that can be held."""

import threading
from collections.abc import Iterable
from typing import Any

from headrace.common.params_wire import duration
from headrace.common.v1.params_pb2 import SamplingParams
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.batch import ScheduledBatch, StepResult
from headrace.core_service.engine import Engine
from headrace.core_service.fakes import FakeRunner

VOCAB, BLOCK = 1000, 16


class Client:
    """Collects what its sink gets."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, pb.Finished] = {}
        self.messages: list[pb.StepOutputs] = []
        self._news = threading.Condition()
        self.id = engine.connect(self._take)

    def _take(self, response: pb.ConnectResponse) -> None:
        assert response.ByteSize() <= 256 * 1024
        message = response.step
        with self._news:
            self.messages.append(message)
            for slot, token in zip(message.slots, message.token_ids, strict=True):
                assert slot not in self.finished, "a token after the terminal row"
                self.tokens.setdefault(slot, []).append(token)
            for record in message.finished:
                assert record.slot not in self.finished, "two terminal rows"
                self.finished[record.slot] = record
            self._news.notify_all()

    def wait(self, *slots: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: all(s in self.finished for s in slots), 20), self.finished

    def wait_for_tokens(self, slot: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.tokens.get(slot), 20)


def request(
    slot: int,
    prompt: Iterable[int] = (1, 2, 3),
    internal_id: str | None = None,
    children: list[pb.Child] | None = None,
    age: float = 0.0,
    resumes: int = 0,
    **sampling: Any,
) -> pb.EngineCoreRequest:
    sampling = {"temperature": 0.0, "max_tokens": 4, **sampling}
    if sampling.get("max_tokens") is None:
        sampling.pop("max_tokens")
        sampling["until_context"] = True
    message = pb.EngineCoreRequest(
        internal_id=internal_id or f"r{slot}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        children=children or [pb.Child(slot=slot)],
        resumes=resumes,
    )
    message.age.CopyFrom(duration(age))
    return message


class Gate:
    """Lets the fake runner take steps only when told to."""

    def __init__(self) -> None:
        self.runner = FakeRunner(VOCAB, BLOCK)
        self.steps = threading.Semaphore(0)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        assert self.steps.acquire(timeout=20)
        return self.runner.execute(batch)

    def open(self) -> None:
        self.steps.release(100_000)
