"""The pages of an instance: each dp rank has its own, and a request is in one rank from its first page to its last.

Rows are counted here too: what a rank takes on is bound by its pages and by its share of the rows of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdjax.cache.allocator import PageAllocator
from pdjax.cache.prefix import PrefixCache


class RankGrant(msgspec.Struct, frozen=True):
    """A request's rank and its pages there, in order; the first `cached` of them are filled already."""

    rank: int
    pages: list[int]
    cached: int


class RankedPages:
    """A prefix cache over a page allocator for each rank. Methods without a rank act on the one that a request is in.

    Args:
        ranks: how many.
        pages: of each rank's pool, page 0 included.
        rows: the most requests that a rank takes.
        page_size: tokens a page.
        enabled: whether pages are shared and kept, see `PrefixCache`.
    """

    def __init__(self, ranks: int, *, pages: int, rows: int, page_size: int, enabled: bool) -> None:
        self.allocators = [PageAllocator(pages) for _ in range(ranks)]
        self.ranks = [PrefixCache(each, page_size=page_size, enabled=enabled) for each in self.allocators]
        self.enabled = enabled
        self.rank_capacity = pages - 1  # pages that one request can have
        self.ended = 0  # how often a request has given its pages back
        self._rows = rows
        self._rank_of: dict[str, int] = {}

    @property
    def capacity(self) -> int:
        """Pages of all ranks."""
        return len(self.ranks) * self.rank_capacity

    @property
    def pages(self) -> int:
        """Pages that the caches own."""
        return sum(cache.pages for cache in self.ranks)

    @property
    def locked_pages(self) -> int:
        """Pages of the caches that requests use now."""
        return sum(cache.locked_pages for cache in self.ranks)

    @property
    def available(self) -> int:
        """Pages that can be given out, of all ranks together."""
        return sum(cache.available for cache in self.ranks)

    @property
    def evicted_pages(self) -> int:
        """Pages that the caches have given up for requests so far."""
        return sum(cache.evicted_pages for cache in self.ranks)

    @property
    def has_free_row(self) -> bool:
        """Whether a rank can take one more request."""
        return any(allocator.owners < self._rows for allocator in self.allocators)

    def shared(self, owner: str) -> int:
        """How many of a request's pages belong to its rank's cache: its first ones."""
        rank = self._rank_of.get(owner)
        return 0 if rank is None else self.ranks[rank].shared(owner)

    def begin(
        self,
        owner: str,
        token_ids: Sequence[int],
        *,
        pages: int,
        cached: int,
        spare: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> RankGrant | None:
        """Give a request its first pages, all or none; None means that there are too few now, or no row.

        Args:
            ranks: where, the first of them that has room; None: `by_load`.
            owner, token_ids, pages, cached, spare: see `PrefixCache.begin`; `spare` is of the rank's pages.
        """
        for place in self.by_load(token_ids) if ranks is None else ranks:
            if self.allocators[place].owners >= self._rows:
                continue
            grant = self.ranks[place].begin(owner, token_ids, pages=pages, cached=cached, spare=spare)
            if grant is not None:
                self._rank_of[owner] = place
                return RankGrant(place, grant.pages, grant.cached)
        return None

    def grow(self, owner: str, count: int) -> list[int] | None:
        """Give a request more pages of its own, all or none."""
        return self.ranks[self._rank_of[owner]].grow(owner, count)

    def publish(self, owner: str, token_ids: Sequence[int], pages: list[int]) -> None:
        """Let others of its rank use what a live request has computed."""
        if owner in self._rank_of:
            self.ranks[self._rank_of[owner]].publish(owner, token_ids, pages)

    def end(self, owner: str, token_ids: Sequence[int], pages: list[int]) -> None:
        """A request gives its pages back, see `PrefixCache.end`. One that was given none is fine."""
        rank = self._rank_of.pop(owner, None)
        if rank is not None:
            self.ended += 1
            self.ranks[rank].end(owner, token_ids, pages)

    def flush(self) -> int:
        """Forget all that nobody uses. Returns how many pages became free."""
        return sum(cache.flush() for cache in self.ranks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every rank's pages and locks add up."""
        for cache in self.ranks:
            cache.check_integrity()

    def by_load(self, token_ids: Sequence[int]) -> list[int]:
        """All ranks: first those with the fewest requests, among equals those that know most of the text, then those
        with the most pages."""
        return self._sorted(lambda rank: (self.allocators[rank].owners, -self._known(rank, token_ids)))

    def by_text(self, token_ids: Sequence[int]) -> list[int]:
        """All ranks: first those that know most of the text, among equals those with the fewest requests, then those
        with the most pages."""
        return self._sorted(lambda rank: (-self._known(rank, token_ids), self.allocators[rank].owners))

    def _known(self, rank: int, token_ids: Sequence[int]) -> int:
        return len(self.ranks[rank].known(token_ids, len(token_ids)))

    def _sorted(self, key: Callable[[int], tuple[int, int]]) -> list[int]:
        if len(self.ranks) == 1:
            return [0]
        return sorted(range(len(self.ranks)), key=lambda rank: (*key(rank), -self.ranks[rank].available))
