"""Paged attention in plain JAX: write a step's keys and values into pages, attend over a request's pages.

The interface is what a kernel would have: queries, new keys and values, the pool, a page table and positions. In
comments: B batch, T tokens, W pages of a table, S tokens a page, H key-value heads, G query heads a key-value head,
D head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class PagedBatch(NamedTuple):
    """Where the tokens of a step live.

    Attributes:
        page_table: int32 [B, W], the pages of each request in order, 0 where there are none.
        positions: int32 [B, T], each token's position in its request.
        valid: bool [B, T]; a padding token writes to page 0 and its output means nothing.
    """

    page_table: jax.Array
    positions: jax.Array
    valid: jax.Array


def write_pages(pool: jax.Array, layer: int, k: jax.Array, v: jax.Array, batch: PagedBatch) -> jax.Array:
    """Write k and v [B, T, H, D] into the pool [L, P, H, 2, S, D] at their positions; returns the pool."""
    page_size, head_dim = pool.shape[4:]
    pages = jnp.take_along_axis(batch.page_table, batch.positions // page_size, axis=1)
    pages = jnp.where(batch.valid, pages, 0).reshape(-1)  # [B*T]
    slots = (batch.positions % page_size).reshape(-1)
    words = to_words(jnp.stack([k, v], axis=3), pool.dtype)  # [B, T, H, 2, D]
    words = words.reshape(-1, *words.shape[2:4], head_dim)
    return pool.at[layer, pages, :, :, slots].set(words)


def attend_prefill(q: jax.Array, pool: jax.Array, layer: int, batch: PagedBatch, dtype: jnp.dtype) -> jax.Array:
    """Causal attention of q [B, T, heads, D] over each request's pages; returns [B, T, heads, D] in q's dtype.

    Each token sees the positions up to its own, whatever earlier steps wrote them (chunked prefill).
    """

    def one_request(q, page_table, positions):
        keys, values = _read_pages(pool, layer, page_table, dtype)  # [H, W*S, D]
        tokens, heads, head_dim = q.shape
        q = q.reshape(tokens, keys.shape[0], heads // keys.shape[0], head_dim)  # [T, H, G, D]
        scores = _product("thgd,hsd->hgts", q, keys) / math.sqrt(head_dim)
        seen = jnp.arange(keys.shape[1])[None, :] <= positions[:, None]  # [T, W*S]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        out = _product("hgts,hsd->thgd", weights.astype(values.dtype), values)
        return out.reshape(tokens, heads, head_dim).astype(q.dtype)

    if q.shape[0] == 1:
        return one_request(q[0], batch.page_table[0], batch.positions[0])[None]
    return lax.map(lambda row: one_request(*row), (q, batch.page_table, batch.positions))


def attend_decode(q: jax.Array, pool: jax.Array, layer: int, batch: PagedBatch, dtype: jnp.dtype) -> jax.Array:
    """Attention of one token a request: q [B, 1, heads, D] over each request's pages; returns the same shape.

    A loop over requests beats one batched gather on CPU (20 against 26 ms for 30 layers of 8 rows and 256 tokens):
    the pages of one request stay in the cache between their two products.
    """

    def one_request(row):
        q, page_table, positions = row
        keys, values = _read_pages(pool, layer, page_table, jnp.float32 if dtype == jnp.float32 else dtype)
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
        heads, head_dim = q.shape[1:]
        grouped = q.astype(jnp.float32).reshape(keys.shape[0], heads // keys.shape[0], head_dim)  # [H, G, D]
        scores = jnp.einsum("hgd,hsd->hgs", grouped, keys) / math.sqrt(head_dim)
        seen = jnp.arange(keys.shape[1]) <= positions[0]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hgs,hsd->hgd", weights, values).reshape(1, heads, head_dim).astype(q.dtype)

    return lax.map(one_request, (q, batch.page_table, batch.positions))


def to_words(values: jax.Array, word_dtype: jnp.dtype) -> jax.Array:
    """Values as the pool stores them: 2-byte types as uint16."""
    if word_dtype == jnp.uint16:
        return lax.bitcast_convert_type(values, jnp.uint16)
    return values.astype(word_dtype)


def from_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `to_words`."""
    if words.dtype == jnp.uint16:
        return lax.bitcast_convert_type(words, dtype)
    return words


def _read_pages(pool: jax.Array, layer: int, page_table: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values [H, W*S, D] of the pages in page_table [W]."""
    words = pool[layer, page_table]  # [W, H, 2, S, D]
    width, heads, _, page_size, head_dim = words.shape
    values = from_words(words.transpose(2, 1, 0, 3, 4), dtype)  # [2, H, W, S, D]
    values = values.reshape(2, heads, width * page_size, head_dim)
    return values[0], values[1]


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
