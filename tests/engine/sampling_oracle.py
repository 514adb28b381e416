"""What sampling options do to logits, in NumPy and one row at a time: written from their definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pdjax.wire import SamplingParams


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [..., vocab]."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def adjusted(
    logits: np.ndarray,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
) -> np.ndarray:
    """The logits [vocab] that the next token is picked from."""
    result = logits.astype(np.float64)
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token, count in Counter(output).items():
        result[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, value in sampling.logit_bias:
        result[token] += value
    for token in banned:
        result[token] = -np.inf
    if allowed is not None:
        outside = np.ones(len(result), bool)
        outside[list(allowed)] = False
        result[outside] = -np.inf
    return result
