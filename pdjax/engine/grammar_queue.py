"""Requests that wait for their grammar to be compiled."""

from __future__ import annotations

from pdjax.engine.grammar import Compiled, Grammars
from pdjax.engine.request import Request


class GrammarQueue:
    """Args: `grammars` compiles, and posts a `Compiled` for each request; None: there are no grammars here."""

    def __init__(self, grammars: Grammars | None) -> None:
        self.takes_grammars = grammars is not None
        self._grammars = grammars
        self._waiting: dict[int, Request] = {}  # by the number of the asking
        self._asked = 0

    def __contains__(self, request: Request) -> bool:
        return any(other is request for other in self._waiting.values())

    def push(self, request: Request) -> bool:
        """Have a request's grammar compiled. False: it has none."""
        if request.sampling.grammar is None or self._grammars is None:
            return False
        self._asked += 1
        self._waiting[self._asked] = request
        self._grammars.request(self._asked, request.sampling.grammar)
        return True

    def pop(self, compiled: Compiled) -> Request | None:
        """Whose grammar it is; None if nobody waits for it any more."""
        return self._waiting.pop(compiled.number, None)

    def discard(self, request: Request) -> bool:
        """A request waits no longer. False: it did not."""
        for number, other in self._waiting.items():
            if other is request:
                del self._waiting[number]
                return True
        return False
