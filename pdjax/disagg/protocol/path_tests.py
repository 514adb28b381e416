"""Test messages over the data paths of a decode instance's links: when to ask for one, and what their ends mean.

A path carries no traffic before it has passed, and is tested again once it has been idle for a while, so that a path
that has broken is found by a test and not by a request.
"""

from __future__ import annotations

import msgspec

from pdjax.disagg.protocol.timers import NEVER, Timed

IDLE = 30.0  # seconds without a chunk after which a path is tested again
ATTEMPTS = 3  # of a test whose bytes arrive damaged
_FRESH = 2 * IDLE  # seconds for which a path that works shows that it is not this instance that is broken


class _Path:
    def __init__(self) -> None:
        self.passed = False
        self.moved_at = 0.0  # when something came over it, or the test under way was asked for
        self.number = 0  # of the test under way; 0: none
        self.attempts = 0


class Due(msgspec.Struct, frozen=True, gc=False):
    """What is to be done: links to test, with the tests' numbers, and links whose tests are overdue."""

    tests: list[tuple[str, int]]
    overdue: list[str]


class PathTests(Timed):
    """By link. `bound`: seconds in which a test message must have come."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self._bound = bound
        self._paths: dict[str, _Path] = {}
        self._numbers = 0

    def up(self, link: str, now: float) -> int:
        """A link stands. Returns the number of its first test."""
        self._paths[link] = _Path()
        return self._begin(self._paths[link], now)

    def down(self, link: str) -> None:
        """A link is gone."""
        self._paths.pop(link, None)

    @property
    def under_way(self) -> bool:
        """Whether any path is being tested."""
        return any(path.number for path in self._paths.values())

    def passed(self, link: str) -> bool:
        """Whether traffic may go over it."""
        path = self._paths.get(link)
        return path is not None and path.passed

    def moved(self, link: str, now: float) -> None:
        """A chunk has come over a link: as good as a test."""
        path = self._paths.get(link)
        if path is not None:
            path.moved_at = now

    def link_of(self, number: int) -> str | None:
        """The link whose test under way has this number."""
        return next((link for link, path in self._paths.items() if path.number == number), None)

    def came(self, link: str, now: float, *, right: bool) -> int | None:
        """The test message of a link has come. Returns the number of the test that takes its place, if its bytes were
        damaged and it is to be tried again; else it has passed, or failed for good."""
        path = self._paths[link]
        path.number = 0
        if right:
            path.passed, path.moved_at, path.attempts = True, now, 0
            return None
        path.attempts += 1
        return self._begin(path, now) if path.attempts < ATTEMPTS else None

    def due(self, now: float) -> Due:
        """Look at all paths."""
        stood_still = now - self.deadline > self._bound / 2
        found = Due([], [])
        for link, path in self._paths.items():
            if path.number and stood_still:
                path.moved_at = now  # it was this side that did not look
            elif path.number and now - path.moved_at >= self._bound:
                found.overdue.append(link)
            elif not path.number and now - path.moved_at >= IDLE:
                found.tests.append((link, self._begin(path, now)))
        self.deadline = min(map(self._at, self._paths.values()), default=NEVER)
        return found

    def _begin(self, path: _Path, now: float) -> int:
        self._numbers += 1
        path.number, path.moved_at = self._numbers, now
        self.deadline = min(self.deadline, self._at(path))
        return path.number

    def _at(self, path: _Path) -> float:
        return path.moved_at + (self._bound if path.number else IDLE)


class PathHealth:
    """Whether this instance can move anything. A path that fails may be the peer's fault: it counts only where no other
    has moved anything lately, and not for ever, since an instance that says that it cannot serve gets no other try."""

    def __init__(self) -> None:
        self._moved_at: float | None = None
        self._failed_at = 0.0
        self._sentence = ""

    def moved(self, now: float) -> None:
        """Something has gone over a path."""
        self._moved_at = now

    def failed(self, sentence: str, now: float) -> None:
        """A test has failed."""
        self._failed_at, self._sentence = now, sentence

    def problem(self, now: float) -> str | None:
        """Why this instance cannot serve, in words."""
        if not self._sentence or now - self._failed_at >= IDLE:
            return None
        if self._moved_at is not None and self._moved_at > min(self._failed_at, now - _FRESH):
            return None
        return self._sentence
