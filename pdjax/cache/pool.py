"""The KV pool: one sharded array a state, donated through every step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.cache.spec import StateSpec


def pool_shape(spec: StateSpec, pages: int) -> tuple[int, int, int, int, int, int]:
    """Axes [layer, page, head, K|V, slot in page, head_dim]: one (layer, page, head) is one contiguous run."""
    return (spec.layers, pages, spec.heads, 2, spec.page_size, spec.head_dim)


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Heads are cut over the mesh axis tp."""
    return NamedSharding(mesh, PartitionSpec(None, None, "tp"))


def create_pool(spec: StateSpec, pages: int, mesh: Mesh) -> jax.Array:
    """A pool of zeros, in the state's word dtype, page 0 for padding."""
    zeros = jax.jit(lambda: jnp.zeros(pool_shape(spec, pages), spec.word_dtype), out_shardings=pool_sharding(mesh))
    return zeros()


def pool_addresses(pool: jax.Array) -> tuple[int, ...]:
    """Where this process's shards lie. Donation keeps them; a change means that something held a view."""
    return tuple(shard.data.unsafe_buffer_pointer() for shard in pool.addressable_shards)
