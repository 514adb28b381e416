"""Slots that a peer out of reach may still write to: kept, and asked about until it answers or is known to be gone."""

from __future__ import annotations

import msgspec

from pdjax.disagg.protocol.decode_room import DecodeRoom
from pdjax.disagg.protocol.timers import NEVER, Timed

FIRST_LOOK, LAST_LOOK = 2.0, 60.0  # seconds between attempts to reach it: doubled each time


class Held:
    """Rooms, by generation, of one life of a peer."""

    def __init__(self, processes: tuple[bytes, ...], workers: bool) -> None:
        self.processes = processes  # as they describe themselves
        self.workers = workers  # it has processes besides its leader's
        self.cut_off = False  # whether it was tried
        self.rooms: dict[int, DecodeRoom] = {}
        self.look_at = 0.0
        self.pause = FIRST_LOOK
        self.gone = False  # its leader is known to have ended


class Due(msgspec.Struct, frozen=True, gc=False):
    """What is to be done: links to try again, with their hosts and ports, and rooms that nobody writes for any more."""

    links: list[tuple[str, str, int]]
    rooms: list[DecodeRoom]


class Quarantine(Timed):
    """By link, which is also the peer's address, ``host:port``, and by the life of the peer there.

    Args:
        workers_end: see `Timeouts`.
    """

    def __init__(self, workers_end: float) -> None:
        super().__init__()
        self._workers_end = workers_end
        self._held: dict[tuple[str, int], Held] = {}

    def put(
        self,
        link: str,
        instance: int,
        rooms: dict[int, DecodeRoom],
        now: float,
        *,
        processes: tuple[bytes, ...],
        workers: bool,
    ) -> None:
        """Keep rooms whose peer is out of reach."""
        held = self._held.setdefault((link, instance), Held(processes, workers))
        held.rooms.update(rooms)
        if not held.gone:
            self._look(held, now + held.pause)

    def back(self, link: str, instance: int, now: float) -> dict[int, DecodeRoom]:
        """A peer is there again. Returns the rooms of this life of it, for the caller to go on with. Any other has
        ended."""
        held = self._held.pop((link, instance), None)
        self.gone(link, now)
        return held.rooms if held is not None else {}

    def gone(self, link: str, now: float) -> None:
        """Whoever had this link has ended, or its leader has: its rooms are due now, or when its workers have."""
        for (address, _), held in self._held.items():
            if address == link and not held.gone:
                held.gone = True
                self._look(held, now + self._workers_end if held.workers else now)

    def cut_off(self, link: str) -> list[tuple[tuple[bytes, ...], list[DecodeRoom]]]:
        """Nobody answers at this address, not even its host. Returns the processes that had links there and are to be
        cut off, each time with their rooms; once for each life of the peer."""
        found = []
        for (address, _), held in self._held.items():
            if address == link and not held.gone and not held.cut_off:
                held.cut_off = True
                found.append((held.processes, list(held.rooms.values())))
        return found

    def due(self, now: float) -> Due:
        """Look at all that is held."""
        due = Due([], [])
        for (link, instance), held in list(self._held.items()):
            if not any(room.granted_slots for room in held.rooms.values()):
                del self._held[link, instance]  # what was on its way has landed
            elif held.look_at <= now and held.gone:
                del self._held[link, instance]
                due.rooms.extend(held.rooms.values())
            elif held.look_at <= now:
                held.pause = min(2 * held.pause, LAST_LOOK)
                held.look_at = now + held.pause
                host, _, port = link.rpartition(":")
                due.links.append((link, host, int(port)))
        self.deadline = min((held.look_at for held in self._held.values()), default=NEVER)
        return due

    def _look(self, held: Held, at: float) -> None:
        held.look_at = at
        self.deadline = min(self.deadline, at)
