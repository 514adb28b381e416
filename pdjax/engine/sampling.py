"""Picking tokens inside the compiled step, one row a request.

A row's token depends on its own logits, parameters, history, seed and position only, never on its neighbours in the
batch. The order is: penalties, bias, bans, grammar, temperature, top_k, top_p, min_p. Log-probabilities are those of
the model itself: softmax of its logits as they are, before any of that.

What no row of a batch asks for is skipped at run time (`lax.cond`), so one program serves all options.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pdjax.engine.rows import BANNED, BIASED, MASKED, MAX_BANNED, PENALIZED, TOP, StepRows
from pdjax.engine.slots import MAX_BIAS, OUTPUT, Progress, Tables
from pdjax.layers.sharding import constrain
from pdjax.wire import SamplingParams

MAX_TOP = 20  # best tokens that can be told at a position
DRAW_BLOCK = 128  # tokens; a power of two
SORTED_FEW = 64  # a top_k up to this is found by sorting


class Picked(NamedTuple):
    """Attributes: tokens int32 [batch]; logprobs float32 [batch]; top_ids int32 and top_logprobs float32
    [batch, MAX_TOP], best first, zeros if no row asks for them."""  # fmt: skip

    tokens: jax.Array | np.ndarray
    logprobs: jax.Array | np.ndarray
    top_ids: jax.Array | np.ndarray
    top_logprobs: jax.Array | np.ndarray

    def packed(self) -> jax.Array:
        """Traced: int32 [batch, 2 + 2 * best], floats as their bits: what comes to the host in one array."""
        words = [jnp.asarray(each if each.ndim > 1 else each[:, None]) for each in self]
        return jnp.concatenate([lax.bitcast_convert_type(each, jnp.int32) for each in words], axis=1)

    @classmethod
    def unpacked(cls, packed: np.ndarray) -> Picked:
        """Views of what `packed` has made."""
        best = packed.shape[1] // 2 - 1
        floats = packed.view(np.float32)
        return cls(packed[:, 0], floats[:, 1], packed[:, 2 : 2 + best], floats[:, 2 + best :])


def problem(sampling: SamplingParams, *, top: int, vocab: int) -> str | None:
    """Why the compiled steps cannot serve these parameters, in words, or None."""
    if len(sampling.logit_bias) > MAX_BIAS:
        return f"logit_bias: {len(sampling.logit_bias)} tokens are over the {MAX_BIAS} that a request may bias"
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        return "logit_bias: a token is given twice"
    if not all(0 <= token < vocab and np.isfinite(value) for token, value in sampling.logit_bias):
        return f"logit_bias takes ids of the vocabulary of {vocab} tokens, and finite values"
    if not 0 <= top <= MAX_TOP:
        return f"top_logprobs must lie in 0..{MAX_TOP}, not {top}"
    if not sampling.repetition_penalty > 0:
        return f"repetition_penalty must be above 0, not {sampling.repetition_penalty:g}"
    if sampling.min_new_tokens > 0 and len(sampling.stop_token_ids) > MAX_BANNED - 16:
        return f"min_new_tokens: with it a request may have {MAX_BANNED - 16} stop_token_ids at most"
    if sampling.min_new_tokens > 0 and sampling.grammar is not None:
        return "min_new_tokens: a grammar says when its answer ends; give one of the two"
    return None


def sample(
    logits: jax.Array, rows: StepRows, positions: jax.Array, progress: Progress, tables: Tables
) -> Picked:  # fmt: skip
    """Pick one token a row.

    Args:
        logits: float32 [batch, vocab].
        rows: the rows' parameters.
        positions: int32 [batch], the position that the picked token will have: with the seed, it makes the noise.
        progress: what the rows' slots have seen, up to and with the token that was computed on.
        tables: the rows' bias and masks.
    """
    adjusted = lax.cond(
        rows.any(PENALIZED | BIASED | BANNED | MASKED),
        lambda: _adjust(logits, rows, progress, tables),
        lambda: logits,
    )
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    tokens = lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, _draw(adjusted, rows, positions), greedy),
        lambda: greedy,
    )
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return Picked(tokens, chosen - normalizer, *best_tokens(logits, normalizer, rows.any(TOP)))


def best_tokens(logits: jax.Array, normalizer: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids int32 and log-probabilities float32 [batch, MAX_TOP] of the best tokens, best first; zeros unless wanted."""
    count = min(MAX_TOP, logits.shape[-1])

    def find() -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logits, count)
        return ids.astype(jnp.int32), values - normalizer[:, None]

    shape = (logits.shape[0], count)
    return lax.cond(wanted, find, lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)))


def _adjust(logits: jax.Array, rows: StepRows, progress: Progress, tables: Tables) -> jax.Array:
    """Apply what rows ask for. The values of a row that does not ask stay as they are, bit for bit."""
    every = jnp.arange(logits.shape[0])[:, None]
    steps = (
        (PENALIZED, lambda logits: _penalize(logits, rows, progress.seen.at[rows.slots].get(mode="clip"))),
        (
            BIASED,
            lambda logits: logits.at[every, rows.only(BIASED, tables.bias_ids.at[rows.slots].get(mode="clip"))].add(
                tables.bias_values.at[rows.slots].get(mode="clip"), mode="drop"
            ),
        ),
        (BANNED, lambda logits: logits.at[every, rows.banned].set(-jnp.inf, mode="drop")),
        (MASKED, lambda logits: _mask(logits, rows, tables.masks.at[rows.slots].get(mode="clip"))),
    )
    for flag, apply in steps:
        logits = lax.cond(rows.any(flag), apply, lambda logits: logits, logits)
    return logits


