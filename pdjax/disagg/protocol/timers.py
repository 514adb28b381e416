"""The deadlines of many rooms: what is due is found without looking at the others."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """A room machine, as far as its timer goes."""

    deadline: float | None
    timer: float | None  # when this heap looks at the room next

    @property
    def closed(self) -> bool:
        """Whether the room needs no timer any more."""
        ...


T = TypeVar("T", bound=Timed)


def earliest(first: float | None, second: float | None) -> float | None:
    """The earlier of two times, None standing for never."""
    if first is None or (second is not None and second < first):
        return second
    return first


class Timers(Generic[T]):
    """A heap with at least one entry for each room that has a deadline, at that deadline or before it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._pushed = 0

    def watch(self, room: T) -> None:
        """Look at a room's deadline again, after it may have changed. A later one costs nothing now."""
        deadline = room.deadline
        if deadline is None or (room.timer is not None and room.timer <= deadline):
            return
        room.timer = deadline
        self._pushed += 1
        heapq.heappush(self._heap, (deadline, self._pushed, room))

    def due(self, now: float) -> list[T]:
        """Rooms whose deadlines have passed. Each is reported once, unless it is watched again."""
        heap = self._heap
        if not heap or heap[0][0] > now:
            return []
        rooms: list[T] = []
        while heap and heap[0][0] <= now:
            at, _, room = heapq.heappop(heap)
            if room.timer != at:
                continue  # an earlier deadline has taken this entry's place
            room.timer = None
            if room.closed or room.deadline is None:
                continue
            if room.deadline <= now:
                rooms.append(room)
            else:
                self.watch(room)
        return rooms

    @property
    def next(self) -> float | None:
        """When to call `due` again at the latest."""
        heap = self._heap
        while heap and heap[0][2].closed:
            heapq.heappop(heap)
        return heap[0][0] if heap else None
