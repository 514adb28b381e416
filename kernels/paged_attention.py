"""Attention over pages: one token a request (decode), or a chunk of tokens with all that came before (prefill).

One kernel serves both. A block of query rows, the queries of some tokens that share a key-value head, goes over the
pages that it may see with a running softmax (FlashAttention, Dao et al. 2022, section 3.1). Decode has one block a
request and head, too few to fill a processor, so its pages are split and the parts combined (Flash-Decoding).

In comments: B batch, T tokens, H key-value heads, G query heads a key-value head, D head_dim, S tokens a page, W pages
of a table, R query rows of a block.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pdjax.kernels.geometry import Implementation, Ref, check_implementation, pallas_options

_NEVER = -1e30  # a score that no softmax sees, and whose difference to itself is still a number
_BLOCK_ROWS = 64  # of prefill
_LEAST_ROWS = 16  # what a tensor core multiplies
_HIGHEST = lax.Precision.HIGHEST  # of float32 products; a GPU would else round their operands to 10 bits


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    dtype: jnp.dtype,
    splits: int = 8,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Attention of one token a request.

    Args:
        q: [batch, heads, head_dim], any float dtype.
        pool: words [layer, page, head, K|V, slot in page, head_dim]. Its heads divide q's.
        layer: int32 scalar.
        page_table: int32 [batch, width], each request's pages in order.
        positions: int32 [batch], of each token; it sees the positions up to its own. Negative: its output is 0.
        dtype: of the values that the pool's words are: float32, or bfloat16 for uint16 words.
        splits: into how many parts the pages of a request are split, at most.
        implementation: see `pdjax.kernels`; `native` is `plain` here, `pallas` for Hopper and later.

    Returns:
        [batch, heads, head_dim] in q's dtype.

    Raises:
        ValueError: shapes that don't fit, or that the implementation does not know.
    """
    if implementation == "pallas":
        return _decode_hopper(q, pool, layer, page_table, positions, dtype=dtype, splits=splits)
    return prefill_attention(
        q[:, None],
        pool,
        layer,
        page_table,
        positions[:, None],
        dtype=dtype,
        splits=splits,
        implementation=implementation,
    )[:, 0]


