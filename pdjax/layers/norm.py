"""Root-mean-square norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pdjax.layers.sharding import parameter


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in float32; the weight is float32 whatever the model's dtype."""

    def __init__(self, size: int, *, epsilon: float, rngs: nnx.Rngs | None = None) -> None:
        self.weight = parameter((size,), (None,), jnp.dtype(jnp.float32), rngs, jax.nn.initializers.ones)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [..., size] -> float32 [..., size]."""
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * lax.rsqrt(variance + self.epsilon) * self.weight[...]
