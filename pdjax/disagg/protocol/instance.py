"""What a prefill and a decode instance have in common: how they listen on a link, and how they show that they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.hosts import Host
from pdjax.disagg.protocol.path_tests import PathHealth
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.pulse import Pulse


class _Room(Protocol):
    room: int


H = TypeVar("H", bound=Host)
R = TypeVar("R", bound=_Room)


class Instance(Generic[H, R]):
    """Books and talk that do not depend on the side.

    Attributes:
        steps: for whoever runs the instance to count: heartbeats carry it.
        counters: totals by name.
    """

    def __init__(self, host: H, *, timeouts: Timeouts, counters: Iterable[str]) -> None:
        self.steps = 0
        self.counters: Counter[str] = Counter(dict.fromkeys(counters, 0))
        self._host = host
        self._timeouts = timeouts
        self._rooms: dict[int, R] = {}  # that have not ended
        self._pulse = Pulse(timeouts.heartbeat, timeouts.peer)
        self._health = PathHealth()

    def problem(self, now: float) -> str | None:
        """Why this instance cannot serve, in words."""
        return self._health.problem(now)

    def _hear(
        self, link: str, body: bytes, rooms: Mapping[int, R], now: float
    ) -> messages.RoomMessage | messages.Refused | messages.PathTest | messages.PathFailed | None:
        """A frame of a peer that has claimed `rooms`: what it says, unless that is settled here."""
        self._pulse.heard(link, now)
        try:
            message = messages.decode_message(body)
        except messages.ProtocolError as error:
            self.counters["refused_frames"] += 1
            self._host.say(f"a frame was dropped: {error}")
            self._host.send(link, messages.encode(messages.Refused(str(error))))
            return None
        if isinstance(message, messages.Heartbeat):
            self._pulse.heard(link, now, message.steps)
            if message.rooms and not rooms:
                self._host.send(link, messages.encode(messages.Heartbeat(self.steps, 0)))
            return None
        if isinstance(message, messages.Refused):
            self.counters["frames_refused_by_peers"] += 1
        return message

    def _beat(self, now: float) -> None:
        """Send heartbeats, and give up the links of peers that hang."""
        speak, silent = self._pulse.beat(now, lambda link: len(self._rooms_on(link)))
        for link in speak:
            self._host.send(link, messages.encode(messages.Heartbeat(self.steps, len(self._rooms_on(link)))))
        for link, sentence in silent:
            self.counters["hung_peers"] += 1
            self._give_up(link, sentence, now)

    def _leave(self, room: R) -> None:
        """A room has ended: its number is free."""
        if self._rooms.get(room.room) is room:
            del self._rooms[room.room]

    def _totals(self) -> dict[str, float]:
        return {f"{name}_total": float(value) for name, value in self.counters.items()}

    def _rooms_on(self, link: str) -> Mapping[int, R]:
        """The rooms of a link that stands, by generation."""
        raise NotImplementedError

    def _give_up(self, link: str, sentence: str, now: float) -> None:
        """End a link whose peer hangs; the sentence says since when."""
        raise NotImplementedError
