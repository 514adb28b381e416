"""The frequencies of rotary position embeddings. NumPy only: model configs are read where jax is not wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies, for contexts beyond the original one."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3RopeScaling | None = None) -> np.ndarray:
    """float32 [head_dim / 2]: radians a token that each pair of coordinates turns."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    return frequencies if scaling is None else _stretch(frequencies, scaling)


def _stretch(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Slow turns are slowed by `factor`, fast ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    span = scaling.original_max_position_embeddings
    smooth = (span / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)
