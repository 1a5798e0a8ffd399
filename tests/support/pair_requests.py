"""Requests to a running pair, and what must hold once they are over."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
from gateway_harness import Client, Outcome
from google.rpc import error_details_pb2, status_pb2

from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb
from headrace.gateway_api.v1 import models_pb2

PATIENCE_S = 120  # ends a test that would hang; on a busy machine a step can take a second


class PairClient(Client):
    """Waits for a real model, which takes longer than a fake one."""

    async def generate(self, request: pb.GenerateRequest, deadline_s: float = PATIENCE_S) -> Outcome:
        return await super().generate(request, deadline_s)


def make_request(
    prompt: str | Sequence[int] | pb.Prompt,
    *,
    kind: pb.OutputKind.ValueType = pb.OUTPUT_KIND_DELTA,
    stop: Sequence[str] = (),
    **sampling: Any,
) -> pb.GenerateRequest:
    """Greedy unless `sampling` says otherwise; the prompt is text, token ids or a message."""
    if isinstance(prompt, str):
        prompt = pb.Prompt(text=prompt)
    elif not isinstance(prompt, pb.Prompt):
        prompt = pb.Prompt(token_ids=pb.TokenIds(ids=prompt))
    return pb.GenerateRequest(
        prompt=prompt,
        sampling=params_pb2.SamplingParams(**({"temperature": 0.0} | sampling)),
        text_options=pb.TextOptions(stop=stop),
        output_kind=kind,
    )


def whole_text(outcome: Outcome, kind: pb.OutputKind.ValueType, index: int = 0) -> str:
    """All text of a completion, whatever each message carried."""
    return outcome.text(index) if kind == pb.OUTPUT_KIND_DELTA else outcome.last(index).text


def whole_ids(outcome: Outcome, kind: pb.OutputKind.ValueType, index: int = 0) -> list[int]:
    """All token ids of a completion."""
    return outcome.token_ids(index) if kind == pb.OUTPUT_KIND_DELTA else list(outcome.last(index).token_ids)


def violated_fields(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Field and description of every violation in the error's BadRequest detail."""
    fields: dict[str, str] = {}
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                bad = error_details_pb2.BadRequest()
                if detail.Unpack(bad):
                    fields |= {violation.field: violation.description for violation in bad.field_violations}
    return fields


def is_idle(load: models_pb2.GetLoadResponse) -> bool:
    """True if nothing runs or waits anywhere, and every block of every core is free."""
    return load.live_requests == 0 and all(
        core.running == core.waiting == 0 and core.free_blocks == core.num_blocks > 0 for core in load.cores
    )


async def wait_until_idle(client: Client, timeout_s: float = PATIENCE_S) -> float:
    """Seconds until `is_idle`; fails with the last load if that takes too long."""
    started = time.monotonic()
    while not is_idle(load := await client.load()):
        assert time.monotonic() - started < timeout_s, f"not idle after {timeout_s} s: {load}"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def wait_until_accepted(client: Client, count: int) -> None:
    """Waits until the gateway serves so many requests, whether or not a core has begun with them."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.load()).live_requests < count:
            await asyncio.sleep(0.005)


async def wait_until_running(client: Client, count: int) -> None:
    """Waits until so many completions run in the cores."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(core.running for core in (await client.load()).cores) < count:
            await asyncio.sleep(0.01)
