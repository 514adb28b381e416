"""The gated MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.layers.linear import Linear


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up being one product with a weight [2, mlp, hidden]."""

    def __init__(self, hidden_size: int, mlp_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None = None) -> None:
        self.gate_up = Linear((2, mlp_size), hidden_size, axes=(None, "mlp", None), dtype=dtype, rngs=rngs)
        self.down = Linear((hidden_size,), mlp_size, axes=(None, "mlp"), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden] -> float32 [..., hidden]."""
        both = self.gate_up(x)  # [..., 2, mlp]
        return self.down(jax.nn.silu(both[..., 0, :]) * both[..., 1, :])
