"""When requests must have ended."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from pdjax.engine.request import Request


class Deadlines:
    """Those of requests that have one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []  # entries of requests that have ended are skipped

    def add(self, request: Request) -> None:
        """Watch a request that has arrived, if it has a deadline."""
        if request.deadline_s is not None:
            heapq.heappush(self._heap, (request.arrived + request.deadline_s, request.rid))

    def next(self) -> float | None:
        """The first, or earlier."""
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float, live: Mapping[str, Request]) -> Iterator[Request]:
        """The live requests whose deadline has passed, once each."""
        while self._heap and self._heap[0][0] <= now:
            due, rid = heapq.heappop(self._heap)
            request = live.get(rid)
            # An id may be in use again by now, with another deadline.
            if request is not None and request.deadline_s is not None and request.arrived + request.deadline_s == due:
                yield request
