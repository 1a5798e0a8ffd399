import pytest

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.errors import FailedPrecondition
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.handshake import check_contract, check_facts, check_same_model


@pytest.mark.parametrize("theirs", ["1.4", "1.5", "1.6"])
def test_neighbouring_releases_work_together(theirs: str) -> None:
    check_contract(theirs, "1.5")


@pytest.mark.parametrize("theirs", ["1.3", "1.7", "2.5", "0.5", "", "1", "one.two"])
def test_other_releases_are_refused(theirs: str) -> None:
    with pytest.raises(FailedPrecondition):
        check_contract(theirs, "1.5")


def test_our_own_version_is_one_that_fits() -> None:
    check_contract(CONTRACT_VERSION)


@pytest.mark.parametrize(("model", "digest"), [("", ""), ("m", ""), ("", "d"), ("m", "d")])
def test_empty_expectations_accept_any_core(model: str, digest: str) -> None:
    check_same_model(core_pb.CoreInfo(model="m", tokenizer_digest="d"), model, digest)


@pytest.mark.parametrize(("model", "digest"), [("other", ""), ("m", "other")])
def test_another_model_or_tokenizer_is_refused_by_name(model: str, digest: str) -> None:
    with pytest.raises(FailedPrecondition, match="other"):
        check_same_model(core_pb.CoreInfo(model="m", tokenizer_digest="d"), model, digest)


@pytest.mark.parametrize("name", ["vocab_size", "max_model_len", "block_size", "num_blocks"])
def test_a_core_that_can_serve_nothing_is_refused_by_name(name: str) -> None:
    info = core_pb.CoreInfo(vocab_size=1, max_model_len=2, block_size=1, num_blocks=1)
    check_facts(info)
    setattr(info, name, getattr(info, name) - 1)
    with pytest.raises(FailedPrecondition, match=name):
        check_facts(info)


def test_a_core_with_default_parameters_that_no_request_may_have_is_refused_by_name() -> None:
    info = core_pb.CoreInfo(vocab_size=10, max_model_len=20, block_size=1, num_blocks=1)
    info.default_sampling.temperature = 0.6
    check_facts(info)
    info.default_sampling.temperature = float("nan")
    info.default_sampling.stop_token_ids.append(10)
    with pytest.raises(FailedPrecondition, match=r"sampling\.temperature.*sampling\.stop_token_ids"):
        check_facts(info)
