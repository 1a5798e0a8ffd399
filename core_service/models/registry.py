"""From a path to a model that is ready to run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.common.errors import ModelLoadError
from headrace.core_service.models.causal_lm import CausalLM
from headrace.core_service.models.llama import LlamaForCausalLM
from headrace.core_service.models.mistral import MistralForCausalLM
from headrace.core_service.models.qwen2 import Qwen2ForCausalLM
from headrace.core_service.models.qwen3 import Qwen3ForCausalLM
from headrace.core_service.models.spec import ModelSpec
from headrace.core_service.models.weight_reader import WeightReader
from headrace.core_service.weights.load import open_checkpoint
from headrace.kernels.best_kernels import best_kernels
from headrace.kernels.layer_kernels import LayerKernels
from headrace.kernels.linear import has_bfloat16_kernels
from headrace.kernels.linear_check import check_linears

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory."""

    model: CausalLM
    spec: ModelSpec
    weights_digest: str  # hexadecimal SHA-256
    linears_in_blocks: int  # linear layers that need it to give the same bits in any batch


def resolve_dtype(name: str) -> torch.dtype:
    """The compute type for `auto`, `float32` or `bfloat16`; auto is bfloat16 where the CPU multiplies it in hardware.

    ModelLoadError for bfloat16 on a CPU without it: emulated, it is slower than float32 and no more accurate.
    """
    if name == "auto":
        return torch.bfloat16 if has_bfloat16_kernels() else torch.float32
    if name not in DTYPES:
        raise ModelLoadError(f"dtype {name!r} is not supported, only auto, {', '.join(DTYPES)}")
    if name == "bfloat16" and not has_bfloat16_kernels():
        raise ModelLoadError("dtype bfloat16 needs a CPU with AVX-512 BF16 or AMX; use auto or float32")
    return DTYPES[name]


@torch.inference_mode()
def load_model(
    path: Path,
    dtype: torch.dtype,
    progress: bool = False,
    max_len: int | None = None,
    kernels: LayerKernels | None = None,
) -> LoadedModel:
    """Reads a GGUF file or a Hugging Face directory.

    `max_len` is the longest context that will be served, in tokens (default: all that the model has); only dynamic rope
    scaling depends on it. `kernels` None: the best that this machine can have, compiled first if need be. Raises
    ModelLoadError, with one line, for anything missing, damaged or not supported.
    """
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    with WeightReader(checkpoint, dtype, progress=progress) as weights:
        model_class = ARCHITECTURES[spec.architecture]
        model = model_class(spec, weights, kernels or best_kernels(), max_len or spec.max_position_embeddings)
    checkpoint.check_all_read()
    return LoadedModel(model, spec, checkpoint.content_digest(), check_linears(weights.linears))
