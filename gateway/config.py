"""Settings of the gateway."""

from dataclasses import dataclass, field
from typing import ClassVar

from headrace.common.addresses import Address, parse_address
from headrace.common.config import Config, Rule, Section, Unit, setting
from headrace.common.logging import LoggingConfig
from headrace.common.model_files import revision_problem


def _addresses_problem(cores: tuple[str, ...]) -> str | None:
    problems = []
    for core in cores:
        try:
            parse_address(core)
        except ValueError as error:
            problems.append(str(error))
    if len(set(cores)) < len(cores):
        problems.append(f"must name each core once; got {','.join(cores)}")
    return ", ".join(problems) or None


def _own_address_problem(cores: tuple[str, ...], host: str, port: int) -> str | None:
    own = Address(host, port)
    listens_on_loopback = own.is_loopback or host in ("0.0.0.0", "::")
    for core in map(parse_address, cores):
        if core == own or (core.port == port and core.is_loopback and listens_on_loopback):
            return f"core {core} is the gateway's own address"
    return None


@dataclass(frozen=True, slots=True)
class ServerConfig(Section):
    """Where the gateway listens."""

    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0 is every interface")
    port: int = setting(50051, help="port to listen on; 0 is any free one", low=0, high=65535)
    drain_grace: float = setting(
        30.0, help="how long running requests may take to end at shutdown", unit=Unit.SECONDS, low=0, high=86400
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig(Section):
    """What the gateway accepts."""

    # Far above the longest prompt, so that one too long is told its length instead of a transport error.
    max_message_bytes: int = setting(
        16 << 20, help="largest message in either direction", unit=Unit.BYTES, low=64 << 10, high=(2 << 30) - 1
    )
    max_live_requests: int = setting(4096, help="requests served at once; more are refused", low=1, high=1_000_000)
    slow_reader_timeout: float = setting(
        60.0, help="a client that reads nothing for so long is cut off", unit=Unit.SECONDS, above_low=True, low=0
    )
    max_unsent_bytes: int = setting(
        64 << 20, help="output that one client may leave unread, about", unit=Unit.BYTES, low=64 << 10
    )


@dataclass(frozen=True, slots=True)
class GatewayConfig(Config):
    """Everything that can be set about a gateway."""

    side: ClassVar[str] = "gateway"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("tokenizer", "tokenizer_revision"), revision_problem),
        Rule(("cores", "server.host", "server.port"), _own_address_problem),
    )

    cores: tuple[str, ...] = setting(
        name="core", help="addresses of the cores, each host:port", check=_addresses_problem
    )
    tokenizer: str | None = setting(
        None, help="file or directory, demo, or a hub id to read the tokenizer from (default: the core sends it)"
    )
    tokenizer_revision: str | None = setting(None, help="branch, tag or commit of a hub id")
    tokenizer_threads: int = setting(2, help="threads that tokenize", low=1, high=256)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
