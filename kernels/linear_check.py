"""Checks, when a model is loaded, that its linear layers give a row the same bits in any batch.

What passes is noted in the cache, so that the next start has nothing to do.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import structlog
import torch

from headrace.common.demo_model import cache_dir
from headrace.kernels.linear import BLOCK_ROWS, PackedLinear
from headrace.kernels.native_compiler import cpu_kind

# Numbers of rows that are tried: around the sizes at which libraries change their ways.
ROW_COUNTS = (*range(1, 10), 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256)
# Multiplications spent on a shape: large shapes are tried with fewer numbers of rows, smaller ones first.
MOST_MULTIPLICATIONS = 10_000_000_000
# Raise when the check, or what it leads to, changes.
CHECK_VERSION = 1

log = structlog.get_logger(__name__)


@torch.inference_mode()
def check_linears(layers: Iterable[PackedLinear], cache: Path | None = None) -> int:
    """Has layers whose bits depend on the number of rows compute in blocks; returns how many layers do.

    One layer of each shape is tried, with the number of threads that torch has now. `cache` is the folder for the notes
    (default: kernels/ in the user's cache).
    """
    by_shape: dict[str, list[PackedLinear]] = {}
    for layer in layers:
        by_shape.setdefault(_shape(layer), []).append(layer)
    note = (cache or cache_dir() / "kernels") / f"linears-{_digest(by_shape)}.json"
    failing = _read(note)
    if failing is None:
        failing = [shape for shape, same in by_shape.items() if not is_invariant(same[0])]
        _write(note, failing)
    for shape in failing:
        for layer in by_shape[shape]:
            layer.in_blocks = True
        if is_invariant(by_shape[shape][0]):
            log.info("a linear layer is computed in blocks of rows, to be the same in any batch", shape=shape)
        else:
            log.warning("a linear layer's results depend on the batch", shape=shape)
    return sum(len(by_shape[shape]) for shape in failing)


def is_invariant(layer: PackedLinear) -> bool:
    """Whether made-up rows get the same bits in different numbers, and in another order."""
    x = torch.randn(ROW_COUNTS[-1], layer.in_features, generator=torch.Generator().manual_seed(0)).to(layer.dtype)
    expected = layer(x[:BLOCK_ROWS])
    if not torch.equal(layer(x[:BLOCK_ROWS].flip(0)).flip(0), expected):
        return False
    left = MOST_MULTIPLICATIONS // (layer.in_features * layer.out_features)
    for rows in ROW_COUNTS:
        left -= rows
        if left < 0:
            break
        common = min(rows, BLOCK_ROWS)
        if not torch.equal(layer(x[:rows])[:common], expected[:common]):
            return False
    return True


def _shape(layer: PackedLinear) -> str:
    facts = [f"{layer.out_features}x{layer.in_features}", str(layer.dtype).removeprefix("torch.")]
    return " ".join(facts + ["packed"] * layer.packed + ["bias"] * layer.has_bias)


def _digest(shapes: Iterable[str]) -> str:
    """Of everything that the outcome depends on."""
    facts = [str(CHECK_VERSION), str(torch.__version__), torch.backends.cpu.get_cpu_capability(), cpu_kind()]
    facts += [str(torch.get_num_threads()), *sorted(shapes)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]


def _read(note: Path) -> list[str] | None:
    """The shapes that failed; None if there is no note that can be read."""
    try:
        failing = json.loads(note.read_text())["failing"]
        return [str(shape) for shape in failing]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(note: Path, failing: list[str]) -> None:
    """The note appears whole or not at all. A cache that cannot be written costs the next start the same check."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, prefix=".linears-", delete=False) as file:
            json.dump({"failing": failing}, file)
        os.replace(file.name, note)
    except OSError as error:
        log.warning("the check of the linear layers cannot be noted", path=str(note), reason=str(error))
