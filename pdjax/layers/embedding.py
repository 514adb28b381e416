"""The token embedding, and the vocabulary product that may share its matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.layers.linear import contract_last
from pdjax.layers.sharding import parameter


class Embedding(nnx.Module):
    """A matrix [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None = None) -> None:
        self.weight = parameter((vocab_size, hidden_size), ("vocab", None), dtype, rngs)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32 [...] -> float32 [..., hidden]. Ids outside the vocabulary are taken as the nearest inside."""
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip").astype(jnp.float32)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., hidden] -> float32 [..., vocab]."""
        return contract_last(hidden, self.weight[...])
