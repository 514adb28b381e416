"""The sizes that steps are compiled in.

Every step is padded up to the next bucket, so that the programs made at start serve all requests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Buckets:
    """Ascending sizes: prompt tokens of a prefill step, rows of a decode step, pages of a page table."""

    prefill_tokens: tuple[int, ...]
    decode_rows: tuple[int, ...]
    widths: tuple[int, ...]

    def prefill_pairs(self, page_size: int) -> list[tuple[int, int]]:
        """(tokens, width) of every prefill program that a step can ask for."""
        smaller = (0, *self.prefill_tokens)
        return [
            (tokens, width)
            for below, tokens in zip(smaller, self.prefill_tokens)
            for width in self.widths
            if below < width * page_size
        ]

    def decode_pairs(self) -> list[tuple[int, int]]:
        """(rows, width) of every decode program."""
        return [(rows, width) for rows in self.decode_rows for width in self.widths]


def make_buckets(
    *, max_context: int, page_size: int, prefill_tokens: int, max_running_requests: int, min_decode_rows: int
) -> Buckets:
    """Powers of two for rows, of four for tokens and widths, each up to its limit."""
    width = -(-max_context // page_size)
    return Buckets(
        prefill_tokens=_powers(min(32, prefill_tokens), prefill_tokens, 4),
        decode_rows=_powers(min_decode_rows, max(min_decode_rows, max_running_requests), 2),
        widths=_powers(min(16, width), width, 4),
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


def _powers(first: int, limit: int, factor: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < limit:
        sizes.append(min(sizes[-1] * factor, limit))
    return tuple(sizes)
