"""Decode attention for Hopper, in Mosaic GPU's own terms: pages come by TMA, the tensor cores multiply.

One warpgroup has the queries of one (request, key-value head, split), filled up to the 64 rows that a warpgroup
multiplies at once. It reads blocks of 64 tokens, one asynchronous copy a page, into a ring of buffers in shared memory,
so that the next blocks are under way while one is multiplied. The parts are combined as those of `paged_attention`.

It is checked to lower for CUDA without a GPU, and, with plain products in the place of the tensor cores', runs in
Pallas' GPU interpreter. It has not been run on a GPU.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pdjax.kernels.geometry import Ref

ROWS = 64  # of one wgmma
_BLOCK_TOKENS = 64
_BUFFERS = 2
_NEVER = -1e30
_LOG2E = math.log2(math.e)


def can_attend(group: int, head_dim: int, page_size: int, dtype: jnp.dtype) -> bool:
    """Whether `decode_parts` knows these sizes: bfloat16, head_dim 64, 128, 192 or 256, pages of 8, 16, 32 or 64
    tokens, at most 64 query heads a key-value head."""
    fits = page_size >= 8 and _BLOCK_TOKENS % page_size == 0
    return dtype == jnp.bfloat16 and head_dim % 64 == 0 and head_dim <= 256 and fits and group <= ROWS


def block_pages(page_size: int) -> int:
    """Pages of one block; a page table's width is a multiple of it."""
    return _BLOCK_TOKENS // page_size


def decode_parts(
    rows: jax.Array, pool: jax.Array, layer: jax.Array, page_table: jax.Array, lengths: jax.Array, *, splits: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of each split, before `combine`.

    Args:
        rows: bfloat16 [batch, kv_heads, 64, head_dim], scaled queries, zeros past the group.
        pool: bfloat16 [layer, page, head, K|V, slot in page, head_dim].
        layer: int32 [1].
        page_table: int32 [batch, width]; width pages make whole blocks of 64 tokens.
        lengths: int32 [batch], tokens that are seen.
        splits: parts that a request's blocks are split into.

    Returns:
        highest scores and sums of weights, float32 [batch, kv_heads, splits, 64], and weighted values [..., head_dim].
    """
    batch, kv_heads, _, head_dim = rows.shape
    page_size = pool.shape[4]
    each_block = block_pages(page_size)
    if page_table.shape[1] % each_block:
        raise ValueError(f"a page table of {page_table.shape[1]} pages; expected a multiple of {each_block}")
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def attend(
        rows_ref: Ref,
        pool_ref: Ref,
        layer_ref: Ref,
        table_ref: Ref,
        lengths_ref: Ref,
        highest_ref: Ref,
        total_ref: Ref,
        out_ref: Ref,
        rows_smem: Ref,
        keys_smem: Ref,
        values_smem: Ref,
        out_smem: Ref,
        part_smem: Ref,
        rows_barrier: Ref,
        barriers: Ref,
    ) -> None:
        row, head, split = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("split")
        length, layer = lengths_ref[row], layer_ref[0]
        blocks = (length + _BLOCK_TOKENS - 1) // _BLOCK_TOKENS
        each = (blocks + splits - 1) // splits
        first = split * each
        count = jnp.maximum(jnp.minimum(first + each, blocks) - first, 0)
        plgpu.copy_gmem_to_smem(rows_ref.at[row, head], rows_smem, rows_barrier)

        def fetch(step: jax.Array | int) -> None:
            buffer = lax.rem(jnp.int32(step), jnp.int32(_BUFFERS))
            for index in range(each_block):
                page = table_ref[row, (first + step) * each_block + index]
                slots = pl.ds(index * page_size, page_size)
                for plane, smem in enumerate((keys_smem, values_smem)):
                    target = smem.at[buffer, slots]
                    plgpu.copy_gmem_to_smem(pool_ref.at[layer, page, head, plane], target, barriers.at[buffer])

        for ahead in range(_BUFFERS - 1):
            pl.when(ahead < count)(lambda ahead=ahead: fetch(ahead))
        plgpu.barrier_wait(rows_barrier)

        def add_block(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, out = carry
            buffer = lax.rem(step, jnp.int32(_BUFFERS))
            pl.when(step + _BUFFERS - 1 < count)(lambda: fetch(step + _BUFFERS - 1))
            plgpu.barrier_wait(barriers.at[buffer])

            scores = _multiply(rows_smem, keys_smem.at[buffer], transposed=True)
            at = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where(at + (first + step) * _BLOCK_TOKENS < length, scores, _NEVER)
            # The first token of a block is always seen, so that the maximum is a real score from there on.
            higher = jnp.maximum(highest, scores.max(axis=1))
            weights = jnp.exp2((scores - lax.broadcast_in_dim(higher, scores.shape, [0])) * _LOG2E)
            fade = jnp.exp2((highest - higher) * _LOG2E)
            total = total * fade + weights.sum(axis=1)
            sums = _multiply(weights.astype(jnp.bfloat16), values_smem.at[buffer])
            return higher, total, out * lax.broadcast_in_dim(fade, out.shape, [0]) + sums

        per_row = plgpu.Layout.WGMMA.reduce(1)
        start = (
            plgpu.layout_cast(jnp.full((ROWS,), _NEVER, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        )
        highest, total, out = lax.fori_loop(0, count, add_block, start)
        out_smem[...] = out
        part_smem[0] = highest
        part_smem[1] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, head, split])
        plgpu.copy_smem_to_gmem(part_smem.at[0], highest_ref.at[row, head, split])
        plgpu.copy_smem_to_gmem(part_smem.at[1], total_ref.at[row, head, split])
        plgpu.wait_smem_to_gmem(0)

    parts = (batch, kv_heads, splits, ROWS)
    ring = (_BUFFERS, _BLOCK_TOKENS, head_dim)
    kernel = plgpu.kernel(
        attend,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (parts, parts, (*parts, head_dim))],
        scratch_types=[
            plgpu.SMEM((ROWS, head_dim), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM(ring, jnp.bfloat16, transforms=transforms),
            plgpu.SMEM(ring, jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((ROWS, head_dim), jnp.float32),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2 * each_block, num_barriers=_BUFFERS),
        ],
        grid=(batch, kv_heads, splits),
        grid_names=("row", "head", "split"),
    )
    return kernel(rows, pool, layer, page_table, lengths)


def _multiply(left: Ref | jax.Array, right: Ref, *, transposed: bool = False) -> jax.Array:
    """left [64, K] by right [K, N] in shared memory, or by [N, K] transposed: float32 [64, N]."""
    columns = right.shape[0 if transposed else 1]

    def multiply(sums_ref: Ref) -> jax.Array:
        plgpu.wgmma(sums_ref, left, plgpu.transpose_ref(right, (1, 0)) if transposed else right)
        return sums_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
