"""Every implementation of the layer kernels that this machine can run."""

import pytest
import torch

from headrace.kernels.layer_kernels import LayerKernels
from headrace.kernels.native_compiler import cpu_flags, find_compiler, instruction_sets
from headrace.kernels.native_kernels import NativeKernels
from headrace.kernels.torch_kernels import TorchKernels

INSTRUCTIONS = [
    name for name, needed in instruction_sets().items() if find_compiler() and cpu_flags().issuperset(needed)
]
_made: dict[str, LayerKernels] = {"torch": TorchKernels()}


@pytest.fixture(params=["torch", *INSTRUCTIONS])
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    """The plain PyTorch ones, and the C++ ones for each instruction set."""
    if request.param not in _made:
        _made[request.param] = NativeKernels(request.param)
    return _made[request.param]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
