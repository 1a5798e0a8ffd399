"""Payloads too big for the data path, by SHA-256 digest over the core's PutBlob and GetBlob."""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.common.errors import InternalError
from headrace.core_api.v1 import engine_core_pb2 as core_pb

if TYPE_CHECKING:  # it exists for type checkers only
    from headrace.core_api.v1.engine_core_pb2_grpc import EngineCoreServiceAsyncStub

CHUNK_BYTES = 256 * 1024
BLOB_TIMEOUT_S = 30.0


async def put_blob(stub: "EngineCoreServiceAsyncStub", payload: bytes) -> str:
    """Stores the payload at the core and returns its digest. Raises grpc.aio.AioRpcError."""
    digest = hashlib.sha256(payload).hexdigest()
    await stub.PutBlob(_chunks(payload, digest), timeout=BLOB_TIMEOUT_S)
    return digest


async def get_blob(stub: "EngineCoreServiceAsyncStub", digest: str) -> bytes:
    """Reads a payload. Raises InternalError if its bytes are not those of the digest, or grpc.aio.AioRpcError."""
    call = stub.GetBlob(core_pb.GetBlobRequest(digest=digest), timeout=BLOB_TIMEOUT_S)
    payload = b"".join([piece.data async for piece in call])
    if hashlib.sha256(payload).hexdigest() != digest:
        raise InternalError(f"the core's blob {digest} came with other bytes")
    return payload


def _chunks(payload: bytes, digest: str) -> Iterator[core_pb.PutBlobRequest]:
    yield core_pb.PutBlobRequest(digest=digest, size_bytes=len(payload), data=payload[:CHUNK_BYTES])
    for start in range(CHUNK_BYTES, len(payload), CHUNK_BYTES):
        yield core_pb.PutBlobRequest(data=payload[start : start + CHUNK_BYTES])
