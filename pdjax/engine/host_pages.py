"""Pages of requests that had to leave the pool for a while, kept in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from pdjax.engine.runner import Runner

BLOCK_PAGES = 16  # pages of one copy; one program serves every request


@dataclass(frozen=True)
class SavedPages:
    """The first `pages` pages of a request: blocks of words [layer, BLOCK_PAGES, head, K|V, slot in page, head_dim]."""

    blocks: list[np.ndarray]
    pages: int


class HostPages:
    """Copies pages out of a runner's pool and back, bit for bit. Both programs are compiled when this is made."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        pool = runner.pool
        shape = (pool.shape[0], BLOCK_PAGES, *pool.shape[2:])
        page_ids = jax.ShapeDtypeStruct((BLOCK_PAGES,), np.int32)
        block = jax.ShapeDtypeStruct(shape, pool.dtype)
        self._gather = jax.jit(lambda pool, page_ids: pool[:, page_ids]).lower(pool, page_ids).compile()
        self._scatter = (
            jax.jit(
                lambda pool, page_ids, block: pool.at[:, page_ids].set(block),
                donate_argnums=0,
                out_shardings=pool.sharding,
            )
            .lower(pool, page_ids, block)
            .compile()
        )

    def save(self, pages: list[int]) -> SavedPages:
        """Copy pages to the host. They may be given to others afterwards."""
        starts = range(0, len(pages), BLOCK_PAGES)
        # A new array a block, not the pool: what NumPy then looks at is nobody else's.
        return SavedPages(
            [np.asarray(self._gather(self._runner.pool, _page_ids(pages[start : start + BLOCK_PAGES])))
             for start in starts], len(pages))  # fmt: skip

    def restore(self, saved: SavedPages, pages: list[int], *, first: int) -> None:
        """Write saved pages from number `first` on into the pool, at the same numbers of `pages`."""
        for number, block in enumerate(saved.blocks):
            start = number * BLOCK_PAGES
            wanted = range(start, min(start + BLOCK_PAGES, saved.pages))
            # Pages that are there already go to page 0, which is nobody's.
            ids = _page_ids([pages[index] if index >= first else 0 for index in wanted])
            if ids.any():
                self._runner.pool = self._scatter(self._runner.pool, ids, block)


def _page_ids(pages: list[int]) -> np.ndarray:
    """int32 [BLOCK_PAGES], 0 past the end."""
    ids = np.zeros(BLOCK_PAGES, np.int32)
    ids[: len(pages)] = pages
    return ids
