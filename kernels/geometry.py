"""What gather and scatter share: the sizes of one call, the checks of its arguments, and how Pallas is asked for.

Both kernels see the same memory with its contiguous part flattened to a *run*, the K and V words of one
(layer, page, head): the pool as [layers, pages, heads, run], a staging slot as rows of one run each, where the run of
(head h, page p, layer l) of an n-page block that begins at row r is row r + (h * n + p) * layers + l.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

Implementation = Literal["auto", "plain", "native", "pallas", "pallas_triton", "pallas_interpret"]
Ref = Any  # Pallas has no public type for the references that a kernel's body gets
Scalar = int | np.integer | np.ndarray | jax.Array

# Words that one GPU block holds in registers at once. Triton wants a power of two, 128 threads a warpgroup wants a
# multiple of 128 for wide loads; 2048 words are 16 a thread.
_MAX_TILE = 2048


class Origin(NamedTuple):
    """What may change from call to call without compiling anything new; each an int or an int32 scalar."""

    page_count: Scalar
    first_head: Scalar = 0
    first_layer: Scalar = 0
    first_run: Scalar = 0  # where in staging the block begins, in runs


@dataclass(frozen=True)
class RepackGeometry:
    """The static sizes of one gather or scatter."""

    layers: int  # that are moved
    pages: int  # of the pool, the trash page included
    pool_heads: int
    heads: int  # that are moved
    slot_pages: int  # most pages a call can name
    run: int  # words of one (layer, page, head)
    pool_layers: int
    slot_runs: int  # of all of staging

    @property
    def block_words(self) -> int:
        """Words of one (head, page) in staging: all its layers."""
        return self.layers * self.run

    @property
    def tile(self) -> int:
        """Words that a Pallas block moves at once: the largest power of two that divides a run, at most 2048."""
        return min(self.run & -self.run, _MAX_TILE)

    def flat(self, pool: jax.Array) -> jax.Array:
        """The pool as [layer, page, head, run]."""
        return pool.reshape(self.pool_layers, self.pages, self.pool_heads, self.run)

    @classmethod
    def of(
        cls,
        pool: jax.Array,
        page_ids: jax.Array | np.ndarray,
        staging: jax.Array,
        heads: int | None,
        layers: int | None = None,
    ) -> RepackGeometry:
        """Read the sizes off a call's arguments.

        Raises `ValueError` on shapes that don't fit together, `TypeError` on dtypes that don't.
        """
        if pool.ndim != 6 or pool.shape[3] not in (1, 2):
            raise ValueError(f"the pool is {_name(pool)}; expected [layer, page, head, 2, slot in page, head_dim]")
        if staging.ndim != 1 or page_ids.ndim != 1:
            raise ValueError(f"staging and page_ids are {_name(staging)} and {_name(page_ids)}; expected flat arrays")
        if staging.dtype != pool.dtype:
            raise TypeError(f"the pool holds {pool.dtype} words and staging {staging.dtype}; both must be the same")
        if pool.dtype == jnp.bfloat16 or pool.dtype == jnp.float16:
            raise TypeError(f"the pool holds {pool.dtype}; 2-byte types are stored as uint16 (StateSpec.word_dtype)")
        if page_ids.dtype != np.int32:
            raise TypeError(f"page_ids is {page_ids.dtype}; expected int32")
        pool_layers, pages, pool_heads, planes, page_size, head_dim = pool.shape
        heads = pool_heads if heads is None else heads
        layers = pool_layers if layers is None else layers
        if not 1 <= heads <= pool_heads:
            raise ValueError(f"{heads} heads asked for; the pool has {pool_heads}")
        if not 1 <= layers <= pool_layers:
            raise ValueError(f"{layers} layers asked for; the pool has {pool_layers}")
        run = planes * page_size * head_dim
        geometry = cls(
            layers, pages, pool_heads, heads, page_ids.shape[0], run, pool_layers, slot_runs=staging.size // run
        )
        needed = heads * geometry.slot_pages * geometry.block_words
        if staging.size < needed or staging.size % run:
            raise ValueError(
                f"staging has {staging.size} words; {heads} heads of {geometry.slot_pages} pages need {needed}, in a "
                f"multiple of {run} (one page of one head and layer): make the slot larger or page_ids shorter"
            )
        return geometry

    def check_values(self, page_ids: jax.Array | np.ndarray, origin: Origin) -> None:
        """Check what is known on the host; values that live on a device are not fetched. Raises `ValueError`."""
        for name, first, count, has in (
            ("heads", origin.first_head, self.heads, self.pool_heads),
            ("layers", origin.first_layer, self.layers, self.pool_layers),
        ):
            if isinstance(first, int | np.integer) and not 0 <= first <= has - count:
                raise ValueError(f"{name} {first} to {first + count - 1} asked for; the pool has 0 to {has - 1}")
        page_count, first_run = origin.page_count, origin.first_run
        if not isinstance(page_count, int | np.integer):
            return
        if not 0 <= page_count <= self.slot_pages:
            raise ValueError(f"page_count is {page_count}; page_ids has room for 0 to {self.slot_pages}")
        runs = self.heads * int(page_count) * self.layers
        if isinstance(first_run, int | np.integer) and not 0 <= first_run <= self.slot_runs - runs:
            raise ValueError(
                f"runs {first_run} to {first_run + runs - 1} of staging asked for; it has {self.slot_runs}"
            )
        if isinstance(page_ids, np.ndarray):
            named = page_ids[:page_count]
            if named.size and not (named.min() >= 0 and named.max() < self.pages):
                wrong = named[(named < 0) | (named >= self.pages)][0]
                raise ValueError(f"page_ids names page {wrong}; the pool has pages 0 to {self.pages - 1}")

    def clamp(self, page_ids: jax.Array | np.ndarray, origin: Origin) -> tuple[jax.Array, jax.Array]:
        """Page ids and int32 [4] of the origin, made safe: no count, head, layer or run leaves its array, and a page id
        that the pool lacks means the trash page, where `lax.dynamic_slice` would take the last, somebody else's."""
        ids = jnp.asarray(page_ids, jnp.int32)
        ids = jnp.where((ids >= 0) & (ids < self.pages), ids, 0)
        page_count, head, layer, run = (jnp.asarray(value, jnp.int32) for value in origin)
        page_count = jnp.clip(page_count, 0, self.slot_pages)
        head = jnp.clip(head, 0, self.pool_heads - self.heads)
        layer = jnp.clip(layer, 0, self.pool_layers - self.layers)
        run = jnp.clip(run, 0, self.slot_runs - self.heads * page_count * self.layers)
        return ids, jnp.stack([page_count, head, layer, run])


def check_implementation(implementation: str) -> None:
    """Raises `ValueError` for a name that is no implementation."""
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation is {implementation!r}; expected one of {', '.join(get_args(Implementation))}")


def pallas_options(implementation: str) -> dict[str, Any]:
    """The keyword arguments of `pl.pallas_call` that choose its compiler; Mosaic GPU is its default on CUDA."""
    if implementation == "pallas_interpret":
        return {"interpret": True}
    if implementation != "pallas_triton":
        return {}
    from jax.experimental.pallas import triton  # not at the top: a start without a GPU need not wait for it

    return {"compiler_params": triton.CompilerParams()}


def on_host(origin: Origin) -> Origin:
    """Python ints as np.int32, so that calls with ints and with arrays share one compiled program."""
    return Origin(*(np.int32(value) if isinstance(value, int | np.integer) else value for value in origin))


def _name(array: jax.Array | np.ndarray) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}] ({math.prod(array.shape)} words)"
