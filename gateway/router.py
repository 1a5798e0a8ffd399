"""Which core serves a request."""

import zlib
from collections.abc import Sequence

from headrace.common.errors import Unavailable
from headrace.gateway.core_client import CoreClient
from headrace.gateway_api.v1 import models_pb2


class Router:
    """Picks among the cores that take requests: a session's own core, else the one with the least work."""

    def __init__(self, cores: Sequence[CoreClient]) -> None:
        self._cores = cores

    @property
    def cores(self) -> Sequence[CoreClient]:
        """All cores, whatever their state."""
        return self._cores

    def has_serving_core(self) -> bool:
        """True if a request could go somewhere."""
        return any(core.state == models_pb2.CORE_STATE_SERVING for core in self._cores)

    def pick(self, session_id: str) -> CoreClient:
        """The core for a request. Raises Unavailable, with the state of each, if none takes requests."""
        serving = [core for core in self._cores if core.state == models_pb2.CORE_STATE_SERVING]
        if not serving:
            states = ", ".join(f"{core.address} {_state_name(core)}" for core in self._cores)
            raise Unavailable(f"no core takes requests: {states}", reason="NO_CORE")
        if session_id:
            # Rendezvous hashing: a core that comes or goes moves only the sessions that were or will be its own.
            return max(serving, key=lambda core: zlib.crc32(f"{session_id}\n{core.address}".encode()))
        return min(serving, key=lambda core: (core.live_completions, core.stats.running + core.stats.waiting))


def _state_name(core: CoreClient) -> str:
    return models_pb2.CoreState.Name(core.state).removeprefix("CORE_STATE_").lower()
