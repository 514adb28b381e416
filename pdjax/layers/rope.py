"""Rotary position embeddings: the halves of a head are the two coordinates that turn (Hugging Face's order)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def rotary_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """float32 cos and sin [..., 1, head_dim / 2] of positions [...], ready to meet an axis of heads."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn float32 x [batch, tokens, heads, head_dim] by the tables of its positions."""
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
