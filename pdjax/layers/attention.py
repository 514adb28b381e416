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

from pdjax.kernels import native

BLOCK_TOKENS = 256  # keys and values of a block, a few hundred KiB, stay in a core's cache
NEVER = -1e30  # a score that no softmax sees, and whose difference to itself is still a number


class PagedBatch(NamedTuple):
    """Where the tokens of a step live.

    Attributes:
        page_table: int32 [B, W], the pages of each request in order, 0 where there are none; W is a multiple of
            `block_width`.
        positions: int32 [B, T], each token's position in its request.
        valid: bool [B, T]; a padding token writes to page 0 and its output means nothing.
    """

    page_table: jax.Array
    positions: jax.Array
    valid: jax.Array


class Parts(NamedTuple):
    """Attention of some tokens over some of their keys and values, before it is divided by the sum of weights.

    Attributes:
        highest: float32 [B, T, H, G], the highest score; `NEVER` where nothing is seen: the rest means nothing then.
        total: float32 [B, T, H, G], the sum of weights, each relative to the highest.
        out: float32 [B, T, H, G, D], the weighted values.
    """

    highest: jax.Array
    total: jax.Array
    out: jax.Array


def write_pages(pool: jax.Array, layer: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch) -> jax.Array:
    """Write k and v [B, T, H, D] into the pool [L, P, H, 2, S, D] at their positions; returns the pool."""
    page_size, head_dim = pool.shape[4:]
    pages = jnp.take_along_axis(batch.page_table, batch.positions // page_size, axis=1)
    pages = jnp.where(batch.valid, pages, 0).reshape(-1)  # [B*T]
    slots = (batch.positions % page_size).reshape(-1)
    words = to_words(jnp.stack([k, v], axis=3), pool.dtype)  # [B, T, H, 2, D]
    words = words.reshape(-1, *words.shape[2:4], head_dim)
    return pool.at[layer, pages, :, :, slots].set(words)


def attend_prefill(q: jax.Array, pool: jax.Array, layer: jax.Array, batch: PagedBatch, dtype: jnp.dtype) -> jax.Array:
    """Causal attention of q [B, T, heads, D] over each request's pages; returns [B, T, heads, D] in q's dtype.

    Each token sees the positions up to its own, whatever earlier steps wrote them (chunked prefill).
    """
    if native.can_attend(q.shape[-1]):
        # A padding token may lie past the table.
        positions = jnp.where(batch.valid, batch.positions, 0)
        return native.attention(q, pool, layer, batch.page_table, positions).astype(q.dtype)
    return attend_prefill_plain(q, pool, layer, batch, dtype)


def attend_prefill_plain(
    q: jax.Array, pool: jax.Array, layer: jax.Array, batch: PagedBatch, dtype: jnp.dtype
) -> jax.Array:
    """`attend_prefill` without kernels."""
    return finish(attend_prefill_parts(q, pool, layer, batch, dtype), q.dtype)


def attend_prefill_parts(q: jax.Array, pool: jax.Array, layer: jax.Array, batch: PagedBatch, dtype: jnp.dtype) -> Parts:
    """`attend_prefill` over what this pool has of the pages, to be combined. A token at position -1 sees nothing."""

    def one_request(row):
        q, page_table, positions, valid = row
        return _attend(q, pool, layer, page_table, positions, jnp.max(jnp.where(valid, positions, -1)), dtype)

    rows = (q, batch.page_table, batch.positions, batch.valid)
    if q.shape[0] == 1:
        return jax.tree.map(lambda part: part[None], one_request([each[0] for each in rows]))
    return lax.map(one_request, rows)


def attend_decode(q: jax.Array, pool: jax.Array, layer: jax.Array, batch: PagedBatch, dtype: jnp.dtype) -> jax.Array:
    """Attention of one token a request: q [B, 1, heads, D] over each request's pages; returns the same shape."""
    if native.can_attend(q.shape[-1]):
        return native.attention(q, pool, layer, batch.page_table, batch.positions).astype(q.dtype)
    return attend_decode_plain(q, pool, layer, batch, dtype)


def attend_decode_plain(
    q: jax.Array, pool: jax.Array, layer: jax.Array, batch: PagedBatch, dtype: jnp.dtype
) -> jax.Array:
    """`attend_decode` without kernels."""
    return finish(attend_decode_parts(q, pool, layer, batch, dtype), q.dtype)


def attend_decode_parts(q: jax.Array, pool: jax.Array, layer: jax.Array, batch: PagedBatch, dtype: jnp.dtype) -> Parts:
    """`attend_decode` over what this pool has of the pages, to be combined. A token at position -1 sees nothing.

    A loop over requests beats one batched gather on CPU (20 against 26 ms for 30 layers of 8 rows and 256 tokens):
    the pages of one request stay in the cache between their two products, which are float32 for the same reason.
    """

    def one_request(row):
        q, page_table, positions = row
        return _attend(q, pool, layer, page_table, positions, positions[0], dtype, product_dtype=jnp.dtype(jnp.float32))

    return lax.map(one_request, (q, batch.page_table, batch.positions))


def finish(parts: Parts, dtype: jnp.dtype) -> jax.Array:
    """[B, T, heads, D] in `dtype`: the attention of which these are the only parts, or the combined ones."""
    batch, tokens, kv_heads, group, head_dim = parts.out.shape
    total = jnp.where(parts.total > 0, parts.total, 1.0)
    return (parts.out / total[..., None]).reshape(batch, tokens, kv_heads * group, head_dim).astype(dtype)


def _attend(
    q: jax.Array,  # [T, heads, D]
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,  # [W]
    positions: jax.Array,  # [T]
    last: jax.Array,
    dtype: jnp.dtype,
    product_dtype: jnp.dtype | None = None,
) -> Parts:
    """Attention over blocks of pages with a running softmax (FlashAttention, Dao et al. 2022, section 3.1).

    The loop ends with the block that holds position `last`, so that one program serves every context length at the
    cost of that length.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, page_size = pool.shape[2], pool.shape[4]
    product_dtype = product_dtype or dtype
    block_pages = block_width(page_size)
    block_tokens = block_pages * page_size
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(product_dtype)  # [T, H, G, D]

    def block(index, carry):
        highest, total, out = carry  # [H, G, T], [H, G, T], [H, G, T, D]
        pages = lax.dynamic_slice(page_table, (index * block_pages,), (block_pages,))
        keys, values = (each.astype(product_dtype) for each in _read_pages(pool, layer, pages, dtype))
        scores = _product("thgd,hsd->hgts", grouped, keys) / math.sqrt(head_dim)
        seen = index * block_tokens + jnp.arange(block_tokens)[None, :] <= positions[:, None]  # [T, S]
        scores = jnp.where(seen, scores, NEVER)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - higher[..., None])
        fade = jnp.exp(highest - higher)
        total = total * fade + jnp.sum(weights, axis=-1)
        out = out * fade[..., None] + _product("hgts,hsd->hgtd", weights.astype(product_dtype), values)
        return higher, total, out

    shape = (kv_heads, heads // kv_heads, tokens)
    start = (jnp.full(shape, NEVER), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    highest, total, out = lax.fori_loop(0, last // block_tokens + 1, block, start)
    return Parts(highest.transpose(2, 0, 1), total.transpose(2, 0, 1), out.transpose(2, 0, 1, 3))


def block_width(page_size: int) -> int:
    """Pages of one attention block; a page table's width is a multiple of it."""
    return max(1, BLOCK_TOKENS // page_size)


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


def _read_pages(
    pool: jax.Array, layer: jax.Array, page_table: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [H, W*S, D] of the pages in page_table [W]."""
    words = pool[layer, page_table]  # [W, H, 2, S, D]
    width, heads, _, page_size, head_dim = words.shape
    values = from_words(words.transpose(2, 1, 0, 3, 4), dtype)  # [2, H, W, S, D]
    values = values.reshape(2, heads, width * page_size, head_dim)
    return values[0], values[1]


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
