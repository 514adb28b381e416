"""The gated MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.layers.linear import Linear


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up being one product with a weight [mlp, 2, hidden].

    The axis that tensor parallelism cuts comes first, so that the weight can be taken as a matrix without moving it.
    """

    def __init__(self, hidden_size: int, mlp_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None = None) -> None:
        self.gate_up = Linear((mlp_size, 2), hidden_size, axes=("mlp", None, None), dtype=dtype, rngs=rngs)
        self.down = Linear((hidden_size,), mlp_size, axes=(None, "mlp"), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden] -> float32 [..., hidden]."""
        both = self.gate_up(x)  # [..., mlp, 2]
        return self.down(jax.nn.silu(both[..., 0]) * both[..., 1])
