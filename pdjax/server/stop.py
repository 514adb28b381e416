"""Finds stop strings in text that comes in pieces, without letting out the start of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """The answer does not depend on how the text was cut: the first stop string to be complete ends it.

    Attributes:
        matched: the stop string that was found, or None.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        """`keep` leaves the stop string in the text."""
        self.matched: str | None = None
        self._stops = [stop for stop in stops if stop]
        self._keep = keep
        self._held = ""

    def add(self, text: str) -> str:
        """Take text; returns what may be shown. Nothing, once a stop string was found."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[:end] if self._keep else text[: end - len(self.matched)]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text that was held back, at the end of all text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
