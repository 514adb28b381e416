"""What a prefill and a decode instance have in common: how they listen on a link, and how they show that they live."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.actions import Action, Send
from pdjax.disagg.protocol.hosts import Host
from pdjax.disagg.protocol.path_tests import PathHealth
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.pulse import Peer, Pulse
from pdjax.disagg.protocol.room import Room
from pdjax.disagg.protocol.timers import Timed, Timers
from pdjax.disagg.protocol.turns import Turns

H = TypeVar("H", bound=Host)
R = TypeVar("R", bound=Room)
J = TypeVar("J")  # a live request
P = TypeVar("P", bound=Peer)


class Instance(Generic[H, R, J, P]):
    """Books and talk that do not depend on the side.

    Attributes:
        steps: for whoever runs the instance to count: heartbeats carry it.
        counters: totals by name.
    """

    def __init__(self, host: H, *, timeouts: Timeouts, counters: Iterable[str]) -> None:
        self.steps = 0
        self.counters = dict.fromkeys(counters, 0)
        self._host = host
        self._timeouts = timeouts
        self._rooms: dict[int, R] = {}  # that have not ended
        self._ending: dict[int, R] = {}  # ended, with writes that may still be on their way, by generation
        self._jobs: dict[int, J] = {}  # by room
        self._room_of: dict[str, int] = {}
        self._turns: Turns[J] = Turns()  # who waits for pages
        self._peers: dict[str, P] = {}  # by link
        self._timers: Timers[Timed] = Timers()  # of rooms, the pulse and whatever else the side has
        self._pulse = Pulse(timeouts.heartbeat, timeouts.peer)
        self._health = PathHealth()

    def tick(self, now: float) -> float:
        """Fire what is due, beat, give out pages. Returns when to call again at the latest, perhaps `NEVER`."""
        timers = self._timers
        if now >= timers.next:
            for timed in timers.due(now):
                self._fire(timed, now)
        if self._turns.waiting:
            self._give_pages(now)
        return timers.next

    def waits_for(self, rid: str) -> str:
        """What the room of a request waits for, in words; empty: it has none any more."""
        room = self._rooms.get(self._room_of.get(rid, -1))
        return "" if room is None or room.ended else room.awaited

    def problem(self, now: float) -> str | None:
        """Why this instance cannot serve, in words."""
        return self._health.problem(now)

    def frame(self, link: str, body: bytes, now: float) -> None:
        """A frame has come over a link."""
        peer = self._peers.get(link)
        if peer is None:
            return
        peer.heard_at = now
        try:
            message = messages.decode_message(body)
        except messages.ProtocolError as error:
            self._refuse_frame(link, str(error))
            return
        if isinstance(message, messages.Message):
            self._received(link, peer, message, now)
        elif isinstance(message, messages.Heartbeat):
            peer.steps = message.steps
            if message.rooms and not peer.rooms:
                self._host.send(link, messages.encode(messages.Heartbeat(self.steps, 0)))
        else:
            self.counters["frames_refused_by_peers"] += isinstance(message, messages.Refused)
            self._told(link, message, now)

    def _refuse_frame(self, link: str, reason: str) -> None:
        self.counters["refused_frames"] += 1
        self._host.say(f"a frame was dropped: {reason}")
        self._host.send(link, messages.encode(messages.Refused(reason)))

    def _busy(self, peer: Peer[R], now: float) -> None:
        """A link has got its first room."""
        self._pulse.busy(peer, now)
        self._timers.watch(self._pulse)

    def _beat(self, now: float) -> None:
        """Send heartbeats, and give up the links of peers that hang."""
        peers = self._peers
        speak, silent = self._pulse.beat(now, peers)
        self._timers.watch(self._pulse)
        for link in speak:
            self._host.send(link, messages.encode(messages.Heartbeat(self.steps, len(peers[link].rooms))))
        for link, sentence in silent:
            self.counters["hung_peers"] += 1
            self._give_up(link, sentence, now)

    def _carry_out(self, room: R, actions: list[Action], now: float) -> None:
        for action in actions:
            if type(action) is Send:  # asked so often that `isinstance` shows
                self._host.send(action.link, messages.encode(action.message))
            else:
                self._perform(room, action, now)

    def _leave(self, room: R) -> None:
        """A room has ended: its number is free."""
        if self._rooms.get(room.room) is room:
            del self._rooms[room.room]

    def _close(self, room: R) -> None:
        """A room holds nothing any more."""
        self._leave(room)
        if room.generation is not None:
            self._ending.pop(room.generation, None)
            peer = self._peers.get(room.link) if room.link is not None else None
            if peer is not None:
                peer.rooms.pop(room.generation, None)

    def _totals(self) -> dict[str, float]:
        return {f"{name}_total": float(value) for name, value in self.counters.items()}

    def check_integrity(self) -> None:
        """Raise unless the books add up; call it when no request is live."""
        raise NotImplementedError

    def _received(self, link: str, peer: P, message: messages.RoomMessage, now: float) -> None:
        """A message about a room has come."""
        raise NotImplementedError

    def _told(self, link: str, message: messages.Refused | messages.PathTest | messages.PathFailed, now: float) -> None:
        """A message about a link has come."""
        raise NotImplementedError

    def _perform(self, room: R, action: Action, now: float) -> None:
        """Something but `Send` that a room asks for."""
        raise NotImplementedError

    def _fire(self, timed: Timed, now: float) -> None:
        """A deadline has passed."""
        raise NotImplementedError

    def _give_pages(self, now: float) -> None:
        """To those who wait for them, as far as these reach."""
        raise NotImplementedError

    def _give_up(self, link: str, sentence: str, now: float) -> None:
        """End a link whose peer hangs; the sentence says since when."""
        raise NotImplementedError
