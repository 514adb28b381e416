"""Heartbeats: saying that this side lives, and noticing that a peer has fallen silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from pdjax.disagg.protocol.timers import NEVER, Timed

R = TypeVar("R")


class Peer(Generic[R]):
    """The other end of a link.

    Attributes:
        rooms: those with it that hold something, by generation.
        heard_at: when it last said anything.
        steps: how many it had run by its last heartbeat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rooms: dict[int, R] = {}
        self.heard_at = 0.0
        self.steps = 0


class Pulse(Timed):
    """For all links of an instance. A peer is expected to speak only while this side has rooms on the link: it has
    the same rooms, and where it has not, it answers our heartbeats."""

    def __init__(self, interval: float, bound: float) -> None:
        super().__init__()
        self._interval = interval
        self._bound = bound

    def busy(self, peer: Peer, now: float) -> None:
        """A link has got its first room: from now on its peer is expected to speak."""
        peer.heard_at = now
        if self.deadline == NEVER:
            self.deadline = now + self._interval

    def beat(self, now: float, peers: Mapping[str, Peer]) -> tuple[list[str], list[tuple[str, str]]]:
        """Links to send a heartbeat on, and links whose peers have been silent for too long, with a sentence each."""
        late = now - self.deadline > self._bound / 2
        speak: list[str] = []
        silent: list[tuple[str, str]] = []
        for link, peer in peers.items():
            if not peer.rooms:
                continue
            if late:
                peer.heard_at = now  # it was this side that stood still, and has not read what came meanwhile
            silence = now - peer.heard_at
            if silence < self._bound:
                speak.append(link)
            else:
                sentence = f"it has said nothing for {silence:.1f} s, after {peer.steps} steps"
                silent.append((link, f"{sentence}: it hangs, or its host is out of reach"))
        self.deadline = now + self._interval if speak or silent else NEVER
        return speak, silent
