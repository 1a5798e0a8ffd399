"""The runner gives each sequence of a batch what it would get alone, and bounds what prompt log-probabilities take."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.common.errors import ModelLoadError
from headrace.core_service import model_runner
from headrace.core_service.batch import LogprobRows, PromptLogprobRange, SamplingColumns, ScheduledBatch, StepResult
from headrace.core_service.model_runner import ModelRunner, build_runner
from headrace.kernels.best_kernels import best_kernels
from headrace.kernels.torch_kernels import TorchKernels

HIDDEN, INTERMEDIATE, HEAD_DIM, VOCAB, LAYERS = 32, 48, 8, 120, 2
BLOCK_SIZE = 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def tiny_weights() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (32, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (16, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (16, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, 32),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tiny_weights(), path / "model.safetensors")
    return path


@pytest.fixture(params=["best", "torch"])
def runner(directory: Path, request: pytest.FixtureRequest) -> ModelRunner:
    torch.set_num_threads(1)
    kernels = best_kernels() if request.param == "best" else TorchKernels()
    return build_runner(directory, kv_cache_memory=1 << 20, dtype="float32", block_size=BLOCK_SIZE, kernels=kernels)


class Conversation:
    """One sequence with pages of its own."""

    def __init__(self, token_ids: list[int], first_block: int) -> None:
        self.token_ids = token_ids
        self.done = 0
        self.blocks = np.arange(first_block, first_block + 16, dtype=np.int32)


def make_batch(
    work: list[tuple[Conversation, int]],
    *,
    num_logprobs: int = -1,
    prompt_logprobs: int | None = None,
) -> ScheduledBatch:
    """A step that computes some new tokens of each sequence; those that reach their last known token are sampled."""
    sizes = [size for _, size in work]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    positions = [np.arange(c.done, c.done + size) for c, size in work]
    sampled = [i for i, (c, size) in enumerate(work) if c.done + size == len(c.token_ids)]
    ranges = []
    if prompt_logprobs is not None:
        for i, (c, size) in enumerate(work):
            targets = np.array(c.token_ids[c.done + 1 : c.done + size + 1], dtype=np.int32)
            ranges.append(PromptLogprobRange(i, int(starts[i]), targets, 1, prompt_logprobs))
    slots = [
        c.blocks[p // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + p % BLOCK_SIZE
        for (c, _), p in zip(work, positions, strict=True)
    ]
    return ScheduledBatch(
        step=1,
        query_start=starts.astype(np.int32),
        token_ids=np.concatenate([c.token_ids[c.done : c.done + size] for c, size in work]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots),
        block_tables=np.stack([c.blocks for c, _ in work]),
        context_lens=np.array([c.done + size for c, size in work], dtype=np.int32),
        sample_index=np.array([starts[i + 1] - 1 for i in sampled], dtype=np.int64),
        sampling=SamplingColumns(
            temperature=np.zeros(len(sampled), dtype=np.float32),
            top_k=np.zeros(len(sampled), dtype=np.int32),
            top_p=np.ones(len(sampled), dtype=np.float32),
            min_p=np.zeros(len(sampled), dtype=np.float32),
            seed=np.zeros(len(sampled), dtype=np.uint64),
            output_position=np.zeros(len(sampled), dtype=np.int32),
            num_logprobs=np.full(len(sampled), num_logprobs, dtype=np.int32),
        ),
        prompt_logprobs=tuple(ranges),
    )


def step(runner: ModelRunner, work: list[tuple[Conversation, int]], **options: Any) -> StepResult:
    """Executes, and appends the drawn tokens to their sequences."""
    result = runner.execute(make_batch(work, **options))
    reached = [c for c, size in work if c.done + size == len(c.token_ids)]
    for conversation, size in work:
        conversation.done += size
    for conversation, token in zip(reached, result.token_ids.tolist(), strict=True):
        conversation.token_ids.append(token)
    return result


def generate_alone(runner: ModelRunner, prompt: list[int], count: int) -> list[int]:
    conversation = Conversation(list(prompt), 1)
    step(runner, [(conversation, len(prompt))])
    for _ in range(count - 1):
        step(runner, [(conversation, 1)])
    return conversation.token_ids[len(prompt) :]


def random_prompt(length: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length)]


def test_a_mixed_batch_gives_each_sequence_its_own_tokens(runner: ModelRunner) -> None:
    prompts = [random_prompt(9, 1), random_prompt(14, 2), random_prompt(1, 3)]
    alone = [generate_alone(runner, prompt, 6) for prompt in prompts]
    a, b, c = (Conversation(list(prompt), 1 + 16 * i) for i, prompt in enumerate(prompts))
    step(runner, [(a, 9), (b, 5)])  # a is sampled, b is in mid-prompt
    step(runner, [(a, 1), (b, 8), (c, 1)])
    step(runner, [(c, 1), (b, 1), (a, 1)])  # b's last prompt token, in another order
    for _ in range(5):
        step(runner, [(a, 1), (b, 1), (c, 1)])
    for conversation, prompt, expected in zip((a, b, c), prompts, alone, strict=True):
        assert conversation.token_ids[len(prompt) :][:6] == expected


def test_what_a_failed_request_left_in_its_blocks_reaches_nobody(runner: ModelRunner) -> None:
    prompt = random_prompt(5, 4)
    clean = generate_alone(runner, prompt, 6)
    for keys, values in runner._kv_cache.layers:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    poisoned = Conversation(list(prompt), 1)
    # As the scheduler's table has it: blocks that the sequence holds, then the null block.
    poisoned.blocks[3:] = 0
    step(runner, [(poisoned, len(prompt))])
    for _ in range(5):
        step(runner, [(poisoned, 1)])
    assert poisoned.token_ids[len(prompt) :] == clean


def test_nothing_is_drawn_in_mid_prompt(runner: ModelRunner) -> None:
    result = step(runner, [(Conversation(random_prompt(9, 1), 1), 4)])
    assert result.token_ids.dtype == np.int32
    assert result.token_ids.tolist() == []
    assert result.logprobs is None


def rows_as_dicts(rows: LogprobRows) -> dict[int, dict[int, float]]:
    result = {}
    for i, row in enumerate(rows.rows.tolist()):
        entries = slice(rows.offsets[i], rows.offsets[i + 1])
        result[row] = dict(zip(rows.token_ids[entries].tolist(), rows.values[entries].tolist(), strict=True))
    return result


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_prompt_logprobs_do_not_depend_on_slices_or_chunks(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    prompt = random_prompt(12, 5)
    whole = step(runner, [(Conversation([*prompt, 0], 1), 12)], prompt_logprobs=3).prompt_logprobs[0]
    expected = rows_as_dicts(whole)
    assert sorted(expected) == list(range(12))
    assert all(token in expected[i] for i, token in enumerate(prompt[1:]))
    monkeypatch.setattr(model_runner, "PROMPT_LOGITS_BYTES", rows_at_once * VOCAB * 4)
    conversation = Conversation([*prompt, 0], 1)
    for start, size in ((0, 7), (7, 5)):
        rows = rows_as_dicts(step(runner, [(conversation, size)], prompt_logprobs=3).prompt_logprobs[0])
        for row, entries in rows.items():
            assert entries == expected[start + row]


def test_sampled_rows_carry_their_logprobs(runner: ModelRunner) -> None:
    a, b = Conversation(random_prompt(6, 1), 1), Conversation(random_prompt(3, 2), 17)
    result = step(runner, [(a, 6), (b, 3)], num_logprobs=2)
    assert result.logprobs is not None
    rows = rows_as_dicts(result.logprobs)
    assert [max(rows[i], key=rows[i].__getitem__) for i in range(2)] == result.token_ids.tolist()


def test_warming_up_leaves_no_trace(runner: ModelRunner) -> None:
    before = generate_alone(runner, random_prompt(5, 1), 4)
    runner.warm_up()
    assert generate_alone(runner, random_prompt(5, 1), 4) == before


def test_facts_follow_from_the_model(runner: ModelRunner) -> None:
    assert runner.block_size == BLOCK_SIZE
    assert runner.num_blocks == (1 << 20) // (2 * LAYERS * 2 * BLOCK_SIZE * HEAD_DIM * 4)
    assert (runner.spec.vocab_size, runner.spec.eos_token_ids) == (VOCAB, (2,))
    assert runner.numerics.dtype == "float32"


def test_numerics_id_changes_with_the_weights_and_not_otherwise(
    runner: ModelRunner, directory: Path, tmp_path: Path
) -> None:
    kernels = runner._model.kernels
    again = build_runner(directory, kv_cache_memory=1 << 16, dtype="float32", kernels=kernels)
    assert again.numerics_id() == runner.numerics_id()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = tiny_weights()
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "model.safetensors")
    other = build_runner(tmp_path, kv_cache_memory=1 << 16, dtype="float32", kernels=kernels)
    assert other.numerics_id() != runner.numerics_id()


def test_numerics_id_changes_with_the_kernels(directory: Path) -> None:
    class OtherKernels(TorchKernels):
        name = "other"

    plain, other = (
        build_runner(directory, kv_cache_memory=1 << 16, dtype="float32", kernels=kernels)
        for kernels in (TorchKernels(), OtherKernels())
    )
    assert plain.numerics.attention_backend == "torch"
    assert other.numerics_id() != plain.numerics_id()


def test_an_unknown_dtype_is_refused(directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="dtype 'int8' is not supported"):
        build_runner(directory, kv_cache_memory=1 << 20, dtype="int8")
