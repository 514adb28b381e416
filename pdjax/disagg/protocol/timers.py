"""The deadlines of many rooms: what is due is found without looking at the others."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

NEVER = math.inf  # as a time


class Timed:
    """What has a deadline."""

    def __init__(self) -> None:
        self.deadline = NEVER
        self.timer = NEVER  # when a heap looks at it next
        self.closed = False  # whether it needs no timer any more


T = TypeVar("T", bound=Timed)


class Timers(Generic[T]):
    """A heap with at least one entry for each room that has a deadline, at that deadline or before it.

    Attributes:
        next: when to call `due` again at the latest.
    """

    def __init__(self) -> None:
        self.next = NEVER
        self._heap: list[tuple[float, int, T]] = []
        self._pushed = 0

    def watch(self, room: T) -> None:
        """Look at a room's deadline again, after it may have changed. A later one costs nothing now."""
        deadline = room.deadline
        if deadline < room.timer:
            room.timer = deadline
            self._pushed += 1
            heapq.heappush(self._heap, (deadline, self._pushed, room))
            if deadline < self.next:
                self.next = deadline

    def due(self, now: float) -> list[T]:
        """Rooms whose deadlines have passed. Each is reported once, unless it is watched again."""
        heap = self._heap
        rooms: list[T] = []
        while heap and (heap[0][0] <= now or heap[0][2].closed):
            at, _, room = heapq.heappop(heap)
            if room.closed or room.timer != at:
                continue  # an earlier deadline has taken this entry's place
            room.timer = NEVER
            if room.deadline <= now:
                rooms.append(room)
            else:
                self.watch(room)
        self.next = heap[0][0] if heap else NEVER
        return rooms
