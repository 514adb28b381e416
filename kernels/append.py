"""Append: a step's keys and values, from the model into the pages of its requests, in place.

Each token is one row of K and one of V in every head, 2 * heads runs of `head_dim` words: the pages are what they are
so that attention and transfers read long runs, and this is what that costs.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pdjax.kernels.geometry import Implementation, Ref, check_implementation, pallas_options

_LANES = 128  # threads of a warpgroup; Mosaic GPU gives each of them the same number of words


def append_pages(
    pool: jax.Array,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Write k and v at their positions; the caller's compiled function donates the pool.

    Args:
        pool: words [layer, page, head, K|V, slot in page, head_dim].
        layer: int32 scalar.
        k: words of the pool's dtype [batch, token, head, head_dim].
        v: likewise.
        page_table: int32 [batch, width], each request's pages in order.
        positions: int32 [batch, token], each token's position in its request.
        valid: bool [batch, token]; what is not is written to page 0, of which the content means nothing.
        implementation: see `pdjax.kernels`; `native` is `plain` here.

    Returns:
        The pool. All but the named slots of pages other than 0 is as it was.

    Raises:
        ValueError, TypeError: shapes or dtypes that don't fit the pool, or the implementation.
    """
    check_implementation(implementation)
    if k.shape != v.shape or k.ndim != 4 or k.shape[2:] != (pool.shape[2], pool.shape[5]) or pool.shape[3] != 2:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} do not fit a pool {list(pool.shape)}: expected [batch, token, "
            f"{pool.shape[2]} heads, head_dim {pool.shape[5]}]"
        )
    if k.dtype != pool.dtype or v.dtype != pool.dtype:
        raise TypeError(f"k and v are {k.dtype} and {v.dtype}; the pool holds {pool.dtype} words")
    page_size = pool.shape[4]
    last = page_table.shape[1] * page_size - 1
    valid = valid & (positions >= 0) & (positions <= last)
    where = jnp.clip(positions, 0, last)
    pages = jnp.take_along_axis(page_table, where // page_size, axis=1)
    pages = jnp.where(valid & (pages >= 0) & (pages < pool.shape[1]), pages, 0).reshape(-1)  # [B*T]
    places = jnp.stack([pages, (where % page_size).reshape(-1)])  # [2, B*T]
    rows = jnp.stack([k, v], axis=3).reshape(-1, *pool.shape[2:4], pool.shape[5])  # [B*T, H, 2, D]
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    if implementation == "auto":
        on_cuda = partial(_append_pallas, "pallas_triton" if pool.shape[5] % _LANES else "pallas")
        return lax.platform_dependent(pool, layer, places, rows, cuda=on_cuda, default=_append_plain)
    if implementation in ("plain", "native"):
        return _append_plain(pool, layer, places, rows)
    return _append_pallas(implementation, pool, layer, places, rows)


def _append_plain(pool: jax.Array, layer: jax.Array, places: jax.Array, rows: jax.Array) -> jax.Array:
    return pool.at[layer[0], places[0], :, :, places[1]].set(rows)


def _append_pallas(
    implementation: Implementation, pool: jax.Array, layer: jax.Array, places: jax.Array, rows: jax.Array
) -> jax.Array:
    tokens, heads, planes, head_dim = rows.shape
    flat = pool.reshape(*pool.shape[:4], -1)  # a page's slots and words are one run
    tile = min(head_dim & -head_dim, _LANES)
    if implementation == "pallas" and tile < _LANES:
        raise ValueError(f"head_dim {head_dim} is no multiple of {_LANES}: use pallas_triton, as auto does")

    def write_row(layer_ref: Ref, places_ref: Ref, rows_ref: Ref, _: Ref, pool_ref: Ref) -> None:
        token, head, plane = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        page, start = places_ref[0, token], places_ref[1, token] * head_dim

        def write_tile(part: jax.Array, _: None) -> None:
            words = rows_ref[token, head, plane, pl.ds(part * tile, tile)]
            pool_ref[layer_ref[0], page, head, plane, pl.ds(start + part * tile, tile)] = words

        lax.fori_loop(0, head_dim // tile, write_tile, None)

    in_place = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        write_row,
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid=(tokens, heads, planes),
        in_specs=[in_place] * 4,
        out_specs=in_place,
        input_output_aliases={3: 0},
        name="append_pages",
        **pallas_options(implementation),
    )(layer, places, rows, flat)
    return written.reshape(pool.shape)
