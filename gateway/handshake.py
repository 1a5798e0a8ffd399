"""Whether a gateway and a core fit together: contract version, model and tokenizer."""

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.errors import FailedPrecondition
from headrace.common.params import ModelLimits, SamplingParams
from headrace.common.params_wire import sampling_from_wire
from headrace.core_api.v1 import engine_core_pb2 as core_pb


def check_contract(theirs: str, ours: str = CONTRACT_VERSION) -> None:
    """Raises FailedPrecondition unless the versions are at most one minor release apart."""
    try:
        their_major, their_minor = (int(part) for part in theirs.split("."))
    except ValueError:
        raise FailedPrecondition(
            f"contract version {theirs!r} is not major.minor", reason="CONTRACT_MISMATCH"
        ) from None
    our_major, our_minor = (int(part) for part in ours.split("."))
    if their_major != our_major or abs(their_minor - our_minor) > 1:
        raise FailedPrecondition(
            f"the core speaks contract {theirs}, this gateway {ours}; they may be one minor release apart",
            reason="CONTRACT_MISMATCH",
        )


def check_facts(info: core_pb.CoreInfo) -> None:
    """Raises FailedPrecondition for a core that could serve no request; its limits would hold for all cores."""
    for name, least in (("vocab_size", 1), ("max_model_len", 2), ("block_size", 1), ("num_blocks", 1)):
        if (value := getattr(info, name)) < least:
            raise FailedPrecondition(f"the core says {name} = {value}, which can serve nothing", reason="BAD_CORE_INFO")
    # Requests take these where they say nothing; their clients must not be blamed for them.
    limits = ModelLimits(info.vocab_size, info.max_model_len, info.max_logprobs)
    if broken := sampling_from_wire(info.default_sampling, SamplingParams()).violations(limits):
        listed = "; ".join(f"{v.field}: {v.description}" for v in broken)
        raise FailedPrecondition(
            f"the core's default sampling parameters are not valid: {listed}", reason="BAD_CORE_INFO"
        )


def check_same_model(info: core_pb.CoreInfo, model: str, tokenizer_digest: str) -> None:
    """Raises FailedPrecondition if a core serves another model or tokenizer than the gateway; empty accepts any."""
    if model and info.model != model:
        raise FailedPrecondition(
            f"the core serves model {info.model!r}, this gateway {model!r}", reason="MODEL_MISMATCH"
        )
    if tokenizer_digest and info.tokenizer_digest != tokenizer_digest:
        raise FailedPrecondition(
            f"the core's tokenizer has digest {info.tokenizer_digest!r}, this gateway's {tokenizer_digest!r}",
            reason="TOKENIZER_MISMATCH",
        )
