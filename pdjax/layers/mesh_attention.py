"""Attention on a mesh: each device writes into its own part of the pool and attends over that, as a lone device would.

The functions that do it are those of an `AttentionBackend`, called on shards (`jax.shard_map`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pdjax.layers.attention import PagedBatch, Parts, finish
from pdjax.layers.sharding import CONTEXT_AXIS, DATA_AXIS, POOL_AXES, spec_of

Write = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, PagedBatch], jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array, PagedBatch, jnp.dtype], jax.Array]
AttendParts = Callable[[jax.Array, jax.Array, jax.Array, PagedBatch, jnp.dtype], Parts]


class Attention(NamedTuple):
    """What serves one device: see `write_pages`, `attend_prefill` and `attend_prefill_parts`."""

    write: Write
    attend: Attend
    attend_parts: AttendParts


def write_and_attend(
    attention: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: PagedBatch,
    dtype: jnp.dtype,
    dp_rank: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Traced: write a step's keys and values, and attend, on the mesh of the context, if there is one.

    Args:
        attention: what does it on each device.
        q, k, v: [batch, token, heads, head_dim], k and v with the key-value heads.
        pool: see `pdjax.cache.pool`.
        layer: int32 scalar.
        batch: where the tokens live.
        dtype: of the pool's values.
        dp_rank: int32 scalar, whose pages the batch has; None: equally many rows of each dp rank in turn.

    Returns:
        Attention [batch, token, heads, head_dim] in q's dtype, and the pool.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        pool = attention.write(pool, layer, k, v, batch)
        return attention.attend(q, pool, layer, batch, dtype), pool
    rows = "rows" if dp_rank is None else None
    one_of_ranks = dp_rank is not None and DATA_AXIS in mesh.shape
    heads, of_row = (rows, "tokens", "kv_heads", None), (rows, None)
    tokens_cut = CONTEXT_AXIS in mesh.shape and spec_of(q.shape, heads, mesh)[1] is not None

    def spec(array: jax.Array, *axes: str | None) -> PartitionSpec:
        return spec_of(array.shape, axes, mesh)

    def local(q, k, v, pool, layer, batch, dp_rank):
        mine = lax.axis_index(DATA_AXIS) == dp_rank if one_of_ranks else None
        if mine is not None:
            batch = batch._replace(valid=batch.valid & mine)
        if CONTEXT_AXIS in mesh.shape:
            out, pool = _on_parts(attention, q, k, v, pool, layer, batch, dtype, tokens_cut)
        else:
            pool = attention.write(pool, layer, k, v, batch)
            out = attention.attend(q, pool, layer, batch, dtype)
        return out if mine is None else lax.psum(jnp.where(mine, out, 0), DATA_AXIS), pool

    return jax.shard_map(
        local,
        axis_names=frozenset(mesh.axis_names) - frozenset(mesh.manual_axes),  # a pipeline stage is in one already
        in_specs=(
            spec(q, *heads),
            spec(k, *heads),
            spec(v, *heads),
            spec(pool, *POOL_AXES),
            PartitionSpec(),
            jax.tree.map(lambda array: spec(array, *of_row), batch),
            PartitionSpec(),
        ),
        out_specs=(spec(q, *heads), spec(pool, *POOL_AXES)),
        check_vma=False,
    )(q, k, v, pool, layer, batch, dp_rank)


def _on_parts(
    attention: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: PagedBatch,
    dtype: jnp.dtype,
    tokens_cut: bool,
) -> tuple[jax.Array, jax.Array]:
    """On one cp part: write what is its own, attend over that, and combine with the others (Flash-Decoding's last
    step, Dao et al. 2023: parts weigh by the exponential of their highest scores).

    With the tokens of a prompt cut over the parts too, every part attends for all of them, so that all have the same
    to do whatever the tokens' places, and keeps its own tokens of the sum.
    """
    if tokens_cut:
        q, k, v = (lax.all_gather(each, CONTEXT_AXIS, axis=1, tiled=True) for each in (q, k, v))
    part, parts, size = lax.axis_index(CONTEXT_AXIS), lax.axis_size(CONTEXT_AXIS), pool.shape[4]
    page, slot = jnp.divmod(batch.positions, parts * size)  # of a page that all parts share
    written = batch._replace(positions=page * size + slot % size, valid=batch.valid & (slot // size == part))
    pool = attention.write(pool, layer, k, v, written)
    # Of the slots up to a token's own, so many are here; they come in the order of their positions.
    seen = page * size + jnp.clip(slot + 1 - part * size, 0, size)
    found = attention.attend_parts(q, pool, layer, batch._replace(positions=seen - 1), dtype)

    def join(values: jax.Array) -> jax.Array:
        if tokens_cut:
            return lax.psum_scatter(values, CONTEXT_AXIS, scatter_dimension=1, tiled=True)
        return lax.psum(values, CONTEXT_AXIS)

    weight = jnp.exp(found.highest - lax.pmax(found.highest, CONTEXT_AXIS))
    total, out = join(found.total * weight), join(found.out * weight[..., None])
    return finish(Parts(total, total, out), q.dtype), pool
