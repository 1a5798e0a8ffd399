"""Rotary frequencies and their scaling to longer contexts, as cosines and sines.

Formulas, with d the head size, θ the base, s the factor, and the wavelength λ = 2π / frequency:

- default:  frequency[i] = θ^(-2i/d)                                                   (https://arxiv.org/abs/2104.09864)
- linear:   frequency / s                                                              (https://arxiv.org/abs/2306.15595)
- dynamic:  θ' = θ (s L / L0 - (s - 1))^(d / (d - 2)) once the context L exceeds the original L0
            (NTK-aware scaling, appendix B.1 of https://arxiv.org/abs/2309.00071)
- llama3:   frequency / s where λ > L0 / low, frequency where λ < L0 / high, blended between (section 3 of
            https://arxiv.org/abs/2407.21783, with the published factors)
- yarn:     frequency / s and frequency, blended by the number of rotations within L0, and cos and sin times an
            attention factor (sections 3.2 to 3.4 of https://arxiv.org/abs/2309.00071)
"""

import math

import torch

from headrace.core_service.models.spec import ModelSpec, RopeScalingKind, RopeSpec, yarn_attention_factor

# Positions whose cosines and sines are computed at once. Always as many: nothing promises that a number's cosine has
# the same bits in a tensor of another shape.
POSITIONS_AT_ONCE = 64


class RotaryEmbedding:
    """Cosines and sines of all positions, computed when a position is first reached."""

    def __init__(self, spec: ModelSpec, max_len: int) -> None:
        self._frequencies, self._attention_factor = rotary_frequencies(spec, max_len)
        size = -(-max_len // POSITIONS_AT_ONCE) * POSITIONS_AT_ONCE
        # Takes memory only as it is filled.
        self._cos, self._signed_sin = torch.empty(size, 1, spec.head_dim), torch.empty(size, 1, spec.head_dim)
        self._num_filled = 0

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for `kernels.rope` of positions [num_tokens]: each [num_tokens, 1, head_dim]."""
        last = int(positions.max())
        while self._num_filled <= last:
            self._fill()
        return self._cos.index_select(0, positions), self._signed_sin.index_select(0, positions)

    def _fill(self) -> None:
        rows = slice(self._num_filled, self._num_filled + POSITIONS_AT_ONCE)
        angles = torch.arange(rows.start, rows.stop).float()[:, None, None] * self._frequencies
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        self._cos[rows] = torch.cat((cos, cos), dim=-1)
        self._signed_sin[rows] = torch.cat((-sin, sin), dim=-1)
        self._num_filled = rows.stop


def rotary_frequencies(spec: ModelSpec, max_len: int) -> tuple[torch.Tensor, float]:
    """Angle of one position for each pair of dimensions [head_dim / 2], and the factor of cos and sin.

    Dynamic scaling depends on the context's length. Elsewhere the base grows with each sequence; here it is fixed at
    what suits `max_len`, the longest context served, because keys in the cache keep the rotation that they were
    written with.
    """
    rope = spec.rope
    original = rope.original_max_position_embeddings or spec.max_position_embeddings
    theta = rope.theta
    if rope.scaling is RopeScalingKind.DYNAMIC and max_len > original:
        theta *= (rope.factor * max_len / original - (rope.factor - 1)) ** (spec.head_dim / (spec.head_dim - 2))
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / theta**exponents
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors)
    if rope.scaling is RopeScalingKind.LINEAR:
        return frequencies / rope.factor, 1.0
    if rope.scaling is RopeScalingKind.LLAMA3:
        return _llama3(frequencies, rope, original), 1.0
    if rope.scaling is RopeScalingKind.YARN:
        return _yarn(frequencies, rope, original), _attention_factor(rope)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, rope: RopeSpec, original: int) -> torch.Tensor:
    rotations = original * frequencies / (2 * math.pi)  # within the original context: original / λ
    keep = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeSpec, original: int) -> torch.Tensor:
    num_pairs = len(frequencies)
    low = _dimension_of_rotations(rope.beta_fast, rope, num_pairs, original)
    high = _dimension_of_rotations(rope.beta_slow, rope, num_pairs, original)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low if high != low else 0.001
    keep = 1 - ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _dimension_of_rotations(rotations: float, rope: RopeSpec, num_pairs: int, original: int) -> float:
    """The pair of dimensions (not whole) that turns `rotations` times within the original context."""
    return num_pairs * math.log(original / (rotations * 2 * math.pi)) / math.log(rope.theta)


def _attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_attention_factor(rope.factor, rope.mscale) / yarn_attention_factor(rope.factor, rope.mscale_all_dim)
    return yarn_attention_factor(rope.factor)
