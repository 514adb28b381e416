"""Who is next: a queue by priority, and the order in which requests lose and get back their place in memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pdjax.engine.request import Request

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """What waits, highest priority first, equals by arrival. `request_of` says which request an item is about."""

    def __init__(self, request_of: Callable[[T], Request]) -> None:
        self._request_of = request_of
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @property
    def first(self) -> T:
        """The next in turn."""
        return self._items[0]

    def push(self, item: T) -> None:
        """Add an item at its place: behind those of the same priority that arrived before."""
        bisect.insort(self._items, item, key=self._turn)

    def pop(self) -> T:
        """Take the next in turn."""
        return self._items.pop(0)

    def discard(self, item: T) -> None:
        """Take an item out, if it waits."""
        self._items = [other for other in self._items if other is not item]

    def _turn(self, item: T) -> tuple[float, float]:
        request = self._request_of(item)
        return (-request.priority, request.arrived)


def standing(request: Request) -> tuple[float, int, float]:
    """Sorts requests by their claim to stay in memory, weakest first: priority, then output tokens, then arrival.

    The strongest is never put out, generates on, and stays the strongest until it ends: so all of them end.
    """
    return (request.priority, len(request.output_ids), -request.arrived)
