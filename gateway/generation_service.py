"""GenerationService: each call names the hops of a request in order; the work is in the modules named."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.common.errors import Overloaded
from headrace.gateway.input_processor import Arrival, InputProcessor
from headrace.gateway.live_requests import LiveRequests
from headrace.gateway.model_catalog import ModelCatalog
from headrace.gateway.request_log import RequestLog
from headrace.gateway.request_stream import RequestStream
from headrace.gateway.router import Router
from headrace.gateway.unimplemented import unimplemented_call
from headrace.gateway_api.v1 import generation_pb2 as pb
from headrace.gateway_api.v1.generation_pb2_grpc import GenerationServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """How much output a client may leave unread, in seconds and in bytes (about; see request_stream)."""

    slow_reader_timeout_s: float
    max_unsent_bytes: int


class GenerationService(GenerationServiceServicer):
    """Text in, text out."""

    def __init__(
        self, models: ModelCatalog, inputs: InputProcessor, router: Router, live: LiveRequests, limits: OutputLimits
    ) -> None:
        self._models = models
        self._inputs = inputs
        self._router = router
        self._live = live
        self._limits = limits

    # A coroutine that writes, not a generator that yields: when the client goes away, the finally block below runs at
    # once, where a generator would be left suspended until it is collected.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Validate, tokenize, route, submit, and stream what comes back."""
        arrival = Arrival.now(context.time_remaining())
        with self._live.enter(request.request_id) as request_id, RequestLog(request_id, arrival) as request_log:
            model = self._models.resolve(request.model)
            prepared = await self._inputs.prepare(request, request_id, model, arrival)
            core = self._router.pick(prepared.session_id)
            stream = RequestStream(prepared, core.info.numerics_id if core.info else "", self._limits.max_unsent_bytes)
            request_log.follow(stream, core.address)
            self._live.attach(request_id, stream)
            try:
                stream.attach(await core.submit(prepared.engine_request, stream.completions))
                async for message in stream.messages():
                    await self._write(context, message)
            finally:
                stream.close()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text or chat to ids."""
        model = self._models.resolve(request.model)
        prompt = await self._inputs.tokenize(request, model)
        return pb.TokenizeResponse(
            token_ids=prompt.token_ids, rendered=prompt.rendered, max_model_len=model.limits.max_model_len
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Ids to text."""
        model = self._models.resolve(request.model)
        return pb.DetokenizeResponse(text=await self._inputs.detokenize(request, model))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Not built."""
        raise unimplemented_call("Embed")

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """Not built."""
        raise unimplemented_call("Classify")

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Not built."""
        raise unimplemented_call("Score")

    async def _write(self, context: Context, message: pb.GenerateResponse) -> None:
        limit_s = self._limits.slow_reader_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await context.write(message)
        except TimeoutError:
            raise Overloaded(f"the client has not read its stream for {limit_s:g} s", reason="SLOW_READER") from None
