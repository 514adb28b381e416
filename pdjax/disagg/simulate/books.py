"""Modelled memory, which refuses what must never happen: it is where most of DESIGN's invariants are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdjax.disagg.simulate.world import Write


class Violation(Exception):
    """Something happened that must never happen. `room` is the one it happened to, if known."""

    def __init__(self, text: str, room: int | None = None) -> None:
        super().__init__(text)
        self.room = room


class Pages:
    """A prefill instance's pool: each page is free or owned by one request."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self.free = list(range(count))
        self.owned: dict[str, list[int]] = {}
        self._owner: list[str | None] = [None] * count

    def take(self, rid: str, count: int) -> list[int] | None:
        """Pages for a request, or None."""
        if rid in self.owned:
            raise Violation(f"{self.name}: {rid} takes pages twice")
        if count > len(self.free):
            return None
        pages = [self.free.pop() for _ in range(count)]
        owner = self._owner
        for page in pages:
            if owner[page] is not None:
                raise Violation(f"{self.name}: page {page} of {owner[page]} is given to {rid}, too")
            owner[page] = rid
        self.owned[rid] = pages
        return pages

    def give_back(self, rid: str) -> None:
        """A request's pages, if it has any."""
        pages = self.owned.pop(rid, None)
        if pages is not None:
            for page in pages:
                self._owner[page] = None
            self.free.extend(pages)

    def check_home(self) -> None:
        """Raise unless all pages are free."""
        if self.owned or len(set(self.free)) != self.count:
            raise Violation(f"{self.name}: {self.count - len(self.free)} pages are not home: {sorted(self.owned)[:5]}")


class Slots:
    """A staging ring. `epochs` counts how often each slot was released, so that a late write can be told."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.free = list(range(count))
        self.out = [False] * count
        self.epochs = [0] * count
        self.content: list[dict[int, Write]] = [{} for _ in range(count)]  # what has landed, by piece

    def take(self) -> int | None:
        """A free slot."""
        if not self.free:
            return None
        slot = self.free.pop()
        self.out[slot] = True
        return slot

    def give_back(self, slot: int) -> None:
        """Release a slot."""
        if not self.out[slot]:
            raise Violation(f"{self.name}: slot {slot} is released twice")
        self.out[slot] = False
        self.epochs[slot] += 1
        self.content[slot] = {}
        self.free.append(slot)

    def check_home(self) -> None:
        """Raise unless all slots are free."""
        if any(self.out):
            raise Violation(f"{self.name}: {sum(self.out)} slots are not home")
