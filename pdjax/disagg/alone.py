"""Requests that an instance answers by itself: health checks and warm-ups, which have no other half.

They are marked as SGLang marks them, by the bootstrap host 2.2.2.2. A prefill instance computes the prompt and picks a
token. A decode instance generates from zeros in the place of the prompt's keys and values, so what it says means
nothing; none of these pages are left to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdjax.engine.request import Request


class Alone:
    """Those of one instance. `begin` starts a request, or says that it cannot start now."""

    def __init__(self, begin: Callable[[Request], bool]) -> None:
        self._begin = begin
        self._waiting: deque[Request] = deque()

    def push(self, request: Request) -> None:
        """A request has come."""
        self._waiting.append(request)

    def discard(self, request: Request) -> None:
        """Nobody waits for it any more."""
        if request in self._waiting:
            self._waiting.remove(request)

    def poll(self) -> None:
        """Start those that can start, in order."""
        while self._waiting and self._begin(self._waiting[0]):
            self._waiting.popleft()
