"""A radix tree of whole pages: the path from the root to a node spells the tokens that the node's page follows.

One page is one digit of the tree, so that matching is a dictionary lookup a page and a node never has to be split.
Pure bookkeeping: it names pages and owns none (see `pdjax.cache.prefix`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Node:
    """One cached page. `locks` counts those who use it now; a locked node's ancestors are locked as well."""

    def __init__(self, key: tuple[int, ...], page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent: Node | None = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.used = 0

    @property
    def is_free_leaf(self) -> bool:
        """Whether it is in the tree, nobody uses it and no page follows it."""
        return self.parent is not None and not self.locks and not self.children


class RadixTree:
    """Pages by the tokens that they hold. Locks are taken on paths from the root; unlocked leaves can be evicted."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages = 0
        self.evictable = 0  # pages of unlocked nodes: all of them can go, leaves first
        self._root = Node((), 0, None)
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # (used, page, node): unlocked leaves, and outdated entries

    def match(self, token_ids: Sequence[int], pages: int) -> list[Node]:
        """The path that spells the longest known prefix, of at most `pages` pages."""
        path: list[Node] = []
        node = self._root
        for index in range(min(pages, len(token_ids) // self.page_size)):
            child = node.children.get(self._key(token_ids, index))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def child(self, path: list[Node], token_ids: Sequence[int]) -> Node:
        """The node after `path` that `token_ids` lead to.

        Raises:
            KeyError: there is none.
        """
        return self._end(path).children[self._key(token_ids, len(path))]

    def insert(self, path: list[Node], token_ids: Sequence[int], page: int) -> Node | None:
        """Put a page after a locked path; the new node is locked once, by the same holder. None: there is such a node
        already."""
        key, parent = self._key(token_ids, len(path)), self._end(path)
        if key in parent.children:
            return None
        node = parent.children[key] = Node(key, page, parent)
        node.locks = 1
        self.pages += 1
        return node

    def lock(self, nodes: list[Node]) -> None:
        """Keep the nodes of a path from eviction, once more."""
        for node in nodes:
            self.evictable -= not node.locks
            node.locks += 1

    def unlock(self, nodes: list[Node]) -> None:
        """Take one lock back from each node of a path, and note that it was used just now."""
        self._clock += 1
        for node in nodes:
            node.locks -= 1
            node.used = self._clock
            self.evictable += not node.locks
        # Only the last can be a leaf; the others have it, or what replaced it, as a descendant.
        for node in nodes[-1:]:
            self._offer(node)

    def evict(self, pages: int) -> list[int]:
        """Forget at least `pages` pages, or all that are unlocked; the least recently used leaves first."""
        evicted: list[int] = []
        while len(evicted) < pages and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or not node.is_free_leaf or node.used != used:
                continue
            node.parent = None
            del parent.children[node.key]
            self.pages -= 1
            self.evictable -= 1
            evicted.append(node.page)
            self._offer(parent)
        return evicted

    def nodes(self) -> list[Node]:
        """All nodes, parents first."""
        found = list(self._root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts are right, locks reach up to the root and leaves can be evicted."""
        nodes = self.nodes()
        offered = {(used, id(node)) for used, _, node in self._leaves}
        unlocked = sum(not node.locks for node in nodes)
        if self.pages != len(nodes) or self.evictable != unlocked:
            raise AssertionError(
                f"the tree counts {self.pages} pages, {self.evictable} of them free to go; "
                f"it has {len(nodes)}, and {unlocked}"
            )
        for node in nodes:
            if any(child.locks > node.locks for child in node.children.values()):
                raise AssertionError(f"page {node.page} has {node.locks} locks, fewer than a page after it")
            if not node.locks and not node.children and (node.used, id(node)) not in offered:
                raise AssertionError(f"page {node.page} is an unlocked leaf that eviction would not find")

    def _offer(self, node: Node) -> None:
        """Note an unlocked leaf for eviction."""
        if not node.is_free_leaf:
            return
        heapq.heappush(self._leaves, (node.used, node.page, node))
        if len(self._leaves) > 64 + 4 * self.pages:  # mostly outdated entries
            leaves = {node.page: node for _, _, node in self._leaves if node.is_free_leaf}
            self._leaves = [(node.used, page, node) for page, node in leaves.items()]
            heapq.heapify(self._leaves)

    def _end(self, path: list[Node]) -> Node:
        return path[-1] if path else self._root

    def _key(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.page_size : (index + 1) * self.page_size])
