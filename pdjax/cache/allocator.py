"""Who owns which page of a pool. Pure bookkeeping: no arrays, no jax."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PageAllocator:
    """Hands out pages 1..pages-1 to named owners; page 0 takes the writes of padding and belongs to nobody.

    An owner is whatever holds pages for a while: a request by its id. A page is free, or has exactly one owner, or
    belongs to the prefix cache.
    """

    def __init__(self, pages: int) -> None:
        self.capacity = pages - 1
        self._free = deque(range(1, pages))
        self._owned: dict[str, set[int]] = {}
        self._cached: set[int] = set()

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def cached_pages(self) -> frozenset[int]:
        """Pages of the prefix cache."""
        return frozenset(self._cached)

    @property
    def owners(self) -> int:
        """How many have been given pages and not released them."""
        return len(self._owned)

    def allocate(self, owner: str, count: int) -> list[int] | None:
        """Give `owner` its pages, all or none: None means that there are too few free ones now.

        Raises:
            ValueError: the owner holds pages already.
        """
        if owner in self._owned:
            raise ValueError(f"{owner!r} holds pages already")
        if count > len(self._free):
            return None
        self._owned[owner] = set()
        return self.extend(owner, count)

    def extend(self, owner: str, count: int) -> list[int] | None:
        """Give an owner more pages, all or none.

        Raises:
            KeyError: nothing was allocated to this owner.
        """
        owned = self._owned[owner]
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        owned.update(pages)
        return pages

    def release(self, owner: str) -> None:
        """Take back all pages of `owner`; one that holds none is fine, so that every ending may call this."""
        self._free.extend(sorted(self._owned.pop(owner, ())))

    def move_to_cache(self, owner: str, page: int) -> None:
        """The prefix cache keeps a page that `owner` has filled.

        Raises:
            KeyError: the page is not the owner's.
        """
        self._owned[owner].remove(page)
        self._cached.add(page)

    def drop_from_cache(self, pages: Iterable[int]) -> None:
        """The prefix cache gives pages up; they are free.

        Raises:
            KeyError: a page is not the cache's.
        """
        for page in pages:
            self._cached.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free, cached, or owned by exactly one owner."""
        held = [*self._free, *self._cached, *(page for pages in self._owned.values() for page in pages)]
        if sorted(held) != list(range(1, self.capacity + 1)):
            raise AssertionError(
                f"of {self.capacity} pages, {len(held)} are accounted for, {len(set(held))} of them once"
            )
