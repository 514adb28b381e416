"""Picking tokens inside the compiled step, one row a request.

A row's token depends on its own logits, parameters, seed and position only, never on its neighbours in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pdjax.engine.plan import Row

MAX_BANNED = 16  # tokens that a row may exclude
NO_TOKEN = np.iinfo(np.int32).max  # past any vocabulary: scatters drop it


class SamplingRows(NamedTuple):
    """Sampling parameters of a batch: one entry a row.

    Attributes: temperature, top_p, min_p float32 [batch]; top_k int32 [batch], 0 for off; seed uint32 [batch];
    banned int32 [batch, MAX_BANNED], padded with `NO_TOKEN`.
    """

    temperature: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    seed: jax.Array | np.ndarray
    banned: jax.Array | np.ndarray


def sampling_rows(requests: list[Row], rows: int) -> SamplingRows:
    """Pack parameters into arrays of `rows` rows; the rows past the last request are greedy."""
    packed = SamplingRows(
        temperature=np.zeros(rows, np.float32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        seed=np.zeros(rows, np.uint32),
        banned=np.full((rows, MAX_BANNED), NO_TOKEN, np.int32),
    )
    for row, request in enumerate(requests):
        param = request.sampling
        packed.temperature[row] = param.temperature
        packed.top_p[row] = param.top_p
        packed.min_p[row] = param.min_p
        packed.top_k[row] = param.top_k
        packed.seed[row] = request.seed & 0xFFFFFFFF
        packed.banned[row, : len(request.banned)] = request.banned[:MAX_BANNED]
    return packed


def sample(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pick one token a row.

    Args:
        logits: float32 [batch, vocab].
        rows: the rows' parameters; temperature 0 is greedy.
        positions: int32 [batch], the position that the picked token will have: with the seed, it makes the noise.

    Returns:
        Tokens int32 [batch], and float32 [batch] their log-probabilities under softmax(logits).
    """
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    unmasked = logits
    logits = logits.at[jnp.arange(logits.shape[0])[:, None], jnp.asarray(rows.banned)].set(-jnp.inf, mode="drop")
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    tokens = lax.cond(
        jnp.any(jnp.asarray(rows.temperature) > 0),
        lambda: jnp.where(jnp.asarray(rows.temperature) > 0, _draw(logits, rows, positions), greedy),
        lambda: greedy,
    )
    chosen = jnp.take_along_axis(unmasked, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - normalizer


def _draw(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    temperature = jnp.maximum(jnp.asarray(rows.temperature), 1e-6)[:, None]
    scaled = logits / temperature
    filtered = lax.cond(
        jnp.any((jnp.asarray(rows.top_k) > 0) | (jnp.asarray(rows.top_p) < 1) | (jnp.asarray(rows.min_p) > 0)),
        lambda: _filter(scaled, rows),
        lambda: scaled,
    )

    def noise(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

    return jnp.argmax(filtered + jax.vmap(noise)(rows.seed, positions), axis=-1).astype(jnp.int32)


def _filter(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """Cut what top_k, top_p and min_p exclude, in that order, to -inf.

    Thresholds are found by bisection, because sorting a vocabulary a row costs milliseconds on CPU and one bisection
    step costs microseconds.
    """
    top_k, top_p, min_p = (jnp.asarray(rows.top_k), jnp.asarray(rows.top_p), jnp.asarray(rows.min_p))
    best = jnp.max(scaled, axis=-1, keepdims=True)
    wanted = jnp.where(top_k > 0, top_k, scaled.shape[-1])[:, None]
    # The cut keeps every value above `low`: the largest threshold under which at least `wanted` values remain.
    low = _bisect(jnp.min(scaled, axis=-1, keepdims=True) - 1, best, lambda cut: _count(scaled > cut) >= wanted)
    scaled = jnp.where(scaled > low, scaled, -jnp.inf)

    probabilities = jax.nn.softmax(scaled, axis=-1)
    kept = lambda cut: jnp.sum(jnp.where(probabilities > cut, probabilities, 0), axis=-1, keepdims=True)  # noqa: E731
    low = _bisect(jnp.full_like(best, -1.0), jnp.max(probabilities, axis=-1, keepdims=True),
                  lambda cut: kept(cut) >= top_p[:, None])  # fmt: skip
    # With top_p of 1 rounding must not drop the tail.
    allowed = (probabilities > low) | (top_p[:, None] >= 1)
    allowed &= probabilities >= min_p[:, None] * jnp.max(probabilities, axis=-1, keepdims=True)
    return jnp.where(allowed, scaled, -jnp.inf)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, axis=-1, keepdims=True)


def _bisect(low: jax.Array, high: jax.Array, holds) -> jax.Array:
    """The largest threshold in [low, high), to float32's resolution, for which `holds`; it holds at `low`."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        keep = holds(middle)
        return jnp.where(keep, middle, low), jnp.where(keep, high, middle)

    return lax.fori_loop(0, 40, halve, (low, high))[0]
