"""Log-probabilities of a prompt's own tokens, inside the compiled prefill step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.engine.sampling import MAX_TOP, best_tokens

BLOCK = 32  # positions whose logits are in memory together


class PromptLogprobs(NamedTuple):
    """Of T targets: logprobs float32 [T], top_ids int32 and top_logprobs float32 [T, MAX_TOP], best first."""

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def prompt_logprobs(
    hidden: jax.Array,
    targets: jax.Array,
    *,
    wanted: jax.Array,
    top: jax.Array,
    logits: Callable[[jax.Array], jax.Array],
    vocab: int,
) -> PromptLogprobs:
    """Traced: how likely each target is after its position, under softmax of the model's logits as they are.

    Args:
        hidden: [T, hidden_size], of the positions before the targets.
        targets: int32 [T].
        wanted: bool, whether to compute anything: without it this costs nothing, and the result is zeros.
        top: bool, whether the best tokens are wanted as well.
        logits: the model's, of hidden [n, hidden_size].
        vocab: how many logits there are.
    """
    count = targets.shape[0]
    blocks = -(-count // BLOCK)
    best = min(MAX_TOP, vocab)

    def one_block(block: tuple[jax.Array, jax.Array]) -> PromptLogprobs:
        values = logits(block[0])
        normalizer = jax.nn.logsumexp(values, axis=-1)
        chosen = jnp.take_along_axis(values, block[1][:, None], axis=-1)[:, 0]
        return PromptLogprobs(chosen - normalizer, *best_tokens(values, normalizer, top))

    def compute() -> PromptLogprobs:
        padding = blocks * BLOCK - count
        rows = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(blocks, BLOCK, -1)
        result = lax.map(one_block, (rows, jnp.pad(targets, (0, padding)).reshape(blocks, BLOCK)))
        return PromptLogprobs(*(each.reshape(blocks * BLOCK, *each.shape[2:])[:count] for each in result))

    def nothing() -> PromptLogprobs:
        return PromptLogprobs(
            jnp.zeros(count, jnp.float32), jnp.zeros((count, best), jnp.int32), jnp.zeros((count, best), jnp.float32)
        )

    return lax.cond(wanted, compute, nothing)
