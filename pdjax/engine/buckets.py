"""The sizes that steps are compiled in.

Every step is padded up to the next bucket, so that the programs made at start serve all requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.layers.attention import block_width


@dataclass(frozen=True)
class Buckets:
    """Ascending sizes: prompt tokens of a prefill step, rows of a decode step. `width` is every page table's."""

    prefill_tokens: tuple[int, ...]
    decode_rows: tuple[int, ...]
    width: int


def make_buckets(
    *,
    max_context: int,
    page_size: int,
    prefill_tokens: int,
    max_running_requests: int,
    min_decode_rows: int,
    parts: int = 1,
) -> Buckets:
    """Powers of two, each up to its limit. The width needs no buckets: attention costs what a context is long.

    Each page is cut into `parts`, over which devices attend each for itself.
    """
    block = block_width(page_size // parts)
    return Buckets(
        prefill_tokens=_powers(min(32, prefill_tokens), prefill_tokens),
        decode_rows=_powers(min_decode_rows, max(min_decode_rows, max_running_requests)),
        width=-(-max_context // (page_size * block)) * block,
    )


def pick(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`.

    Raises:
        ValueError: none does; admission should have refused this.
    """
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise ValueError(f"{size} is over the largest bucket, {buckets[-1]}")


def _powers(first: int, limit: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < limit:
        sizes.append(min(sizes[-1] * 2, limit))
    return tuple(sizes)