def _penalize(logits: jax.Array, rows: StepRows, seen: jax.Array) -> jax.Array:
    """Repetition over prompt and output, as in CTRL (Keskar et al. 2019); presence and frequency over the output."""
    factor, presence, frequency = (each[:, None] for each in (rows.repetition, rows.presence, rows.frequency))
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    asked = (rows.flags & PENALIZED != 0)[:, None]
    logits = jnp.where(asked & (seen > 0), repeated, logits)
    counts = jnp.where(asked, seen // OUTPUT, 0).astype(jnp.float32)
    return logits - frequency * counts - presence * (counts > 0)


def _mask(logits: jax.Array, rows: StepRows, words: jax.Array) -> jax.Array:
    bits = (words[:, :, None] >> jnp.arange(32)) & 1  # [batch, words, 32]
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | (rows.flags & MASKED == 0)[:, None], logits, -jnp.inf)


def _draw(logits: jax.Array, rows: StepRows, positions: jax.Array) -> jax.Array:
    temperature = jnp.maximum(rows.temperature, 1e-6)[:, None]
    scaled = logits / temperature
    filtered = lax.cond(
        jnp.any((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)),
        lambda: _filter(scaled, rows),
        lambda: scaled,
    )

    def two_uniforms(seed, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (2,), jnp.float32)

    # On a mesh every device draws for itself: blocks of the vocabulary are not cut where the vocabulary is.
    return inverse_cdf(constrain(filtered, None, None), jax.vmap(two_uniforms)(rows.seeds, positions))


def inverse_cdf(scaled: jax.Array, uniforms: jax.Array) -> jax.Array:
    """int32 [batch]: tokens drawn by softmax of scaled [batch, vocab], with uniforms [batch, 2] in [0, 1).

    First a block of `DRAW_BLOCK` tokens is drawn, then one of its tokens: two numbers a row, where Gumbel noise wants
    one a token (1 ms of processor time against 11 for 8 rows of 49,152). All sums are made in an order of their own,
    so that a row's draw does not depend on how XLA reduces batches of this size.
    """
    batch, vocab = scaled.shape
    weights = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % DRAW_BLOCK))).reshape(batch, -1, DRAW_BLOCK)
    halves = blocks
    while halves.shape[-1] > 1:
        middle = halves.shape[-1] // 2
        halves = halves[..., :middle] + halves[..., middle:]
    block = _pick_weighted(halves[..., 0], uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * DRAW_BLOCK + _pick_weighted(inside, uniforms[:, 1])).astype(jnp.int32)


def _pick_weighted(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """int32 [batch]: an index of weights [batch, n], by weight. One of weight 0 is never picked."""
    sums = lax.associative_scan(jnp.add, weights, axis=-1)
    reached = (sums > uniform[:, None] * sums[:, -1:]) & (weights > 0)
    # Rounding may leave none: then the heaviest.
    return jnp.where(jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), jnp.argmax(weights, axis=-1))


def _filter(scaled: jax.Array, rows: StepRows) -> jax.Array:
    """Cut what top_k, top_p and min_p exclude, in that order, to -inf.

    Thresholds are found by bisection, because sorting a vocabulary a row costs milliseconds on CPU and one bisection
    step costs microseconds; those of a small top_k by sorting so many (8 rows of 49,152: 1.4 ms against 12).
    """
    scaled = lax.cond(jnp.any(rows.top_k > 0), lambda: _keep_best(scaled, rows.top_k), lambda: scaled)
    probabilities = jax.nn.softmax(scaled, axis=-1)
    likely = lax.cond(
        jnp.any(rows.top_p < 1),
        lambda: _likely(probabilities, rows.top_p[:, None]),
        lambda: jnp.ones_like(probabilities, bool),
    )
    allowed = likely & (probabilities >= rows.min_p[:, None] * jnp.max(probabilities, axis=-1, keepdims=True))
    return jnp.where(allowed, scaled, -jnp.inf)


def _keep_best(scaled: jax.Array, top_k: jax.Array) -> jax.Array:
    """Cut to -inf what is less than the top_k-th best of its row. A row with a top_k of 0 keeps everything."""
    sorted_few = min(SORTED_FEW, scaled.shape[-1])

    def few() -> jax.Array:
        best = lax.top_k(scaled, sorted_few)[0]
        least = jnp.take_along_axis(best, jnp.maximum(top_k - 1, 0)[:, None], axis=-1)
        return (scaled >= least) | (top_k == 0)[:, None]

    def many() -> jax.Array:
        best = jnp.max(scaled, axis=-1, keepdims=True)
        wanted = jnp.where(top_k > 0, top_k, scaled.shape[-1])[:, None]
        # The cut keeps every value above `low`: the largest threshold under which at least `wanted` values remain.
        # What is excluded already has no part in the search: between -inf and a number there is no middle.
        least = jnp.min(jnp.where(scaled > -jnp.inf, scaled, best), axis=-1, keepdims=True)
        return scaled > _bisect(least - 1, best, lambda cut: _count(scaled > cut) >= wanted)

    return jnp.where(lax.cond(jnp.all(top_k <= sorted_few), few, many), scaled, -jnp.inf)


def _likely(probabilities: jax.Array, top_p: jax.Array) -> jax.Array:
    """bool like probabilities: the fewest, the best first, that sum up to top_p [batch, 1]."""
    kept = lambda cut: jnp.sum(jnp.where(probabilities > cut, probabilities, 0), axis=-1, keepdims=True)  # noqa: E731
    best = jnp.max(probabilities, axis=-1, keepdims=True)
    low = _bisect(jnp.full_like(best, -1.0), best, lambda cut: kept(cut) >= top_p)
    # With top_p of 1 rounding must not drop the tail.
    return (probabilities > low) | (top_p >= 1)


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
