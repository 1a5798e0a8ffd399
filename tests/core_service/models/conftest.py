"""Tiny models in Hugging Face's format, and a runner of our model over chunks of a sequence."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core_service.batch import SamplingColumns, ScheduledBatch
from headrace.core_service.kv_cache import KVCache
from headrace.core_service.models.registry import LoadedModel

BLOCK_SIZE = 4
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

HfModelMaker = Callable[..., Any]
ChunkRunner = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_hf_model(tmp_path: Path) -> HfModelMaker:
    """Makes a random model of a transformers family, saves it to `tmp_path`, returns the transformers model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    def make(family: str, *, max_shard_size: str = "1GB", **changes: Any) -> Any:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(transformers, f"{family}Config")(**(TINY | changes))
            config._attn_implementation = "eager"
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            with torch.no_grad():
                # Wide enough that every part matters to the logits: norms and biases start as ones and zeros.
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.15)
            model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        return model

    return make


@pytest.fixture
def logits_in_chunks() -> ChunkRunner:
    """Runs token ids through our model in chunks of given sizes (1 is a decode).

    Returns the logits [num_tokens - first, vocab] of the tokens from `first` on.
    """

    def run(loaded: LoadedModel, token_ids: Sequence[int], chunks: Sequence[int], first: int = 0) -> torch.Tensor:
        assert sum(chunks) == len(token_ids)
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        cache = KVCache(loaded.spec, num_blocks + 1, BLOCK_SIZE, loaded.model.dtype)
        # Pages in reverse order: nothing may depend on neighbours.
        block_table = np.arange(num_blocks, 0, -1, dtype=np.int32)[None]
        parts, done = [], 0
        with torch.inference_mode():
            for size in chunks:
                parts.append(loaded.model.forward(_one_sequence(token_ids, done, size, block_table), cache))
                done += size
            return loaded.model.logits(torch.cat(parts)[first:])

    return run


def _one_sequence(
    token_ids: Sequence[int], done: int, size: int, block_table: np.ndarray[Any, np.dtype[np.int32]]
) -> ScheduledBatch:
    positions = np.arange(done, done + size)
    return ScheduledBatch(
        step=0,
        query_start=np.array([0, size], dtype=np.int32),
        token_ids=np.array(token_ids[done : done + size], dtype=np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=block_table[0, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        block_tables=block_table,
        context_lens=np.array([done + size], dtype=np.int32),
        sample_index=np.empty(0, dtype=np.int64),
        sampling=SamplingColumns(
            temperature=np.empty(0, dtype=np.float32),
            top_k=np.empty(0, dtype=np.int32),
            top_p=np.empty(0, dtype=np.float32),
            min_p=np.empty(0, dtype=np.float32),
            seed=np.empty(0, dtype=np.uint64),
            output_position=np.empty(0, dtype=np.int32),
            num_logprobs=np.empty(0, dtype=np.int32),
        ),
    )
