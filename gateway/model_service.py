"""ModelService: what this gateway serves, and how busy its cores are."""

import asyncio
from typing import Any

import grpc

from headrace.common.errors import InvalidRequest, Unavailable
from headrace.common.params_wire import sampling_to_wire
from headrace.gateway.core_client import CoreClient
from headrace.gateway.live_requests import LiveRequests
from headrace.gateway.model_catalog import ModelCatalog
from headrace.gateway.router import Router
from headrace.gateway.served_model import ServedModel
from headrace.gateway.unknown_fields import unknown_fields
from headrace.gateway_api.v1 import models_pb2 as pb
from headrace.gateway_api.v1.models_pb2_grpc import ModelServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class ModelService(ModelServiceServicer):
    """Facts about the model, and load by core."""

    def __init__(self, models: ModelCatalog, router: Router, live: LiveRequests, max_message_bytes: int) -> None:
        self._models = models
        self._router = router
        self._live = live
        self._max_message_bytes = max_message_bytes

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The one model, or none before the first core has answered."""
        try:
            model = self._models.resolve("")
        except Unavailable:
            return pb.ListModelsResponse()
        return pb.ListModelsResponse(models=[self._describe(model)])

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Facts and limits of a model."""
        if violations := unknown_fields(request):
            raise InvalidRequest(violations)
        return pb.GetModelResponse(model=self._describe(self._models.resolve(request.name)))

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Asks all cores at once."""
        cores = await asyncio.gather(*(_core_load(core) for core in self._router.cores))
        return pb.GetLoadResponse(cores=cores, live_requests=len(self._live))

    def _describe(self, model: ServedModel) -> pb.Model:
        return pb.Model(
            name=model.name,
            max_model_len=model.limits.max_model_len,
            tasks=["generate"] if "generate" in model.info.tasks else [],
            vocab_size=model.limits.vocab_size,
            tokenizer_digest=model.info.tokenizer_digest,
            default_sampling=sampling_to_wire(model.default_sampling),
            limits=pb.RequestLimits(max_message_bytes=self._max_message_bytes),
            labels=model.info.labels,
        )


async def _core_load(core: CoreClient) -> pb.CoreLoad:
    stats, info = await core.load(), core.info
    return pb.CoreLoad(
        address=core.address,
        state=core.state,
        running=stats.running,
        waiting=stats.waiting,
        free_blocks=stats.free_blocks,
        num_blocks=info.num_blocks if info else 0,
        numerics_id=info.numerics_id if info else "",
    )
