"""What an instance did lately, as spans in a bounded ring: cheap enough to be always on.

A span costs one tuple and one append, a microsecond or two; names and numbers are made into words only when
somebody asks. Times are kept by `time.monotonic` and told as seconds since the epoch.
"""

from __future__ import annotations

import time
from collections import deque

from pdjax.engine.flight import Flight
from pdjax.engine.plan import DecodeStep, PrefillStep
from pdjax.engine.request import Request
from pdjax.wire import Span

CAPACITY = 16384  # spans; of a request's, about a dozen


class Trace:
    """Belongs to the device thread. `start` and `end` are seconds of `time.monotonic`."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._spans: deque[tuple[str, float, float, str, int | None, dict[str, float]]] = deque(maxlen=capacity)

    def step(self, name: str, start: float, end: float, **numbers: float) -> None:
        """A span of the whole instance."""
        self._spans.append((name, start, end, "", None, numbers))

    def request(self, name: str, request: Request, start: float, end: float, **numbers: float) -> None:
        """A span of one request."""
        room = None if request.rendezvous is None else request.rendezvous.room
        self._spans.append((name, start, end, request.rid, room, numbers))

    def room(self, name: str, room: int, start: float, end: float, **numbers: float) -> None:
        """A span of a room, whether its request still lives or not."""
        self._spans.append((name, start, end, "", room, numbers))

    def computed(self, flight: Flight, now: float) -> None:
        """A step has been read."""
        match flight.step:
            case PrefillStep(token_ids=token_ids):
                self.request("prefill chunk", flight.requests[0], flight.dispatched, now, tokens=len(token_ids))
            case DecodeStep(rows=rows):
                self.step("decode step", flight.dispatched, now, rows=len(rows))

    def finished(self, request: Request, now: float) -> None:
        """A request has its last token."""
        seconds = request.timeline.get("first_token_s")
        if seconds is not None:
            self.request("decode", request, request.arrived + seconds, now, tokens=len(request.output_ids))

    def spans(self) -> list[Span]:
        """All that the ring holds, oldest first."""
        epoch = time.time() - time.monotonic()
        return [
            Span(name, start + epoch, max(0.0, end - start), rid, room, numbers)
            for name, start, end, rid, room, numbers in self._spans
        ]
