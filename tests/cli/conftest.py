"""A small deterministic gateway that the command line is tested against."""

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from headrace.common import rpc_status
from headrace.common.errors import InvalidRequest, NotFound, RequestError, Unimplemented, Violation
from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb
from headrace.gateway_api.v1 import generation_pb2_grpc, models_pb2, models_pb2_grpc

VOCAB_SIZE = 1000


def word(token_id: int) -> str:
    """The text of a token of the fake model."""
    return f" w{token_id}"


def candidates(token_id: int, count: int) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        candidates=[
            pb.TokenLogprobs.Candidate(
                token_id=token_id + i, token_bytes=word(token_id + i).encode(), logprob=-0.5 - i, rank=i + 1
            )
            for i in range(count + 1)
        ]
    )


@dataclass
class FakeGateway(generation_pb2_grpc.GenerationServiceServicer, models_pb2_grpc.ModelServiceServicer):
    """Output i of completion c is the number of prompt tokens + 10 c + i; text prompts have one token a word."""

    address: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    health: HealthServicer = field(default_factory=HealthServicer)
    stall: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request, context):
        self.requests.append(request)
        ids = self._prompt_ids(request, context)
        kind = request.output_kind or pb.OUTPUT_KIND_DELTA
        max_tokens = request.sampling.max_tokens or 16
        n = request.sampling.n or 1
        if ids[-1:] == [777]:
            # Before the first message: once the call is over, this generator is not asked for another.
            context.add_callback(self.cancelled.set)
        outputs = [[len(ids) + 10 * c + i for i in range(max_tokens)] for c in range(n)]
        if request.sampling.HasField("prompt_logprobs"):
            wanted = request.sampling.prompt_logprobs
            rows = [pb.TokenLogprobs(), *(candidates(token_id, wanted) for token_id in ids[1:])]
            yield pb.GenerateResponse(prompt_logprobs=rows[:2])
            yield pb.GenerateResponse(prompt_logprobs=rows[2:])
        for step in range(max_tokens):
            last = step == max_tokens - 1
            if kind == pb.OUTPUT_KIND_FINAL_ONLY and not last:
                continue
            first = step if kind == pb.OUTPUT_KIND_DELTA else 0
            yield pb.GenerateResponse(
                outputs=[self._news(request, c, outputs[c], first, step + 1, last) for c in range(n)],
                usage=pb.Usage(prompt_tokens=len(ids), cached_tokens=1, output_tokens=n * max_tokens) if last else None,
            )
            if ids[-1:] == [666]:
                _abort(context, InvalidRequest([Violation("prompt", "broke in mid-stream")]))
            if ids[-1:] == [777]:
                self.stall.wait(30)

    def _news(self, request, index, ids, first, end, last):
        news = ids[first:end]
        output = pb.CompletionOutput(
            index=index, text="".join(map(word, news)), token_ids=news, token_offset=first, seed=5
        )
        if request.sampling.HasField("logprobs"):
            output.logprobs.extend(candidates(token_id, request.sampling.logprobs) for token_id in news)
        if last and request.sampling.stop_token_ids:
            output.finish_reason = params_pb2.FINISH_REASON_STOP
            output.stop_token_id = request.sampling.stop_token_ids[0]
        elif last and request.text_options.stop:
            output.finish_reason = params_pb2.FINISH_REASON_STOP
            output.stop_text = request.text_options.stop[0]
        elif last:
            output.finish_reason = params_pb2.FINISH_REASON_LENGTH
        return output

    def _prompt_ids(self, request, context):
        if request.model not in ("", "fake"):
            _abort(context, NotFound(f"no model {request.model}"))
        violations = []
        if request.sampling.HasField("temperature") and not 0 <= request.sampling.temperature <= 2:
            violations.append(Violation("sampling.temperature", "must be between 0 and 2"))
        form = request.prompt.WhichOneof("form")
        if form == "text":
            ids = list(range(len(request.prompt.text.split())))
        elif form == "token_ids":
            ids = list(request.prompt.token_ids.ids)
        else:
            ids = list(range(len(request.prompt.chat.messages)))
        if not ids:
            violations.append(Violation("prompt", "must not be empty"))
        if any(message.content == "too long" for message in request.prompt.chat.messages):
            violations.append(Violation("prompt", "too long"))
        if violations:
            _abort(context, InvalidRequest(violations))
        return ids

    def Tokenize(self, request, context):
        if request.prompt.WhichOneof("form") == "chat":
            return pb.TokenizeResponse(token_ids=[7, 8], rendered="<chat>")
        first = [0] if request.add_special_tokens else []
        return pb.TokenizeResponse(token_ids=[*first, *(len(text) for text in request.prompt.text.split())])

    def Detokenize(self, request, context):
        return pb.DetokenizeResponse(text="".join(map(word, request.token_ids)))

    def GetModel(self, request, context):
        if request.name not in ("", "fake"):
            _abort(context, NotFound(f"no model {request.name}"))
        return models_pb2.GetModelResponse(model=models_pb2.Model(name="fake", vocab_size=VOCAB_SIZE))

    def ListModels(self, request, context):
        return models_pb2.ListModelsResponse(models=[models_pb2.Model(name="fake", vocab_size=VOCAB_SIZE)])

    def Embed(self, request, context):
        _abort(context, Unimplemented("the fake model generates only"))

    Classify = Score = Embed

    def GetLoad(self, request, context):
        core = models_pb2.CoreLoad(
            address="core:1", state=models_pb2.CORE_STATE_SERVING, running=2, waiting=1, free_blocks=5, num_blocks=9
        )
        return models_pb2.GetLoadResponse(cores=[core], live_requests=3)


def _abort(context: grpc.ServicerContext, error: RequestError) -> None:
    context.set_trailing_metadata(rpc_status.trailing_metadata(error))
    context.abort(error.code, error.message)


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """A fake gateway that listens on a port of loopback."""
    fake = FakeGateway()
    server = grpc.server(futures.ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    models_pb2_grpc.add_ModelServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    fake.stall.set()
    server.stop(0).wait()


def wait_until(condition, timeout_s: float = 20.0) -> None:
    """Waits for the condition; the bound only ends a test that would hang."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.02)


@pytest.fixture(name="wait_until")
def wait_until_fixture():
    return wait_until
