"""Who is next: the highest priority, and among equals whoever came first."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """A queue whose members have keys, and may leave it at any place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, str]] = []
        self._items: dict[str, tuple[int, T]] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._items)

    def push(self, key: str, item: T, *, priority: int, arrived: float) -> None:
        """Add an item at its place."""
        self._pushed += 1
        self._items[key] = (self._pushed, item)
        heapq.heappush(self._heap, (-priority, arrived, self._pushed, key))

    @property
    def first(self) -> T:
        """The next in turn; the queue must not be empty."""
        while True:
            _, _, number, key = self._heap[0]
            entry = self._items.get(key)
            if entry is not None and entry[0] == number:
                return entry[1]
            heapq.heappop(self._heap)

    def discard(self, key: str) -> None:
        """Take an item out, if it waits."""
        self._items.pop(key, None)
