"""Who is next: the highest priority, and among equals whoever came first."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """A queue whose members have keys, and may leave it at any place.

    Attributes:
        waiting: who is in it, by key, each with a number of its own.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[int, T]] = {}
        self._heap: list[tuple[int, float, int, str]] = []
        self._pushed = 0

    def push(self, key: str, item: T, *, priority: int, arrived: float) -> None:
        """Add an item at its place."""
        self._pushed += 1
        self.waiting[key] = (self._pushed, item)
        heapq.heappush(self._heap, (-priority, arrived, self._pushed, key))

    @property
    def first(self) -> T | None:
        """The next in turn."""
        while self.waiting:
            _, _, number, key = self._heap[0]
            entry = self.waiting.get(key)
            if entry is not None and entry[0] == number:
                return entry[1]
            heapq.heappop(self._heap)
        return None

    def discard(self, key: str) -> None:
        """Take an item out, if it waits."""
        self.waiting.pop(key, None)
