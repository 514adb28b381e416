"""Who owns which page of a pool. Pure bookkeeping: no arrays, no jax."""

from __future__ import annotations

from collections import deque


class PageAllocator:
    """Hands out pages 1..pages-1 to named owners; page 0 takes the writes of padding and belongs to nobody.

    An owner is whatever holds pages for a while: a request by its id. A page is free or has exactly one owner.
    """

    def __init__(self, pages: int) -> None:
        self.capacity = pages - 1
        self._free = deque(range(1, pages))
        self._owned: dict[str, list[int]] = {}

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def owners(self) -> int:
        """How many hold pages."""
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
        pages = [self._free.popleft() for _ in range(count)]
        self._owned[owner] = pages
        return pages

    def release(self, owner: str) -> None:
        """Take back all pages of `owner`; one that holds none is fine, so that every ending may call this."""
        self._free.extend(self._owned.pop(owner, ()))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free or owned by exactly one owner."""
        held = list(self._free) + [page for pages in self._owned.values() for page in pages]
        if sorted(held) != list(range(1, self.capacity + 1)):
            raise AssertionError(
                f"of {self.capacity} pages, {len(held)} are accounted for, {len(set(held))} of them once"
            )
