"""The KV pool: one sharded array a state, donated through every step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from pdjax.cache.spec import StateSpec
from pdjax.layers.sharding import DATA_AXIS, POOL_AXES, spec_of


def pool_shape(spec: StateSpec, pages: int) -> tuple[int, int, int, int, int, int]:
    """Axes [layer, page, head, K|V, slot in page, head_dim]: one (layer, page, head) is one contiguous run."""
    return (spec.layers, pages, spec.heads, 2, spec.page_size, spec.head_dim)


def create_pool(spec: StateSpec, pages: int, mesh: Mesh) -> jax.Array:
    """A pool of zeros, in the state's word dtype: `pages` for each dp rank, of which page 0 is for padding."""
    shape = pool_shape(spec, pages * mesh.shape.get(DATA_AXIS, 1))
    sharding = NamedSharding(mesh, spec_of(shape, POOL_AXES, mesh))
    return jax.jit(lambda: jnp.zeros(shape, spec.word_dtype), out_shardings=sharding)()


def pool_addresses(pool: jax.Array) -> tuple[int, ...]:
    """Where this process's shards lie. Donation keeps them; a change means that something held a view."""
    return tuple(shard.data.unsafe_buffer_pointer() for shard in pool.addressable_shards)
