"""A checkpoint: named tensors on disk and the shape of the model that they belong to.

Names are those of Hugging Face's Llama family (`model.layers.0.self_attn.q_proj.weight`), whatever the file calls them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from headrace.common.errors import ModelLoadError
from headrace.core_service.models.spec import ModelSpec

# Buffers that old checkpoints carry; they follow from the configuration.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


class Checkpoint(ABC):
    """Reads tensors one at a time, so that a model is built without a second copy of everything."""

    def __init__(self, spec: ModelSpec, source: str) -> None:
        self.spec = spec
        self.source = source
        self._read: set[str] = set()

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Names of all tensors, in the order of the file."""

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in PyTorch's order; KeyError if there is none."""

    @abstractmethod
    def content_digest(self) -> str:
        """Hexadecimal SHA-256 that identifies the weights; see `weights.digest`."""

    @abstractmethod
    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in memory of its own, dequantized."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` as `dtype`; ModelLoadError when it is missing or not of `shape`."""
        try:
            actual = self.shape_of(name)
        except KeyError:
            raise ModelLoadError(f"{self.source}: tensor {name} is missing") from None
        if actual != shape:
            raise ModelLoadError(f"{self.source}: tensor {name} has shape {list(actual)}, expected {list(shape)}")
        self._read.add(name)
        return self._load(name, dtype)

    def check_all_read(self) -> None:
        """ModelLoadError when the file holds weights that the model did not ask for: they would be ignored silently."""
        ignored = {"lm_head.weight"} if self.spec.tie_word_embeddings else set()
        unread = [n for n in self.names() if n not in self._read | ignored and not n.endswith(IGNORED_SUFFIXES)]
        if unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            raise ModelLoadError(
                f"{self.source}: tensors that a {self.spec.architecture} model does not have: "
                f"{', '.join(unread[:3])}{more}"
            )
