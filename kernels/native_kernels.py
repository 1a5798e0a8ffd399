"""The layer kernels in C++ (paged_attention.cpp, elementwise.cpp), called through their plain C interface.

Calls release Python's lock. Threads: as many as torch uses, out of torch's own OpenMP pool.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.kernels.layer_kernels import StepFacts
from headrace.kernels.native_library import load_library

_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Step(ctypes.Structure):
    """`AttentionStep` of attention_worker.h."""

    _fields_ = (
        ("query_start", _POINTER),
        ("context_lens", _POINTER),
        ("block_tables", _POINTER),
        *((name, _INT) for name in ("num_seqs", "table_stride", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _INT) for name in ("block_size", "num_threads")),
    )


class _Rotation(ctypes.Structure):
    """`Rotation` of elementwise.cpp."""

    _fields_ = (
        ("cos", _POINTER),
        ("signed_sin", _POINTER),
        ("slots", _POINTER),
        *((name, _INT) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size", "threads")),
    )


class NativeKernels:
    """See `LayerKernels`. NativeUnavailable if they cannot be had; parameters as of `load_library`."""

    def __init__(self, instructions: str | None = None, cache: Path | None = None) -> None:
        library = load_library(instructions, cache)
        library.headrace_instructions.restype = ctypes.c_char_p
        self.name = f"cpp-{library.headrace_instructions().decode()}"
        self._attention = _functions(library, "attention", (_POINTER, _POINTER, _INT, *(_POINTER,) * 3, _INT))
        self._add_norm = _functions(library, "add_norm", (*(_POINTER,) * 3, _FLOAT, _POINTER, *(_INT,) * 3))
        self._silu_mul = _functions(library, "silu_mul", (_POINTER, _POINTER, *(_INT,) * 3))
        pointers = (_POINTER, _POINTER, _INT, _POINTER, _INT, *(_POINTER,) * 3)
        self._rotate_and_store = _functions(library, "rotate_and_store", pointers)

    def begin_step(self, facts: StepFacts) -> "NativeStep":
        """Lays the step's facts out for C++."""
        return NativeStep(facts, self._attention, self._rotate_and_store)

    def add_norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """residual, update [rows, size] → [rows, size] of `dtype`."""
        rows, size = residual.shape
        output = torch.empty(rows, size, dtype=dtype)
        self._add_norm[dtype](
            _address(residual),
            None if update is None else _address(update),
            _address(weight),
            eps,
            output.data_ptr(),
            rows,
            size,
            torch.get_num_threads(),
        )
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [rows, 2 * size] → [rows, size]."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty(rows, size, dtype=gate_up.dtype)
        self._silu_mul[gate_up.dtype](_address(gate_up), output.data_ptr(), rows, size, torch.get_num_threads())
        return output


class NativeStep:
    """See `StepKernels`."""

    def __init__(
        self, facts: StepFacts, attention: dict[torch.dtype, Any], rotate_and_store: dict[torch.dtype, Any]
    ) -> None:
        self._facts = facts
        self._attention, self._rotate_and_store = attention, rotate_and_store
        arrays = [
            np.ascontiguousarray(array, dtype=kind)
            for array, kind in (
                (facts.query_start, np.int32),
                (facts.context_lens, np.int32),
                (facts.block_tables, np.int32),
                (facts.slot_mapping, np.int64),
            )
        ]
        self._arrays = arrays  # what the structures point to must live as long as they do
        self._num_tokens = len(facts.slot_mapping)
        threads = torch.get_num_threads()
        heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.block_size, threads)
        self._step = _Step(
            *(array.ctypes.data for array in arrays[:3]), len(facts.context_lens), arrays[2].shape[1], *heads
        )
        self._rotation = _Rotation(
            _address(facts.cos), _address(facts.signed_sin), arrays[3].ctypes.data, self._num_tokens, *heads
        )

    def rotate_and_store(
        self, query_keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """query_keys [num_tokens, num_heads + num_kv_heads, head_dim] → queries [num_tokens, num_heads, head_dim]."""
        facts = self._facts
        queries = torch.empty(self._num_tokens, facts.num_heads, facts.head_dim, dtype=query_keys.dtype)
        self._rotate_and_store[query_keys.dtype](
            ctypes.byref(self._rotation),
            query_keys.data_ptr(),
            _token_stride(query_keys),
            values.data_ptr(),
            _token_stride(values),
            queries.data_ptr(),
            _address(key_cache),
            _address(value_cache),
        )
        return queries

    def attend(
        self, queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """queries [num_tokens, num_heads, head_dim] → the same shape."""
        output = torch.empty(queries.shape, dtype=queries.dtype)
        failed = self._attention[queries.dtype](
            ctypes.byref(self._step),
            _address(queries),
            queries.stride(0),
            _address(key_cache),
            _address(value_cache),
            output.data_ptr(),
            window or 0,
        )
        if failed:
            raise MemoryError(f"no memory for the attention of {self._num_tokens} tokens")
        return output


def _functions(library: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> dict[torch.dtype, Any]:
    functions = {dtype: library[f"headrace_{name}_{suffix}"] for dtype, suffix in _TYPES.items()}
    for function in functions.values():
        function.argtypes = arguments
        function.restype = ctypes.c_int if name == "attention" else None
    return functions


def _address(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} must be contiguous, its strides are {tensor.stride()}"
        )
    return tensor.data_ptr()


def _token_stride(heads: torch.Tensor) -> int:
    """Numbers from one token's heads [num_tokens, heads, head_dim] to the next; each token's lie side by side."""
    if not heads[:1].is_contiguous():
        raise ValueError(f"a token's heads must be contiguous, their strides are {heads.stride()}")
    return heads.stride(0)
