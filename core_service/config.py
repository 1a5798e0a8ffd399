"""Settings of the core."""

from dataclasses import dataclass, field
from typing import ClassVar

from headrace.common.config import Config, Rule, Section, Unit, setting
from headrace.common.logging import LoggingConfig
from headrace.common.model_files import revision_problem

# A CPU has no memory of its own to fill, and the machine's other programs want theirs.
DEFAULT_CPU_KV_CACHE_MEMORY = 1 << 30


def _power_of_two(value: int) -> str | None:
    return None if value & (value - 1) == 0 else f"must be a power of two; got {value}"


@dataclass(frozen=True, slots=True)
class ModelConfig(Section):
    """Which model is served, and under which limits."""

    model: str = setting(
        help="file or directory, demo, or a hub id such as org/name or org/name/file.gguf",
        check=lambda value: None if value.strip() else "must not be empty",
    )
    revision: str | None = setting(None, help="branch, tag or commit of a hub id")
    served_model_name: str | None = setting(None, help="public name of the model (default: what --model says)")
    dtype: str = setting(
        "auto",
        help="type of weights and arithmetic; auto is bfloat16 where the device computes in it, else float32",
        choices=("auto", "float32", "bfloat16"),
    )
    max_model_len: int | None = setting(
        None, help="longest prompt plus output in tokens (default: the model's own limit)", low=1
    )
    max_logprobs: int = setting(
        20, help="most log-probabilities per token that a request may ask for; -1 is the whole vocabulary", low=-1
    )


@dataclass(frozen=True, slots=True)
class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int = setting(16, help="tokens per block", low=1, high=1024, check=_power_of_two)
    kv_cache_memory: int | None = setting(
        None,
        help="size of the KV cache, such as 4GiB (default: 1GiB on a CPU)",
        unit=Unit.BYTES,
        low=1,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        help="share of a GPU's memory for weights, KV cache and work space; not read on a CPU",
        low=0,
        high=1,
        above_low=True,
    )
    enable_prefix_caching: bool = setting(True, help="reuse the blocks of equal prompt beginnings")

    @property
    def cpu_kv_cache_memory(self) -> int:
        """Bytes of the KV cache on a CPU."""
        return DEFAULT_CPU_KV_CACHE_MEMORY if self.kv_cache_memory is None else self.kv_cache_memory


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Section):
    """What runs at once, and how much may wait."""

    max_num_seqs: int = setting(256, help="most requests that run at once", low=1, high=65536)
    max_num_batched_tokens: int = setting(2048, help="token budget of a step", low=1)
    enable_chunked_prefill: bool = setting(
        True, help="compute long prompts in pieces; if not, a prompt waits until a step has room for all of it"
    )
    long_prefill_token_threshold: int = setting(
        0,
        help="most tokens of one prompt in a step while others want their share too; 0 is no limit",
        low=0,
    )
    policy: str = setting(
        "priority",
        help="who goes first: by priority, then by arrival; or by arrival only",
        choices=("priority", "fcfs"),
    )
    priority_ageing: float = setting(
        30.0,
        help="a request that has waited this long counts as one step of priority more important; 0 switches it off",
        unit=Unit.SECONDS,
        low=0,
        high=86400,
    )
    preemption_victim: str = setting(
        "last",
        help="who is preempted when blocks run out: the last in order, or of the least important the cheapest one",
        choices=("last", "cheapest"),
    )
    watermark: float = setting(
        0.0, help="share of the KV blocks that admitting a request must leave free while others run", low=0, high=1
    )
    async_scheduling: str = setting(
        "auto",
        help="plan the next step while one computes; auto does so where the device computes beside the CPU",
        choices=("auto", "on", "off"),
    )
    max_waiting_time: float = setting(
        0.0,
        help="how long a request may wait to be scheduled before it is refused; 0 is no limit",
        unit=Unit.SECONDS,
        low=0,
        high=86400 * 7,
    )
    max_waiting_requests: int = setting(4096, help="most requests that wait; 0 is no limit", low=0)
    max_waiting_tokens: int = setting(0, help="most prompt tokens that wait; 0 is no limit", low=0)
    check_integrity: bool = setting(
        False, help="for debugging: check every block whenever nothing runs, and end the process if one is astray"
    )


@dataclass(frozen=True, slots=True)
class DeviceConfig(Section):
    """What computes."""

    device: str = setting(
        "auto",
        help="what computes; this release computes on the CPU, which is what auto means",
        choices=("auto", "cpu", "cuda"),
        check=lambda value: "cuda is not supported by this release; use auto or cpu" if value == "cuda" else None,
    )
    threads: int | None = setting(None, help="CPU threads for computing (default: one a core)", low=1, high=1024)


@dataclass(frozen=True, slots=True)
class ServerConfig(Section):
    """Where the core listens."""

    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0 is every interface")
    port: int = setting(50052, help="port to listen on; 0 is any free one", low=0, high=65535)
    drain_grace: float = setting(
        30.0, help="how long running requests may take to end at shutdown", unit=Unit.SECONDS, low=0, high=86400
    )


@dataclass(frozen=True, slots=True)
class CoreConfig(Config):
    """Everything that can be set about a core."""

    side: ClassVar[str] = "core"
    rules: ClassVar[tuple[Rule, ...]] = (Rule(("model.model", "model.revision"), revision_problem),)

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
