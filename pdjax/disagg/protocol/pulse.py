"""Heartbeats: saying that this side lives, and noticing that a peer has fallen silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Heard:
    """What is known of a peer: when it last said anything, and how many steps it had run by its last heartbeat."""

    at: float
    steps: int = 0


class Pulse:
    """For all links of an instance. A peer is expected to speak only while this side has rooms on the link: it has
    the same rooms, and where it has not, it answers our heartbeats."""

    def __init__(self, interval: float, bound: float) -> None:
        self._interval = interval
        self._bound = bound
        self._heard: dict[str, Heard] = {}
        self.due: float | None = None  # when to call `beat` next; None: not before `busy`

    def up(self, link: str, now: float) -> None:
        """A link stands."""
        self._heard[link] = Heard(now)

    def down(self, link: str) -> None:
        """A link is gone."""
        self._heard.pop(link, None)

    def heard(self, link: str, now: float, steps: int | None = None) -> None:
        """A peer has said something."""
        peer = self._heard.get(link)
        if peer is not None:
            peer.at = now
            if steps is not None:
                peer.steps = steps

    def busy(self, link: str, now: float) -> None:
        """A link has got its first room: from now on its peer is expected to speak."""
        self.heard(link, now)
        if self.due is None:
            self.due = now + self._interval

    def beat(self, now: float, live: Callable[[str], int]) -> tuple[list[str], list[tuple[str, str]]]:
        """Links to send a heartbeat on, and links whose peers have been silent for too long, with a sentence each."""
        late = now - self.due > self._bound / 2 if self.due is not None else False
        speak = [link for link in self._heard if live(link)]
        self.due = now + self._interval if speak else None
        silent: list[tuple[str, str]] = []
        for link in speak:
            peer = self._heard[link]
            if late:
                peer.at = now  # it was this side that stood still, and has not read what came meanwhile
            elif now - peer.at >= self._bound:
                silent.append(
                    (link, f"it has said nothing for {now - peer.at:.1f} s, after {peer.steps} steps: it hangs")
                )
        hung = {link for link, _ in silent}
        return [link for link in speak if link not in hung], silent
