"""From a configuration to a loaded core: model, KV cache, scheduler, engine, and the facts that gateways are told."""

import json
import os
import sys
import uuid
from dataclasses import dataclass
from typing import Any

import structlog

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.errors import ConfigError
from headrace.common.model_files import ModelFiles, resolve_model
from headrace.common.params import ModelLimits
from headrace.common.params_wire import sampling_from_wire
from headrace.common.tokenizer_files import TokenizerFiles, load_tokenizer_files
from headrace.common.v1 import params_pb2 as pb_params
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import AdmissionLimits
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import CoreConfig
from headrace.core_service.engine import Engine
from headrace.core_service.grammar import GrammarBackend
from headrace.core_service.models.spec_reader import read_model_spec
from headrace.core_service.scheduler import Scheduler
from headrace.core_service.structured.backend import build_grammar_backend
from headrace.core_service.version import CORE_VERSION

# Names of what this core does beyond the first release's contract.
FEATURES: tuple[str, ...] = ()
MAX_BLOB_BYTES = 512 << 20
SPIN_COUNT = "1000"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCore:
    """A core that can serve."""

    engine: Engine
    blobs: BlobStore
    info: pb.CoreInfo


def find_model(config: CoreConfig) -> tuple[ModelFiles, TokenizerFiles]:
    """Fetches the model if need be and reads its tokenizer, which gateways can have while the weights are loaded.

    Raises StartupError with one clear line if anything is wrong.
    """
    files = resolve_model(config.model.model, config.model.revision)
    limit, wanted = read_model_spec(files.path).max_position_embeddings, config.model.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError([f"max_model_len: must be at most {limit}, the model's own limit; got {wanted}"])
    return files, load_tokenizer_files(files.path)


def load_core(config: CoreConfig, files: ModelFiles, tokenizer: TokenizerFiles) -> LoadedCore:
    """Loads and warms up; takes seconds. Raises StartupError with one clear line if anything is wrong."""
    # Read by torch's OpenMP runtime when it is loaded. By default its threads spin for milliseconds at the end of every
    # operation, and a process that competes for a core then slows each one down to a time slice (docs/log.md).
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # torch takes seconds to import: not before the configuration is known to be good.
    import torch

    from headrace.core_service.model_runner import build_runner

    torch.set_num_threads(config.device.threads or len(os.sched_getaffinity(0)))
    runner = build_runner(
        files.path,
        dtype=config.model.dtype,
        block_size=config.cache.block_size,
        kv_cache_memory=config.cache.cpu_kv_cache_memory,
        max_model_len=config.model.max_model_len,
        progress=sys.stderr.isatty(),
    )
    runner.warm_up()
    spec = runner.spec
    max_model_len = config.model.max_model_len or spec.max_position_embeddings
    max_logprobs = config.model.max_logprobs
    limits = AdmissionLimits(
        model=ModelLimits(
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            max_logprobs=spec.vocab_size if max_logprobs == -1 else max_logprobs,
        ),
        max_kv_tokens=(runner.num_blocks - 1) * runner.block_size,
        max_waiting_requests=config.scheduler.max_waiting_requests,
        max_waiting_tokens=config.scheduler.max_waiting_tokens,
    )
    blocks = BlockManager(
        runner.num_blocks, runner.block_size, enable_prefix_caching=config.cache.enable_prefix_caching
    )
    budget = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            [
                f"max_num_batched_tokens: must be at least max_model_len = {max_model_len} where "
                f"enable_chunked_prefill is off; got {budget}"
            ]
        )
    grammars = _grammars(tokenizer, spec.vocab_size, tuple(spec.eos_token_ids))
    scheduler = Scheduler(blocks, config.scheduler, grammars)
    blobs = BlobStore(MAX_BLOB_BYTES)
    info = pb.CoreInfo(
        contract_version=CONTRACT_VERSION,
        features=FEATURES,
        core_version=CORE_VERSION,
        instance_id=uuid.uuid4().hex,
        model=config.model.served_model_name or files.name,
        tokenizer_digest=tokenizer.digest,
        template_digest=tokenizer.template_digest,
        numerics_id=runner.numerics_id(),
        block_size=runner.block_size,
        num_blocks=blocks.num_usable,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        vocab_size=spec.vocab_size,
        max_logprobs=limits.model.max_logprobs,
        dtype=runner.numerics.dtype,
        attention_backend=runner.numerics.attention_backend,
        eos_token_ids=spec.eos_token_ids,
        tasks=["generate"],
        default_sampling=default_sampling(tokenizer.files.get("generation_config.json", b"{}"), limits.model),
        hidden_size=spec.hidden_size,
        max_waiting_requests=limits.max_waiting_requests,
        max_waiting_tokens=limits.max_waiting_tokens,
    )
    overlap = config.scheduler.async_scheduling == "on"
    engine = Engine(
        scheduler,
        runner,
        limits,
        blobs,
        grammars=grammars,
        overlap=overlap,
        check_when_idle=config.scheduler.check_integrity,
    )
    return LoadedCore(engine, blobs, info)


def _grammars(tokenizer: TokenizerFiles, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarBackend | None:
    """What compiles structured_outputs; None if that is not to be had for this tokenizer: such requests are refused."""
    try:
        return build_grammar_backend(tokenizer, vocab_size, eos_token_ids)
    except ValueError as error:
        log.warning("this core serves no structured outputs", reason=str(error))
        return None


def default_sampling(generation_config: bytes, limits: ModelLimits) -> pb_params.SamplingParams:
    """What unset sampling fields of a request take, from the model's generation_config.json.

    What breaks our rules is left out with a warning.
    """
    config: dict[str, Any] = json.loads(generation_config)
    result = pb_params.SamplingParams()
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = config.get(name)
        if value is None:
            continue
        one = pb_params.SamplingParams()
        try:
            setattr(one, name, value)
            valid = not sampling_from_wire(one).violations(limits)
        except (TypeError, ValueError):  # protobuf: of another type, or out of the field's range
            valid = False
        if valid:
            result.MergeFrom(one)
        else:
            log.warning("a default of the model's generation_config.json is not valid", name=name, value=value)
    return result
