"""How many ranks an instance has, which of them have registered, and which of them a room belongs to.

Ranks are counted by coordinate: one that registers again takes its own place.
"""

from __future__ import annotations

import itertools

import msgspec

AXES = ("dp", "cp", "pp", "tp")


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of an instance's axes: data, context, pipeline and tensor parallel."""

    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.cp * self.pp * self.tp


class Rank(msgspec.Struct, frozen=True):
    """One rank: its coordinates, and how its memory is reached (the transfer backend's own description)."""

    transfer: bytes
    dp: int = 0
    cp: int = 0
    pp: int = 0
    tp: int = 0

    @property
    def place(self) -> tuple[int, ...]:
        """Coordinates in the order of `AXES`."""
        return (self.dp, self.cp, self.pp, self.tp)


def with_rank(ranks: list[Rank], rank: Rank) -> list[Rank]:
    """Ranks with one more, or one replaced."""
    return [*(other for other in ranks if other.place != rank.place), rank]


def incomplete(topology: Topology, ranks: list[Rank]) -> str | None:
    """A sentence that names the ranks that have not registered, or that have no business here; None: all is there."""
    sizes = [getattr(topology, axis) for axis in AXES]
    if min(sizes) < 1:
        return f"a topology of {topology} has no ranks"
    if topology.size > len(ranks):
        known = {rank.place for rank in ranks}
        absent = (place for place in itertools.product(*map(range, sizes)) if place not in known)
        named = ", ".join(_name(place) for place in itertools.islice(absent, 4))
        return f"{topology.size - len(ranks)} of {topology.size} ranks have not registered: {named}"
    strangers = [rank for rank in ranks if any(at >= size for at, size in zip(rank.place, sizes, strict=True))]
    if strangers or len({rank.place for rank in ranks}) != topology.size:
        return f"{len(ranks)} ranks have registered for {topology.size} places: {', '.join(map(_of, ranks[:4]))}"
    return None


def follow_bootstrap_room(room: int, topology: Topology, forced: int | None = None) -> int:
    """The prefill dp rank that a room belongs to.

    Raises:
        ValueError: the request asks for another rank than the room's.
    """
    rank = room % topology.dp
    if forced is not None and forced != rank:
        raise ValueError(
            f"room {room} belongs to dp rank {rank} of {topology.dp} (room mod dp), and the request asks for dp rank "
            f"{forced}: choose a room that fits, or leave the rank out"
        )
    return rank


def _of(rank: Rank) -> str:
    return _name(rank.place)


def _name(place: tuple[int, ...]) -> str:
    return " ".join(f"{axis} {at}" for axis, at in zip(AXES, place, strict=True))
