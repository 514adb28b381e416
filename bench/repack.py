"""How fast are gather and scatter, against memcpy of the same bytes? And the checksum of a slot?

Each case moves scattered pages of a pool [30 layers, page, 8 heads, K|V, slot, 64] into a staging slot and back. Speeds
count bytes read and written, of a checksum those read; gather, scatter, memcpy and checksum take turns, and each figure
is the median of its turns. The ratio of a kernel is its speed over that of memcpy. From some size on (about 200 MB with
glibc) memcpy changes to stores that bypass the caches, and is nearly twice as fast; the C++ kernels always store so
from 4 MB on, those of XLA (--plain) never do.

    python bench/repack.py [--json] [--plain] [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.kernels import gather_pages, native, scatter_pages
from pdjax.launch.cache_folder import cache_root
from pdjax.transfer.checksum import xxh3

LAYERS, HEADS, HEAD_DIM = 30, 8, 64
SLOT_PAGES = 64
SPARE_PAGES = 16  # so that the chosen pages are not all there are


@dataclass(frozen=True)
class Row:
    """One case. Speeds in GB/s read and written, times in microseconds a call."""

    dtype: str
    page_size: int
    heads: int
    pages: int
    mbytes: float
    memcpy_gbps: float
    checksum_gbps: float
    gather_gbps: float
    scatter_gbps: float
    gather_us: float
    scatter_us: float


class Case:
    """A pool and a staging slot of one page size and dtype, and the calls that are timed on them."""

    def __init__(self, dtype: str, page_size: int) -> None:
        self.dtype, self.page_size = dtype, page_size
        pages = 1 + SLOT_PAGES + SPARE_PAGES
        self.block_words = LAYERS * 2 * page_size * HEAD_DIM
        self.pool = jnp.ones((LAYERS, pages, HEADS, 2, page_size, HEAD_DIM), dtype)
        self.staging = jnp.ones(HEADS * SLOT_PAGES * self.block_words, dtype)
        chosen = np.random.default_rng(0).permutation(pages - 1)[:SLOT_PAGES] + 1
        self.page_ids = jnp.array(chosen, jnp.int32)
        self.addresses = self._addresses()

    def measure(self, heads: int, pages: int, rounds: int) -> Row:
        """Time gather, scatter and memcpy in turn, after one untimed round."""
        count, first = jnp.int32(pages), jnp.int32(HEADS - heads)
        words = heads * pages * self.block_words
        source, target = np.ones(words, self.dtype), np.ones(words, self.dtype)

        def gather() -> None:
            self.staging = gather_pages(self.pool, self.page_ids, count, self.staging, first_head=first, heads=heads)
            self.staging.block_until_ready()

        def scatter() -> None:
            self.pool = scatter_pages(self.pool, self.staging, self.page_ids, count, first_head=first, heads=heads)
            self.pool.block_until_ready()

        def memcpy() -> None:
            np.copyto(target, source)

        def checksum() -> None:
            xxh3(self.staging.unsafe_buffer_pointer(), source.nbytes)

        seconds = _medians([gather, scatter, memcpy, checksum], rounds)
        if self._addresses() != self.addresses:
            raise RuntimeError(
                "the pool or the staging slot has moved: an update was a copy, and the figures mean nothing"
            )
        moved = 2 * source.nbytes / 1e9
        return Row(
            dtype=self.dtype,
            page_size=self.page_size,
            heads=heads,
            pages=pages,
            mbytes=round(source.nbytes / 1e6, 2),
            memcpy_gbps=round(moved / seconds[2], 2),
            checksum_gbps=round(source.nbytes / 1e9 / seconds[3], 2),
            gather_gbps=round(moved / seconds[0], 2),
            scatter_gbps=round(moved / seconds[1], 2),
            gather_us=round(seconds[0] * 1e6, 1),
            scatter_us=round(seconds[1] * 1e6, 1),
        )

    def _addresses(self) -> tuple[int, int]:
        return self.pool.unsafe_buffer_pointer(), self.staging.unsafe_buffer_pointer()


def _medians(calls: list[Callable[[], None]], rounds: int) -> list[float]:
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, taken in zip(calls, seconds):
            start = time.perf_counter()
            call()
            if turn:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def run(rounds: int) -> list[Row]:
    """All cases: whole slots for the ratios, single pages for the cost of a call."""
    rows = []
    for dtype in ("uint16", "float32"):
        for page_size in (16, 64):
            case = Case(dtype, page_size)
            for heads in (HEADS, HEADS // 4):
                rows.append(case.measure(heads, SLOT_PAGES, rounds))
                rows.append(case.measure(heads, 1, 20 * rounds))
    return rows


def ratios(rows: list[Row]) -> dict[str, float]:
    """The worst ratios to memcpy among whole slots."""
    whole = [row for row in rows if row.pages == SLOT_PAGES]
    return {
        "gather_vs_memcpy": round(min(row.gather_gbps / row.memcpy_gbps for row in whole), 3),
        "scatter_vs_memcpy": round(min(row.scatter_gbps / row.memcpy_gbps for row in whole), 3),
    }


def main() -> None:
    """Print a table, or with --json one line that other programs read."""
    parser = argparse.ArgumentParser(description="Speed of gather and scatter against memcpy.")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON instead of the table")
    parser.add_argument("--plain", action="store_true", help="without the C++ kernels")
    parser.add_argument("--rounds", type=int, default=9, help="timed turns of each call (default 9)")
    options = parser.parse_args()
    if not options.plain:
        native.load(cache_root() / "native")
    rows = run(options.rounds)
    if options.json:
        print(json.dumps({"bench": "repack", "rows": [asdict(row) for row in rows], "ratios": ratios(rows)}))
        return
    print(f"{jax.default_backend()}: {LAYERS} layers, {HEADS} heads of {HEAD_DIM}; GB/s read + written (us a call)")
    columns = f"{'dtype':8} {'page':>4} {'heads':>5} {'pages':>5} {'MB':>8}"
    print(f"{columns} {'memcpy':>7} {'gather':>18} {'scatter':>18} {'sum':>6}")
    for row in rows:
        gather, scatter = f"{row.gather_gbps} ({row.gather_us})", f"{row.scatter_gbps} ({row.scatter_us})"
        print(
            f"{row.dtype:8} {row.page_size:4} {row.heads:5} {row.pages:5} {row.mbytes:8} {row.memcpy_gbps:7} "
            f"{gather:>18} {scatter:>18} {row.checksum_gbps:6}"
        )
    print("worst of the whole slots:", ", ".join(f"{name} {value}" for name, value in ratios(rows).items()))


if __name__ == "__main__":
    main()
