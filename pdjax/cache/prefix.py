"""The prefix cache: pages that outlive the request that filled them, shared by all whose text begins the same way.

It stands between requests and the page allocator. A request is given the cached pages of its longest known prefix,
locked, and pages of its own for the rest; what it computes is published page by page, and what nobody uses is evicted
when pages are needed, least recently used first. Only whole pages are shared, and a shared page is never written.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdjax.cache.allocator import PageAllocator
from pdjax.cache.radix import Node, RadixTree


class Grant(msgspec.Struct, frozen=True):
    """A request's pages in order; the first `cached` of them are filled already."""

    pages: list[int]
    cached: int


class PrefixCache:
    """Gives requests their pages. With `enabled` off nothing is shared or kept, and the rest is the same."""

    def __init__(self, allocator: PageAllocator, *, page_size: int, enabled: bool) -> None:
        self.enabled = enabled
        self.evicted_pages = 0
        self._allocator = allocator
        self._tree = RadixTree(page_size)
        self._held: dict[str, list[Node]] = {}  # by request: the path that it has locked, its first pages

    @property
    def pages(self) -> int:
        """Pages that the cache owns."""
        return self._tree.pages

    @property
    def locked_pages(self) -> int:
        """Pages of the cache that requests use now."""
        return self._tree.pages - self._tree.evictable

    @property
    def available(self) -> int:
        """Pages that can be given out: free ones, and cached ones that nobody uses."""
        return self._allocator.free_pages + self._tree.evictable

    def shared(self, owner: str) -> int:
        """How many of a request's pages belong to the cache: its first ones."""
        return len(self._held.get(owner, ()))

    def known(self, token_ids: Sequence[int], pages: int) -> list[int]:
        """The pages that `begin` would find of a text, at most `pages`."""
        return [node.page for node in self._tree.match(token_ids, pages)] if self.enabled else []

    def begin(self, owner: str, token_ids: Sequence[int], *, pages: int, cached: int, spare: int = 0) -> Grant | None:
        """Give a request its first pages, all or none; None means that there are too few now.

        Args:
            owner: the request's id.
            token_ids: the text whose pages may come from the cache.
            pages: pages to give, cached and own together.
            cached: the most that may come from the cache.
            spare: pages that must remain available afterwards.
        """
        nodes = self._tree.match(token_ids, min(cached, pages)) if self.enabled else []
        own = pages - len(nodes)
        # Pages that this request would lock are no longer there to be evicted.
        if own + spare > self.available - sum(not node.locks for node in nodes):
            return None
        self._tree.lock(nodes)
        self._held[owner] = nodes
        self._make_free(own)
        given = self._allocator.allocate(owner, own)
        assert given is not None, "enough pages were counted and evicted"
        return Grant([node.page for node in nodes] + given, len(nodes))

    def grow(self, owner: str, count: int) -> list[int] | None:
        """Give a request more pages of its own, all or none."""
        if count > self.available:
            return None
        self._make_free(count)
        return self._allocator.extend(owner, count)

    def publish(self, owner: str, token_ids: Sequence[int], pages: list[int]) -> None:
        """Let others use what a live request has computed: `token_ids` are in its `pages`, in order.

        Stops at a page that another request has published in the meantime: this one goes on with its own copy, and
        must not hold both, or it could need more pages than it was promised.
        """
        held = self._held.get(owner)
        if held is None or not self.enabled:
            return
        for index in range(len(held), len(token_ids) // self._tree.page_size):
            node = self._tree.insert(held, token_ids, pages[index])
            if node is None:
                return
            self._allocator.move_to_cache(owner, pages[index])
            held.append(node)

    def end(self, owner: str, token_ids: Sequence[int], pages: list[int]) -> None:
        """A request gives its pages back: whole ones into the cache, as far as `token_ids` reach, the rest is free.

        One that was given none is fine, so that every ending may call this.
        """
        held = self._held.pop(owner, None)
        if held is not None and self.enabled:
            for index in range(len(held), len(token_ids) // self._tree.page_size):
                node = self._tree.insert(held, token_ids, pages[index])
                if node is not None:
                    self._allocator.move_to_cache(owner, pages[index])
                else:
                    node = self._tree.child(held, token_ids)
                    self._tree.lock([node])
                held.append(node)
        self._tree.unlock(held or [])
        self._allocator.release(owner)

    def flush(self) -> int:
        """Forget all that nobody uses. Returns how many pages became free."""
        return self._evict(self._tree.evictable)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages and locks add up."""
        self._allocator.check_integrity()
        self._tree.check_integrity()
        nodes = self._tree.nodes()
        if {node.page for node in nodes} != self._allocator.cached_pages:
            raise AssertionError(f"the tree has {len(nodes)} pages, the allocator says otherwise")
        held = [node for path in self._held.values() for node in path]
        if sum(node.locks for node in nodes) != len(held):
            raise AssertionError(f"{sum(node.locks for node in nodes)} locks for {len(held)} held pages")

    def _make_free(self, count: int) -> None:
        self._evict(count - self._allocator.free_pages)

    def _evict(self, count: int) -> int:
        pages = self._tree.evict(count)
        self._allocator.drop_from_cache(pages)
        self.evicted_pages += len(pages)
        return len(pages)
