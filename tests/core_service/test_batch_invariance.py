"""The same request gives the same tokens and the same bits of log-probabilities, whatever is served beside it and
however it is computed: through the real engine, scheduler and runner, with the demo model."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_core import BLOCK_SIZE, Asked, Settings, running, serve, serve_in_new_process

from headrace.common.demo_model import fetch_demo_model
from headrace.core_service.model_runner import ModelRunner, build_runner
from headrace.kernels.best_kernels import best_kernels
from headrace.kernels.linear import has_bfloat16_kernels
from headrace.kernels.torch_kernels import TorchKernels

DTYPES = ["float32", *(["bfloat16"] if has_bfloat16_kernels() else [])]
GREEDY = Asked(prompt_seed=1, prompt_len=83, max_tokens=8)
DRAWN = Asked(prompt_seed=2, prompt_len=83, max_tokens=8, temperature=1.0, seed=7)
PROBES = (GREEDY, DRAWN)
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 32, 33, 34, 55, 64, 65, 89, 100, 120, 144, 150)
OTHERS = [Asked(100 + i, LENGTHS[i % len(LENGTHS)], 1 + i % 8, temperature=i % 2, seed=i) for i in range(31)]

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=DTYPES)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    if best_kernels().name == TorchKernels.name:
        pytest.skip("no C++ compiler: kernels in plain PyTorch are too slow for this and have a test of their own")
    return build_runner(fetch_demo_model(), kv_cache_memory=512 << 20, dtype=request.param, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[Asked, Any]:
    """What each probe gets alone, on one thread."""
    return {probe: serve(runner, [probe], Settings(threads=1))[0].bits for probe in PROBES}


@pytest.mark.parametrize("probe", PROBES, ids=["greedy", "drawn"])
def test_alone_with_two_threads(runner: ModelRunner, alone: dict[Asked, Any], probe: Asked) -> None:
    assert serve(runner, [probe], Settings(threads=2))[0].bits == alone[probe]


@pytest.mark.parametrize(
    ("probe", "options"), [(GREEDY, {"threads": 2}), (DRAWN, {"threads": 1}), (DRAWN, {"overlap": True})], ids=str
)
def test_among_31_others_of_mixed_lengths(
    runner: ModelRunner, alone: dict[Asked, Any], probe: Asked, options: dict[str, Any]
) -> None:
    batch = [*OTHERS[:13], probe, *OTHERS[13:]]
    assert serve(runner, batch, Settings(**options))[13].bits == alone[probe]


@pytest.mark.parametrize("probes", [PROBES, PROBES[::-1]], ids=["drawn", "greedy"])
def test_after_a_preemption(runner: ModelRunner, alone: dict[Asked, Any], probes: tuple[Asked, ...]) -> None:
    # All fit at first and grow by one block each: the last one is pushed out.
    crowd = [Asked(50 + i, 78, 12) for i in range(4)]
    got = serve(runner, [*crowd, *probes], Settings(num_blocks=1 + 5 * len(crowd) + 6 * len(probes)))[-2:]
    assert got[-1].finished is not None
    assert got[-1].finished.timing.preemptions > 0
    assert [one.bits for one in got] == [alone[probe] for probe in probes]


def test_after_a_prefix_cache_hit(runner: ModelRunner, alone: dict[Asked, Any]) -> None:
    with running(runner, Settings(caching=True)) as core:
        for hit in (False, True, True):
            got = core.run(PROBES)
            assert [one.finished.cached_tokens > 0 for one in got if one.finished] == [hit, hit]
            assert [one.bits for one in got] == [alone[probe] for probe in PROBES]


@pytest.mark.parametrize("chunk", [3, 16])
def test_with_chunked_prefill(runner: ModelRunner, alone: dict[Asked, Any], chunk: int) -> None:
    got = serve(runner, PROBES, Settings(chunk=chunk))
    assert [one.bits for one in got] == [alone[probe] for probe in PROBES]


def test_a_long_prompt_in_one_piece_and_in_chunks_of_16(runner: ModelRunner) -> None:
    long = Asked(prompt_seed=3, prompt_len=1101, max_tokens=1)
    assert serve(runner, [long], Settings(chunk=16))[0].bits == serve(runner, [long], Settings())[0].bits


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_in_chunks_of_any_size_in_any_batch(runner: ModelRunner, alone: dict[Asked, Any], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.sampled_from(OTHERS), max_size=8, unique=True), "others")
    probe = data.draw(st.sampled_from(PROBES), "probe")
    place = data.draw(st.integers(0, len(others)), "place")
    options = Settings(
        max_num_seqs=data.draw(st.integers(2, 16), "most sequences"),
        budget=data.draw(st.integers(16, 300), "budget"),
        chunk=data.draw(st.integers(0, 90), "chunk"),
        num_blocks=data.draw(st.sampled_from([16, 40, 400]), "blocks"),
        caching=data.draw(st.booleans(), "caching"),
        threads=data.draw(st.sampled_from([1, 2]), "threads"),
        overlap=data.draw(st.booleans(), "overlap"),
    )
    batch = [*others[:place], probe, *others[place:]]
    assert serve(runner, batch, options)[place].bits == alone[probe]


@pytest.fixture(scope="module")
def new_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def test_after_a_restart(runner: ModelRunner, alone: dict[Asked, Any], new_process: ProcessPoolExecutor) -> None:
    path: Path = fetch_demo_model()
    again = new_process.submit(serve_in_new_process, path, runner.numerics.dtype, PROBES).result(120)
    assert again == [alone[probe] for probe in PROBES]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_in_plain_pytorch_keep_the_law_too(dtype: str) -> None:
    runner = build_runner(
        fetch_demo_model(), kv_cache_memory=64 << 20, dtype=dtype, block_size=BLOCK_SIZE, kernels=TorchKernels()
    )
    probe = Asked(prompt_seed=1, prompt_len=37, max_tokens=4, temperature=1.0)
    others = [Asked(100 + length, length, 4) for length in (1, 20, 50)]
    expected = serve(runner, [probe], Settings(num_blocks=40, threads=1))[0].bits
    for options in (Settings(40), Settings(40, chunk=16), Settings(40, chunk=5, threads=1)):
        assert serve(runner, [others[0], probe, *others[1:]], options)[1].bits == expected
