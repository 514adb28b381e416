"""The oracle of attention in these tests: causal and dense over one call's tokens, nothing kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.models.checkpoint import LoadedModel


def attend(layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """See `pdjax.models.llama.Attend`."""
    group, tokens = q.shape[2] // k.shape[2], q.shape[1]
    keys, values = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, keys, preferred_element_type=jnp.float32) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype), cache


class DenseModel:
    """Logits of whole texts. Texts are padded at the end to `length`, which causal attention does not see."""

    def __init__(self, model: LoadedModel, length: int) -> None:
        self._leaves, self._length = model.leaves, length

        def run(leaves: list[jax.Array], token_ids: jax.Array) -> jax.Array:
            module = model.merge(leaves)
            positions = jnp.arange(length, dtype=jnp.int32)[None]
            hidden, _ = module(token_ids, positions, None, attend)
            return module.logits(hidden)

        self._run = jax.jit(run)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """float32 [tokens, vocab]."""
        padded = np.zeros((1, self._length), np.int32)
        padded[0, : len(token_ids)] = token_ids
        return np.asarray(self._run(self._leaves, padded))[0, : len(token_ids)]

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """The next `count` most likely tokens, end-of-sequence tokens included."""
        ids = list(token_ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(token_ids) :]
