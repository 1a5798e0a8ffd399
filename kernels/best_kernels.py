"""Chooses the kernels: the compiled ones, or those in plain PyTorch where there is no compiler."""

import structlog

from headrace.kernels.layer_kernels import LayerKernels
from headrace.kernels.native_kernels import NativeKernels
from headrace.kernels.native_library import NativeUnavailable
from headrace.kernels.torch_kernels import TorchKernels

log = structlog.get_logger(__name__)


def best_kernels() -> LayerKernels:
    """The fastest kernels that this machine can have. Compiles them if need be, which takes seconds, once."""
    try:
        return NativeKernels()
    except NativeUnavailable as error:
        log.warning("no compiled kernels: attention in plain PyTorch is many times slower", reason=str(error))
        return TorchKernels()
