"""Which ranks of an instance have registered, and which of them a room belongs to.

Ranks are counted by coordinate: one that registers again takes its own place.
"""

from __future__ import annotations

import itertools

import msgspec

from pdjax.transfer.layout import Layout

AXES = ("dp", "cp", "pp", "tp")
FOLLOW_BOOTSTRAP_ROOM, LOOKUP = "follow_bootstrap_room", "lookup"  # see `pdjax.config.Disagg.dp_policy`


class Rank(msgspec.Struct, frozen=True):
    """One rank, which is a device: its coordinates, how its process is reached (the transfer backend's own description,
    the same for all ranks of a process) and which region of that process is its staging ring."""

    transfer: bytes
    region: int = 1
    dp: int = 0
    cp: int = 0
    pp: int = 0
    tp: int = 0

    @property
    def place(self) -> tuple[int, ...]:
        """Coordinates in the order of `AXES`."""
        return (self.dp, self.cp, self.pp, self.tp)


def ranks_of(layout: Layout, transfers: list[bytes]) -> list[Rank]:
    """All ranks of a layout, in its order. `transfers` has each one's description in that order."""
    axes = (range(layout.pp), range(layout.dp), range(layout.cp), range(layout.tp))
    return [
        Rank(transfers[number], region=region_of(number), dp=dp, cp=cp, pp=pp, tp=tp)
        for number, (pp, dp, cp, tp) in enumerate(itertools.product(*axes))
    ]


def region_of(rank: int) -> int:
    """The region that is the staging ring of a rank, by the rank's number in its layout."""
    return 1 + rank


def in_order(ranks: list[Rank]) -> list[Rank]:
    """Ranks by their numbers in the layout."""
    return sorted(ranks, key=lambda rank: (rank.pp, rank.dp, rank.cp, rank.tp))


def with_rank(ranks: list[Rank], rank: Rank) -> list[Rank]:
    """Ranks with one more, or one replaced."""
    return [*(other for other in ranks if other.place != rank.place), rank]


def incomplete(layout: Layout, ranks: list[Rank]) -> str | None:
    """A sentence that names the ranks that have not registered, or that have no business here; None: all is there."""
    sizes = [getattr(layout, axis) for axis in AXES]
    if min(sizes) < 1:
        return f"a layout of {layout} has no ranks"
    known = {rank.place for rank in ranks}
    if layout.ranks > len(ranks):
        absent = (place for place in itertools.product(*map(range, sizes)) if place not in known)
        named = ", ".join(_name(place) for place in itertools.islice(absent, 4))
        return f"{layout.ranks - len(ranks)} of {layout.ranks} ranks have not registered: {named}"
    if layout.ranks < len(ranks) or known != set(itertools.product(*map(range, sizes))):
        return f"{len(ranks)} ranks have registered for {layout.ranks} places: {', '.join(map(_of, ranks[:4]))}"
    return None


def follow_bootstrap_room(room: int, layout: Layout, forced: int | None = None) -> int:
    """The dp rank that a room belongs to, on either side.

    Raises:
        ValueError: the request asks for another rank than the room's.
    """
    rank = room % layout.dp
    if forced is not None and forced != rank:
        raise ValueError(
            f"room {room} belongs to dp rank {rank} of {layout.dp} (room mod dp), and the request asks for dp rank "
            f"{forced}: choose a room that fits, or leave the rank out"
        )
    return rank


def dp_rank_of(room: int, layout: Layout, forced: int | None, policy: str) -> int | None:
    """The dp rank that a room has to go to; None: whichever suits its instance best.

    Raises:
        ValueError: see `follow_bootstrap_room`.
    """
    return forced if policy == LOOKUP else follow_bootstrap_room(room, layout, forced)


def _of(rank: Rank) -> str:
    return _name(rank.place)


def _name(place: tuple[int, ...]) -> str:
    return " ".join(f"{axis} {at}" for axis, at in zip(AXES, place, strict=True))