def prefill_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    dtype: jnp.dtype,
    splits: int = 1,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Causal attention of chunks of any lengths, over what earlier chunks and this one have written into pages.

    Args:
        q: [batch, token, heads, head_dim]; requests of fewer tokens are filled up.
        positions: int32 [batch, token]; -1 fills up, costs no pages and gives 0.
        pool, layer, page_table, dtype, splits, implementation: as in `decode_attention`, but that there is no `pallas`.

    Returns:
        [batch, token, heads, head_dim] in q's dtype.

    Raises:
        ValueError: shapes that don't fit, or an implementation that there is not.
    """
    check_implementation(implementation)
    if implementation == "pallas":
        raise ValueError("prefill attention has no Mosaic GPU kernel: use pallas_triton, as auto does")
    if q.ndim != 4 or pool.ndim != 6 or q.shape[3] != pool.shape[5] or q.shape[2] % pool.shape[2]:
        raise ValueError(
            f"q {list(q.shape)} does not fit a pool {list(pool.shape)}: expected [batch, token, a multiple of "
            f"{pool.shape[2] if pool.ndim == 6 else '?'} heads, head_dim]"
        )
    if splits < 1:
        raise ValueError(f"splits is {splits}; expected 1 or more")
    positions = jnp.minimum(positions, page_table.shape[1] * pool.shape[4] - 1)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    plain = partial(_attend_plain, dtype=dtype)
    kernel = partial(_attend_pallas, dtype=dtype, splits=min(splits, page_table.shape[1]))
    if implementation == "auto":
        # Mosaic GPU has no reductions of what a plain body loads, so that CUDA means Triton here. For decode there is
        # a kernel in Mosaic GPU's own terms, `pallas`; it is not the default until it has run.
        return lax.platform_dependent(
            q,
            pool,
            layer,
            page_table,
            positions,
            cuda=partial(kernel, implementation="pallas_triton"),
            default=plain,
        )
    if implementation in ("plain", "native"):
        return plain(q, pool, layer, page_table, positions)
    return kernel(q, pool, layer, page_table, positions, implementation=implementation)


def _attend_plain(
    q: jax.Array, pool: jax.Array, layer: jax.Array, page_table: jax.Array, positions: jax.Array, *, dtype: jnp.dtype
) -> jax.Array:
    batch, tokens, heads, head_dim = q.shape
    kv_heads, page_size = pool.shape[2], pool.shape[4]
    words = pool[layer[0], page_table].transpose(3, 0, 2, 1, 4, 5)  # [2, B, H, W, S, D]
    keys, values = _values(words, dtype).astype(jnp.float32).reshape(2, batch, kv_heads, -1, head_dim)
    grouped = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bthgd,bhsd->bhgts", grouped, keys, precision=_HIGHEST) / math.sqrt(head_dim)
    seen = jnp.arange(page_table.shape[1] * page_size) <= positions[..., None]  # [B, T, W*S]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _NEVER), axis=-1)
    out = jnp.einsum("bhgts,bhsd->bthgd", weights, values, precision=_HIGHEST)
    out = jnp.where(positions[:, :, None, None, None] >= 0, out, 0)
    return out.reshape(q.shape).astype(q.dtype)


def _attend_pallas(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    dtype: jnp.dtype,
    splits: int,
    implementation: Implementation,
) -> jax.Array:
    batch, tokens, heads, head_dim = q.shape
    kv_heads, page_size = pool.shape[2], pool.shape[4]
    group = heads // kv_heads
    group_rows = 1 << (group - 1).bit_length()  # blocks are powers of two
    block_tokens = max(1, min(_BLOCK_ROWS, group_rows << (tokens - 1).bit_length()) // group_rows)
    block_rows = max(_LEAST_ROWS, block_tokens * group_rows)
    block_tokens = block_rows // group_rows
    blocks = -(-tokens // block_tokens)
    fill = blocks * block_tokens - tokens
    where = jnp.pad(positions, ((0, 0), (0, fill)), constant_values=-1)  # [B, blocks * block_tokens]
    rows = q.reshape(batch, tokens, kv_heads, group, head_dim) / math.sqrt(head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, fill), (0, 0), (0, group_rows - group), (0, 0)))
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, blocks, block_rows, head_dim).astype(dtype)
    of_row = jnp.repeat(where, group_rows, axis=1).reshape(batch, blocks, block_rows)
    pages = jnp.max(of_row, axis=2) // page_size + 1  # [B, blocks]; 0 where nothing is asked

    def attend(
        layer_ref: Ref, table_ref: Ref, rows_ref: Ref, where_ref: Ref, pages_ref: Ref, pool_ref: Ref, *results: Ref
    ) -> None:
        row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        block, split = part // splits, part % splits
        queries, seen_to = rows_ref[row, head, block], where_ref[row, block]  # [R, D], [R]
        count = pages_ref[row, block]
        each = (count + splits - 1) // splits

        def add_page(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, out = carry  # [R], [R], [R, D]
            page = table_ref[row, index]
            keys = _values(pool_ref[layer_ref[0], page, head, 0], dtype)  # [S, D]
            values = _values(pool_ref[layer_ref[0], page, head, 1], dtype)
            scores = _dot(queries, keys.T)  # [R, S]
            at = index * page_size + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where(at <= seen_to[:, None], scores, _NEVER)
            higher = jnp.maximum(highest, jnp.max(scores, axis=1))
            # A row that has seen nothing yet would weigh what it must not see by exp(0).
            weights = jnp.where(at <= seen_to[:, None], jnp.exp(scores - higher[:, None]), 0.0)
            fade = jnp.exp(highest - higher)
            out = out * fade[:, None] + _dot(weights.astype(dtype), values)
            return higher, total * fade + jnp.sum(weights, axis=1), out

        start = (
            jnp.full((block_rows,), _NEVER, jnp.float32),
            jnp.zeros((block_rows,), jnp.float32),
            jnp.zeros((block_rows, head_dim), jnp.float32),
        )
        carry = lax.fori_loop(split * each, jnp.minimum((split + 1) * each, count), add_page, start)
        for result, value in zip(results, carry):
            result[row, head, block, split] = value

    parts = (batch, kv_heads, blocks, splits, block_rows)
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    highest, total, out = pl.pallas_call(
        attend,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (parts, parts, (*parts, head_dim))],
        grid=(batch, kv_heads, blocks * splits),
        in_specs=[in_place] * 6,
        out_specs=[in_place] * 3,
        name="paged_attention",
        **pallas_options(implementation),
    )(layer, page_table, rows, of_row, pages, pool)
    out = combine(highest, total, out)  # [B, H, blocks, R, D]
    out = out.reshape(batch, kv_heads, blocks * block_tokens, group_rows, head_dim)[:, :, :tokens, :group]
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def _decode_hopper(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    dtype: jnp.dtype,
    splits: int,
) -> jax.Array:
    from pdjax.kernels import hopper  # not at the top: a start without a GPU need not wait for Mosaic

    batch, heads, head_dim = q.shape
    kv_heads, page_size = pool.shape[2], pool.shape[4]
    group = heads // kv_heads
    if not hopper.can_attend(group, head_dim, page_size, dtype):
        raise ValueError(
            f"the Hopper kernel does not know {dtype}, {group} query heads a key-value head, head_dim {head_dim} and "
            f"pages of {page_size}: use pallas_triton ({hopper.can_attend.__doc__})"
        )
    rows = (q / math.sqrt(head_dim)).astype(dtype).reshape(batch, kv_heads, group, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, hopper.ROWS - group), (0, 0)))
    width = page_table.shape[1]
    table = jnp.pad(page_table, ((0, 0), (0, -width % hopper.block_pages(page_size))))
    lengths = jnp.minimum(positions + 1, width * page_size)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    parts = hopper.decode_parts(rows, _values(pool, dtype), layer, table, lengths, splits=splits)
    return combine(*parts)[:, :, :group].reshape(q.shape).astype(q.dtype)


def combine(highest: jax.Array, total: jax.Array, out: jax.Array) -> jax.Array:
    """Join the splits of attention: their highest scores, sums of weights [..., split, row] and weighted values
    [..., split, row, head_dim]. Returns [..., row, head_dim]; 0 where no split has seen anything."""
    weights = jnp.exp(highest - jnp.max(highest, axis=-2, keepdims=True))
    total = jnp.sum(total * weights, axis=-2)
    out = jnp.sum(out * weights[..., None], axis=-3)
    return jnp.where(total[..., None] > 0, out / jnp.where(total > 0, total, 1.0)[..., None], 0.0)


def _values(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lax.bitcast_convert_type(words, dtype) if words.dtype == jnp.uint16 else words


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    precision = _HIGHEST if left.dtype == jnp.float32 else None
    return jnp.dot(left, right, preferred_element_type=jnp.float32, precision=precision)
