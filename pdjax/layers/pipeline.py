"""Pipeline parallelism: each stage of a mesh (axis pp) runs its own layers, and tokens pass through the stages.

The tokens of a step are cut into microchunks that follow each other, as in TeraPipe (Li et al. 2021): at tick t stage s
has microchunk t - s. Causal attention makes that right, because a stage has written a microchunk's keys and values
before the next microchunk comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pdjax.layers.attention import PagedBatch
from pdjax.layers.sharding import PIPELINE_AXIS

# A stage waits in stages - 1 of (microchunks + stages - 1) ticks, which GPipe (Huang et al. 2019) found not to matter
# from four a stage on; with more, weights are read more often. 512 tokens of SmolLM2 in two stages on two cores took
# 2484 ms with one microchunk a stage, 2109 with two, 1946 with four, 2133 with eight; without stages 1979.
MICROCHUNKS_PER_STAGE = 4
LEAST_TOKENS = 16  # of a microchunk

# (the layers' weights, x, where its tokens live, pool) -> (x after the layers, pool)
RunLayers = Callable[[Any, jax.Array, PagedBatch, jax.Array], tuple[jax.Array, jax.Array]]


def through_stages(
    run: RunLayers, weights: Any, x: jax.Array, batch: PagedBatch, pool: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Traced: run the layers of all stages of the mesh of the context; without an axis pp, `run` as it is.

    Args:
        run: runs as many layers as it is given, on whatever part of the pool it is given.
        weights: a tree of arrays, each [stage, ...] where there are stages.
        x: float32 [batch, tokens, hidden].
        batch: where the tokens live; in each row the valid ones come first.
        pool: see `pdjax.cache.pool`; its layers are cut over pp.

    Returns:
        x after the last layer, of the same shape, on every stage; and the pool.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if PIPELINE_AXIS not in mesh.shape:
        return run(weights, x, batch, pool)
    stages, tokens = mesh.shape[PIPELINE_AXIS], x.shape[1]
    microchunks = max(1, min(MICROCHUNKS_PER_STAGE * stages, tokens // LEAST_TOKENS))
    size = -(-tokens // microchunks)

    def cut(array: jax.Array) -> jax.Array:
        """[batch, tokens, ...] -> [microchunks, batch, size, ...]"""
        rows, _, *rest = array.shape
        padded = jnp.pad(array, [(0, 0), (0, microchunks * size - tokens), *[(0, 0) for _ in rest]])
        return jnp.moveaxis(padded.reshape(rows, microchunks, size, *rest), 1, 0)

    def on_stage(weights, x, positions, valid, page_table, pool):
        weights = jax.tree.map(lambda each: each[0], weights)
        stage = lax.axis_index(PIPELINE_AXIS)
        used = jnp.sum(jnp.any(valid, axis=(1, 2)))

        def tick(t, carry):
            pool, arrived, done = carry
            # A stage that waits computes all the same, with no token valid, since the collectives of its layers want
            # every stage to take part.
            at = jnp.clip(t - stage, 0, microchunks - 1)
            here = (t >= stage) & (t - stage < used)
            part = PagedBatch(page_table, positions[at], valid[at] & here)
            after, pool = run(weights, jnp.where(stage == 0, x[at], arrived), part, pool)
            done = done.at[at].set(jnp.where(here, after, done[at]))
            onward = [(i, i + 1) for i in range(stages - 1)]
            return pool, lax.ppermute(after, PIPELINE_AXIS, onward), done

        start = pool, jnp.zeros_like(x[0]), jnp.zeros_like(x)
        pool, _, done = lax.fori_loop(0, used + stages - 1, tick, start)
        return lax.psum(jnp.where(stage == stages - 1, done, 0), PIPELINE_AXIS), pool

    whole, by_stage = PartitionSpec(), PartitionSpec(PIPELINE_AXIS)
    done, pool = jax.shard_map(
        on_stage,
        axis_names={PIPELINE_AXIS},
        in_specs=(by_stage, whole, whole, whole, whole, by_stage),
        out_specs=(whole, by_stage),
        check_vma=False,
    )(weights, cut(x), cut(batch.positions), cut(batch.valid), batch.page_table, pool)
    joined = jnp.moveaxis(done, 0, 1).reshape(x.shape[0], microchunks * size, -1)  # [batch, padded tokens, hidden]
    return joined[:, :tokens], pool
