"""Turns tensors of a checkpoint into the parts of a model, with progress."""

import sys
from collections.abc import Sequence

import torch
from tqdm import tqdm

from headrace.core_service.weights.checkpoint import Checkpoint
from headrace.kernels.linear import PackedLinear


class WeightReader:
    """Reads each weight once, in the compute type; use as a context manager, which closes the progress bar."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, *, progress: bool) -> None:
        self.dtype = dtype
        self.linears: list[PackedLinear] = []  # all that were made
        self._checkpoint = checkpoint
        # Only to a terminal, unless asked for: a log file is no place for a bar.
        shown = progress or sys.stderr.isatty()
        self._bar = tqdm(
            total=len(list(checkpoint.names())),
            desc="loading weights",
            unit="tensor",
            disable=not shown,
            file=sys.stderr,
        )

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def linear(self, in_features: int, parts: Sequence[tuple[str, int]], *, bias: bool) -> PackedLinear:
        """One linear layer out of several: `parts` are names (without .weight) and output sizes, in order."""
        weight = self._join([self._read(f"{name}.weight", (size, in_features), self.dtype) for name, size in parts])
        if not bias:
            return self.pack(weight)
        return self.pack(weight, self._join([self._read(f"{name}.bias", (size,), self.dtype) for name, size in parts]))

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """A linear layer out of weight [out_features, in_features] and bias [out_features]."""
        self.linears.append(PackedLinear(weight, bias))
        return self.linears[-1]

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """A matrix [rows, columns] in the compute type."""
        return self._read(name, (rows, columns), self.dtype)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """The weights [size] of a norm, in float32."""
        return self._read(name, (size,), torch.float32)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._bar.update()
        return self._checkpoint.tensor(name, shape, dtype)

    @staticmethod
    def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
