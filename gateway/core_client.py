"""What the gateway needs of a core, whatever lies between them: the seam of `RemoteCore` and of an in-process core.

A request goes in with one sink per child; tokens, log-probabilities and one terminal row per child come back through
the sinks, on the event loop's thread.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.common.errors import RequestError
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway_api.v1 import models_pb2


class LogprobRow(NamedTuple):
    """Log-probabilities at one position: the sampled (or actual) token first, then the others."""

    token_ids: Sequence[int]
    values: Sequence[float]  # natural logarithms
    ranks: Sequence[int]  # 1 is the most likely


class CompletionSink(Protocol):
    """Takes what a core produces for one completion. No method blocks or raises."""

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        """New output tokens, in order; their log-probabilities, if asked for, came before or come later by blob."""

    def on_logprobs(self, position: int, row: LogprobRow) -> None:
        """Log-probabilities of the token at an output position."""

    def on_prompt_logprobs(self, position: int, row: LogprobRow) -> None:
        """Log-probabilities of the prompt token at a position from 1 on; only the first child gets them."""

    def on_finished(self, finished: core_pb.Finished) -> None:
        """The one terminal row; nothing but late log-probabilities comes after it."""

    def on_logprobs_lost(self, error: RequestError) -> None:
        """Log-probabilities that were to come by blob will not come; of no concern to who waits for none."""

    def on_failed(self, error: RequestError) -> None:
        """The core, or the way to it, was lost: there will be no terminal row."""


class Submission(Protocol):
    """A request that a core has taken."""

    def abort(self, child: int) -> None:
        """Stops the completion at this place among the request's children; its terminal row still comes."""


class CoreClient(Protocol):
    """One core. `state` and `stats` are as fresh as the last message from it."""

    @property
    def address(self) -> str:
        """Where the core is; its name in logs and in GetLoad."""

    @property
    def state(self) -> models_pb2.CoreState.ValueType:
        """Whether it takes requests."""

    @property
    def info(self) -> core_pb.CoreInfo | None:
        """Its facts; None before the first Welcome."""

    @property
    def stats(self) -> core_pb.SchedulerStats:
        """State of its scheduler."""

    @property
    def live_completions(self) -> int:
        """Completions of this gateway that have no terminal row yet."""

    async def submit(self, request: core_pb.EngineCoreRequest, sinks: Sequence[CompletionSink]) -> Submission:
        """Hands a request over, one sink per child; fills in the children's slots. Raises Unavailable if it cannot."""

    async def load(self) -> core_pb.SchedulerStats:
        """The scheduler's state now; the last known one if the core does not answer in time."""
