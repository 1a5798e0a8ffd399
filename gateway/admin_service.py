"""AdminService: in the contract, not built yet."""

from typing import Any

import grpc

from headrace.gateway.unimplemented import unimplemented_call
from headrace.gateway_api.v1 import admin_pb2 as pb
from headrace.gateway_api.v1.admin_pb2_grpc import AdminServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class AdminService(AdminServiceServicer):
    """Refuses every call by name."""

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Not built."""
        raise unimplemented_call("LoadAdapter")

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Not built."""
        raise unimplemented_call("UnloadAdapter")

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:
        """Not built."""
        raise unimplemented_call("UpdateWeights")

    async def FlushPrefixCache(
        self,
        request: pb.FlushPrefixCacheRequest,
        context: Context,
    ) -> pb.FlushPrefixCacheResponse:
        """Not built."""
        raise unimplemented_call("FlushPrefixCache")

    async def DrainCore(self, request: pb.DrainCoreRequest, context: Context) -> pb.DrainCoreResponse:
        """Not built."""
        raise unimplemented_call("DrainCore")
