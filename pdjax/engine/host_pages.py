"""Pages of requests that had to leave the pool for a while, kept in host memory: each process keeps its own shards."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled

from pdjax.engine.orders import DropPages, RestorePages, SavePages
from pdjax.engine.runner import Runner

BLOCK_PAGES = 16  # pages of one copy; one program serves every request


@dataclass(frozen=True)
class SavedPages:
    """The name under which the first `pages` pages of a request are kept. They go back into the same dp rank."""

    number: int
    pages: int


@dataclass(frozen=True)
class _Kept:
    dp_rank: int
    blocks: list[list[np.ndarray]]  # each in those of this process's shards that are the rank's


class HostPages:
    """Copies pages out of a runner's pool and back, bit for bit. Both programs are compiled when this is made.

    `save`, `restore` and `drop` are the leader's; workers are told and do the part that is named behind each.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._saved: dict[int, _Kept] = {}  # by number
        self._number = 0
        self._dp = runner.dp
        # Words [layer, BLOCK_PAGES of each rank, head, K|V, slot in page, head_dim], cut as the pool is.
        self._shape = (runner.pool.shape[0], self._dp * BLOCK_PAGES, *runner.pool.shape[2:])
        places = runner.pool.sharding.devices_indices_map(self._shape)
        self._ranks = {device: (place[1].start or 0) // BLOCK_PAGES for device, place in places.items()}
        self._gather, self._scatter = _programs(runner.pool.shape, runner.pool.dtype, runner.pool.sharding, self._dp)

    def save(self, pages: list[int], dp_rank: int) -> SavedPages:
        """Copy pages to the host (`keep`). They may be given to others afterwards."""
        number, self._number = self._number, self._number + 1
        self._runner.announce(SavePages(number, pages, dp_rank))
        self.keep(number, pages, dp_rank)
        return SavedPages(number, len(pages))

    def restore(self, saved: SavedPages, pages: list[int], *, first: int) -> None:
        """Write saved pages from number `first` on into the pool, at the same numbers of `pages` (`put_back`)."""
        wanted = pages[: saved.pages]
        self._runner.announce(RestorePages(saved.number, wanted, first))
        self.put_back(saved.number, wanted, first=first)

    def drop(self, saved: SavedPages) -> None:
        """Forget saved pages (`forget`)."""
        self._runner.announce(DropPages(saved.number))
        self.forget(saved.number)

    def keep(self, number: int, pages: list[int], dp_rank: int) -> None:
        """Copy this process's shards of a rank's pages to the host."""
        blocks = []
        for start in range(0, len(pages), BLOCK_PAGES):
            # A new array a block, not the pool: what NumPy then looks at is nobody else's.
            block = self._gather(self._runner.pool, self._page_ids(pages[start : start + BLOCK_PAGES], dp_rank))
            shards = [shard for shard in block.addressable_shards if self._ranks[shard.device] == dp_rank]
            blocks.append([np.asarray(shard.data) for shard in shards])
        self._saved[number] = _Kept(dp_rank, blocks)

    def put_back(self, number: int, pages: list[int], *, first: int) -> None:
        """Write this process's shards into the pool, but for the pages before `first`, and forget them."""
        kept = self._saved.pop(number)
        for index, shards in enumerate(kept.blocks):
            start = index * BLOCK_PAGES
            # Pages that are there already go to page 0, which is nobody's.
            wanted = [page if start + place >= first else 0
                      for place, page in enumerate(pages[start : start + BLOCK_PAGES])]  # fmt: skip
            ids = self._page_ids(wanted, kept.dp_rank)
            if ids.any():
                self._runner.pool = self._scatter(self._runner.pool, ids, self._whole(shards, kept.dp_rank))

    def forget(self, number: int) -> None:
        """Forget what was kept under a number."""
        del self._saved[number]

    def _page_ids(self, pages: list[int], dp_rank: int) -> np.ndarray:
        """int32 [BLOCK_PAGES of each rank], 0 past the end and for other ranks."""
        ids = np.zeros(self._dp * BLOCK_PAGES, np.int32)
        ids[dp_rank * BLOCK_PAGES :][: len(pages)] = pages
        return ids

    def _whole(self, shards: list[np.ndarray], dp_rank: int) -> jax.Array:
        """The block that these are a rank's shards of. What other ranks have of it goes to their page 0."""
        mine, sharding = iter(shards), self._runner.pool.sharding
        nothing = np.zeros(sharding.shard_shape(self._shape), self._runner.pool.dtype)
        pieces = []
        for shard in self._runner.pool.addressable_shards:
            piece = next(mine) if self._ranks[shard.device] == dp_rank else nothing
            pieces.append(jax.device_put(piece, shard.device))
        return jax.make_array_from_single_device_arrays(self._shape, sharding, pieces)


@functools.cache
def _programs(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding, dp: int) -> tuple[Compiled, Compiled]:
    """Gather (pool, page ids -> block) and scatter (pool, which is donated, page ids, block -> pool), for any pool."""
    pool = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    page_ids = jax.ShapeDtypeStruct((dp * BLOCK_PAGES,), np.int32)
    block = jax.ShapeDtypeStruct((shape[0], dp * BLOCK_PAGES, *shape[2:]), dtype, sharding=sharding)

    def gather(pool: jax.Array, page_ids: jax.Array) -> jax.Array:
        return pool[:, page_ids]

    def scatter(pool: jax.Array, page_ids: jax.Array, block: jax.Array) -> jax.Array:
        return pool.at[:, page_ids].set(block)

    if sharding.mesh.size > 1:  # page ids are a rank's own numbers
        ids = PartitionSpec(sharding.spec[1])
        on_shards = partial(jax.shard_map, mesh=sharding.mesh, out_specs=sharding.spec, check_vma=False)
        gather = on_shards(gather, in_specs=(sharding.spec, ids))
        scatter = on_shards(scatter, in_specs=(sharding.spec, ids, sharding.spec))
    gather = jax.jit(gather, out_shardings=sharding)
    scatter = jax.jit(scatter, donate_argnums=0, out_shardings=sharding)
    return gather.lower(pool, page_ids).compile(), scatter.lower(pool, page_ids, block).compile()
