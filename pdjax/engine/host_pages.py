"""Pages of requests that had to leave the pool for a while, kept in host memory: each process keeps its own shards."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Sharding
from jax.stages import Compiled

from pdjax.engine.orders import DropPages, RestorePages, SavePages
from pdjax.engine.runner import Runner

BLOCK_PAGES = 16  # pages of one copy; one program serves every request


@dataclass(frozen=True)
class SavedPages:
    """The name under which the first `pages` pages of a request are kept."""

    number: int
    pages: int


class HostPages:
    """Copies pages out of a runner's pool and back, bit for bit. Both programs are compiled when this is made.

    `save`, `restore` and `drop` are the leader's; workers are told and do the part that is named behind each.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._saved: dict[int, list[list[np.ndarray]]] = {}  # by number: blocks, each in this process's shards
        self._number = 0
        # Words [layer, BLOCK_PAGES, head, K|V, slot in page, head_dim], cut as the pool is.
        self._shape = (runner.pool.shape[0], BLOCK_PAGES, *runner.pool.shape[2:])
        self._gather, self._scatter = _programs(runner.pool.shape, runner.pool.dtype, runner.pool.sharding)

    def save(self, pages: list[int]) -> SavedPages:
        """Copy pages to the host (`keep`). They may be given to others afterwards."""
        number, self._number = self._number, self._number + 1
        self._runner.announce(SavePages(number, pages))
        self.keep(number, pages)
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

    def keep(self, number: int, pages: list[int]) -> None:
        """Copy this process's shards of pages to the host."""
        blocks = []
        for start in range(0, len(pages), BLOCK_PAGES):
            # A new array a block, not the pool: what NumPy then looks at is nobody else's.
            block = self._gather(self._runner.pool, _page_ids(pages[start : start + BLOCK_PAGES]))
            blocks.append([np.asarray(shard.data) for shard in block.addressable_shards])
        self._saved[number] = blocks

    def put_back(self, number: int, pages: list[int], *, first: int) -> None:
        """Write this process's shards into the pool, but for the pages before `first`, and forget them."""
        for index, shards in enumerate(self._saved.pop(number)):
            start = index * BLOCK_PAGES
            # Pages that are there already go to page 0, which is nobody's.
            ids = _page_ids([page if start + place >= first else 0
                             for place, page in enumerate(pages[start : start + BLOCK_PAGES])])  # fmt: skip
            if ids.any():
                self._runner.pool = self._scatter(self._runner.pool, ids, self._whole(shards))

    def forget(self, number: int) -> None:
        """Forget what was kept under a number."""
        del self._saved[number]

    def _whole(self, shards: list[np.ndarray]) -> jax.Array:
        """The array that these are this process's shards of."""
        sharding = self._runner.pool.sharding
        devices = [shard.device for shard in self._runner.pool.addressable_shards]
        pieces = [jax.device_put(piece, device) for piece, device in zip(shards, devices, strict=True)]
        return jax.make_array_from_single_device_arrays(self._shape, sharding, pieces)


@functools.cache
def _programs(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> tuple[Compiled, Compiled]:
    """Gather (pool, page ids -> block) and scatter (pool, which is donated, page ids, block -> pool), for any pool."""
    pool = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    page_ids = jax.ShapeDtypeStruct((BLOCK_PAGES,), np.int32)
    block = jax.ShapeDtypeStruct((shape[0], BLOCK_PAGES, *shape[2:]), dtype, sharding=sharding)
    gather = jax.jit(lambda pool, page_ids: pool[:, page_ids], out_shardings=sharding)
    scatter = jax.jit(
        lambda pool, page_ids, block: pool.at[:, page_ids].set(block), donate_argnums=0, out_shardings=sharding
    )
    return gather.lower(pool, page_ids).compile(), scatter.lower(pool, page_ids, block).compile()


def _page_ids(pages: list[int]) -> np.ndarray:
    """int32 [BLOCK_PAGES], 0 past the end."""
    ids = np.zeros(BLOCK_PAGES, np.int32)
    ids[: len(pages)] = pages
    return ids
