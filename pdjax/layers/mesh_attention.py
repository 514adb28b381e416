"""Attention on a mesh: each device writes into its own part of the pool and attends over that, as a lone device would.

The functions that do it are those of an `AttentionBackend`, called on shards (`jax.shard_map`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.layers.attention import PagedBatch
from pdjax.layers.sharding import DATA_AXIS, POOL_AXES, spec_of

Write = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, PagedBatch], jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array, PagedBatch, jnp.dtype], jax.Array]


def write_and_attend(
    write: Write,
    attend: Attend,
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
        write, attend: as for one device.
        q, k, v: [batch, token, heads, head_dim], k and v with the key-value heads.
        pool: see `pdjax.cache.pool`.
        layer: int32 scalar.
        batch: where the tokens live.
        dtype: of the pool's values.
        dp_rank: int32 scalar, whose pages the batch has; None: equally many rows of each dp rank in turn.

    Returns:
        What `attend` returns, and the pool.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        pool = write(pool, layer, k, v, batch)
        return attend(q, pool, layer, batch, dtype), pool
    rows = "rows" if dp_rank is None else None

    def spec(array: jax.Array, *axes: str | None) -> jax.sharding.PartitionSpec:
        return spec_of(array.shape, axes, mesh)

    heads, of_row = (rows, None, "kv_heads", None), (rows, None)

    def local(q, k, v, pool, layer, batch, dp_rank):
        mine = None if dp_rank is None or DATA_AXIS not in mesh.shape else lax.axis_index(DATA_AXIS) == dp_rank
        if mine is not None:
            batch = batch._replace(valid=batch.valid & mine)
        pool = write(pool, layer, k, v, batch)
        out = attend(q, pool, layer, batch, dtype)
        return out if mine is None else lax.psum(jnp.where(mine, out, 0), DATA_AXIS), pool

    return jax.shard_map(
        local,
        in_specs=(
            spec(q, *heads),
            spec(k, *heads),
            spec(v, *heads),
            spec(pool, *POOL_AXES),
            jax.sharding.PartitionSpec(),
            jax.tree.map(lambda array: spec(array, *of_row), batch),
            jax.sharding.PartitionSpec(),
        ),
        out_specs=(spec(q, *heads), spec(pool, *POOL_AXES)),
        check_vma=False,
    )(q, k, v, pool, layer, batch, dp_rank)
