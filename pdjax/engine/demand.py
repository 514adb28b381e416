"""What requests will need of the pool before they end, and whether all of them together may be let in.

A request may generate `max_new_tokens`; most end long before. Pages are promised for what is likely, and two things
keep a wrong guess from doing harm:

* whoever decodes can leave the pool for a while (see `pdjax.engine.retraction`) and goes on later, to the same tokens;
* *the largest running request can always finish*: what is being moved here can't be taken out of the pool, so it is let
  in only if, with every other running request out of the way, the one that may need the most still has room for all of
  it. One that is being moved counts with all that it may need once it runs.

So the strongest request (see `pdjax.engine.admission.standing`) never waits for a transfer, and each of them ends.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 512  # requests whose lengths are remembered
ENOUGH = 8  # lengths from which the next is guessed; with fewer, a request counts with all that it may generate
QUANTILE = 0.75


class OutputLengths:
    """How many tokens the latest requests have generated before they ended."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, tokens: int) -> None:
        """A request has ended by itself."""
        if len(self._latest) == WINDOW:
            self._sorted.pop(bisect.bisect_left(self._sorted, self._latest.popleft()))
        self._latest.append(tokens)
        bisect.insort(self._sorted, tokens)

    def expected(self, generated: int, most: int) -> int:
        """Tokens that a request will have generated when it ends, if it goes as with three in four of those that have
        come this far too; at most `most`."""
        first = bisect.bisect_right(self._sorted, generated)
        longer = len(self._sorted) - first
        if longer < ENOUGH:
            return most
        return min(most, self._sorted[first + int(QUANTILE * longer)])


@dataclass(frozen=True)
class Demand:
    """One request's, in numbers of pages.

    Attributes:
        held: those that it has, or would be given now.
        shared: which of these others may have too: pages of the prefix cache.
        expected: all that it is likely to have when it ends; at least `held`.
        most: all that it may need.
    """

    held: int
    shared: frozenset[int]
    expected: int
    most: int


def fits(pool: int, *, running: Sequence[Demand], moving: Sequence[Demand]) -> bool:
    """Whether a pool keeps the guarantee, and is likely to be large enough, with these requests in it.

    Args:
        pool: its pages.
        running: requests that decode, and can be put out.
        moving: requests whose prompts are on their way into their pages.
    """
    kept = frozenset[int]().union(*(each.shared for each in moving))
    pinned = len(kept) + sum(each.held - len(each.shared) for each in moving)
    further = [*(each.most - len(each.shared & kept) for each in running), *(each.most - each.held for each in moving)]
    shared = kept.union(*(each.shared for each in running))
    likely = len(shared) + sum(each.expected - len(each.shared) for each in (*running, *moving))
    return pinned + max(further, default=0) <= pool and likely <= pool
