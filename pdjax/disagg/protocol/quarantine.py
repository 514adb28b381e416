"""Slots that a peer out of reach may still write to: kept, and asked about until it answers or is known to be gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdjax.disagg.protocol.decode_room import DecodeRoom
from pdjax.disagg.protocol.timers import NEVER

FIRST_LOOK, LAST_LOOK = 2.0, 60.0  # seconds between attempts to reach it: doubled each time


@dataclass
class Held:
    """Rooms, by generation, of one life of a peer."""

    instance: int
    rooms: dict[int, DecodeRoom] = field(default_factory=dict)
    look_at: float = 0.0
    pause: float = FIRST_LOOK


class Quarantine:
    """By link, which is also the peer's address, ``host:port``."""

    closed = False

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.deadline = NEVER  # when to call `due` at the latest
        self.timer = NEVER

    def put(self, link: str, instance: int, rooms: dict[int, DecodeRoom], now: float) -> None:
        """Keep rooms whose peer is out of reach."""
        held = self.held.setdefault(link, Held(instance))
        held.rooms.update(rooms)
        held.look_at = now + held.pause
        self.deadline = min(self.deadline, held.look_at)

    def take(self, link: str) -> Held | None:
        """The peer, or its fate, is known: it is for the caller to go on with the rooms."""
        return self.held.pop(link, None)

    def due(self, now: float) -> list[tuple[str, str, int]]:
        """Links to try again, with their hosts and ports."""
        found: list[tuple[str, str, int]] = []
        for link, held in list(self.held.items()):
            if not any(room.granted_slots for room in held.rooms.values()):
                del self.held[link]  # what was on its way has landed
            elif held.look_at <= now:
                held.pause = min(2 * held.pause, LAST_LOOK)
                held.look_at = now + held.pause
                host, _, port = link.rpartition(":")
                found.append((link, host, int(port)))
        self.deadline = min((held.look_at for held in self.held.values()), default=NEVER)
        return found
