from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pdjax.layers.rope import apply_rotary, rotary_tables
from pdjax.layers.rope_frequencies import Llama3RopeScaling, inverse_frequencies


def turned(x: np.ndarray, positions: list[int]) -> np.ndarray:
    tables = rotary_tables(jnp.array([positions]), inverse_frequencies(x.shape[-1], 10_000.0))
    return np.asarray(apply_rotary(jnp.asarray(x), *tables))


def test_products_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 2, 32)).astype(np.float32)
    near = (turned(q, [7]) * turned(k, [3])).sum(-1)
    far = (turned(q, [1007]) * turned(k, [1003])).sum(-1)
    np.testing.assert_allclose(near, far, atol=1e-3)


def test_position_zero_changes_nothing():
    x = np.random.default_rng(0).standard_normal((1, 1, 3, 8)).astype(np.float32)
    np.testing.assert_array_equal(turned(x, [0]), x)


def test_llama_3_slows_slow_turns_and_keeps_fast_ones():
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, original_max_position_embeddings=8192)
    plain, stretched = inverse_frequencies(128, 5e5), inverse_frequencies(128, 5e5, scaling)
    np.testing.assert_array_equal(stretched[:10], plain[:10])
    np.testing.assert_allclose(stretched[-10:], plain[-10:] / 8, rtol=1e-6)
    assert (np.diff(stretched) < 0).all()
