"""The Llama family: Llama, SmolLM2, and Qwen2 (which adds biases to query, key and value).

The residual stream and the norms are float32; products take their inputs in the model's dtype and give float32.
Layers are unrolled, each with its own weights (see `pdjax.models.leaves` for how they lie): on CPU a decode step of 8
rows took 38 ms so, 149 ms as a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.layers.embedding import Embedding
from pdjax.layers.linear import Linear
from pdjax.layers.mlp import GatedMLP
from pdjax.layers.norm import RMSNorm
from pdjax.layers.rope import apply_rotary, rotary_tables
from pdjax.layers.rope_frequencies import inverse_frequencies
from pdjax.layers.sharding import constrain
from pdjax.models.config import ModelConfig

# (layer int32 scalar, q [batch, tokens, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim], cache)
# -> (out like q, cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Projections and rotary embedding around whatever attends.

    Query, key and value are one weight [kv_heads, group + 2, head_dim, hidden]: each key-value head lies with the
    query heads that read it, so that cutting the first axis is all that tensor parallelism needs.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        self.dtype = dtype
        self.qkv = Linear(
            (config.num_kv_heads, config.group_size + 2, config.head_dim),
            config.hidden_size,
            axes=("kv_heads", None, None, None),
            dtype=dtype,
            bias=config.attention_bias,
            rngs=rngs,
        )
        self.out = Linear(
            (config.hidden_size,),
            config.num_heads * config.head_dim,
            axes=(None, "heads"),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self, layer: jax.Array, x: jax.Array, rotary: tuple[jax.Array, jax.Array], cache: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """x float32 [batch, tokens, hidden] -> the same shape and dtype, and the cache."""
        with jax.named_scope("qkv"):
            qkv = self.qkv(x)  # [batch, tokens, kv_heads, group + 2, head_dim]
            batch, tokens, _, _, head_dim = qkv.shape
            q = qkv[..., :-2, :].reshape(batch, tokens, -1, head_dim)
            q = apply_rotary(q, *rotary).astype(self.dtype)
            k = apply_rotary(qkv[..., -2, :], *rotary).astype(self.dtype)
            v = qkv[..., -1, :].astype(self.dtype)
        with jax.named_scope("attend"):
            attended, cache = attend(layer, q, k, v, cache)
        with jax.named_scope("out"):
            return self.out(attended.reshape(batch, tokens, -1)), cache


class Layer(nnx.Module):
    """One decoder layer, norms first."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self, layer: jax.Array, x: jax.Array, rotary: tuple[jax.Array, jax.Array], cache: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """x float32 [batch, tokens, hidden] -> the same shape and dtype, and the cache."""
        # On a mesh each dp rank attends for its rows, all of them share the MLP of all rows, and each cp part has its
        # share of a prompt's tokens.
        with jax.named_scope("attention"):
            normed = constrain(self.attention_norm(x), "rows", "tokens", None)
            attended, cache = self.attention(layer, normed, rotary, cache, attend)
            x = constrain(x + attended, "rows", "tokens", None)
        with jax.named_scope("mlp"):
            x = x + self.mlp(constrain(self.mlp_norm(x), None, "tokens", None))
            return constrain(x, "rows", "tokens", None), cache


class Llama(nnx.Module):
    """The decoder. `dtype` (float32 or bfloat16) is that of weights, of q, k and v, and of the products' inputs."""

    def __init__(self, config: ModelConfig, dtype: Any, *, rngs: nnx.Rngs | None = None) -> None:
        dtype = jnp.dtype(dtype)
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        tied = config.tie_word_embeddings
        self.head = None if tied else Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """Run the layers.

        Args:
            token_ids: int32 [batch, tokens].
            positions: int32 [batch, tokens], each token's position in its request.
            cache: what `attend` keeps, threaded through the layers as it is.
            attend: called once a layer, see `Attend`; q and k come with rotary embeddings applied, all in the dtype.

        Returns:
            hidden float32 [batch, tokens, hidden], after the final norm, and the cache.
        """
        x, cache = self.run_layers(self.layer_states(), self.enter(token_ids), positions, cache, attend)
        return self.leave(x), cache

    def enter(self, token_ids: jax.Array) -> jax.Array:
        """int32 [batch, tokens] -> x float32 [batch, tokens, hidden], before the first layer."""
        with jax.named_scope("embed"):
            return self.embed(token_ids)

    def leave(self, x: jax.Array) -> jax.Array:
        """x after the last layer -> hidden, as a call returns it."""
        with jax.named_scope("norm"):
            return constrain(self.norm(x), None, None, None)

    def layer_states(self) -> list[nnx.State]:
        """The layers' weights, in order."""
        return [nnx.state(layer) for layer in self.layers]

    def run_layers(
        self, states: list[nnx.State], x: jax.Array, positions: jax.Array, cache: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """Run the layers of these weights, which `attend` knows by their places in the list; x keeps its shape."""
        with jax.named_scope("rotary"):
            config = self.config
            frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
            rotary = rotary_tables(positions, frequencies)
        graph = nnx.graphdef(self.layers[0])

        # All layers are one traced function: without that, tracing and lowering 30 of them takes a second a program.
        # XLA inlines the calls, so the compiled step is the same.
        @jax.jit
        def run_layer(state, index, x, cache):
            return nnx.merge(graph, state)(index, x, rotary, cache, attend)

        for index, state in enumerate(states):
            with jax.named_scope(f"layer_{index}"):
                x, cache = run_layer(state, jnp.int32(index), x, cache)
        return x, cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., hidden] -> float32 [..., vocab]."""
        with jax.named_scope("logits"):
            logits = (self.embed if self.head is None else self.head).logits(hidden)
            return constrain(logits, *[None] * (logits.ndim - 1), "vocab")
