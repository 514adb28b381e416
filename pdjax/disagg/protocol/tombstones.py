"""Rooms that ended on the prefill side before a decode instance had claimed them: their claims are answered at once."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

MOST = 4096  # kept at a time; the oldest go first


class Ended(msgspec.Struct, frozen=True, gc=False):
    """What its client was told. The digest tells a late claim from the claim of a later room of the same number."""

    prompt_digest: bytes
    status: int
    reason: str
    until: float


class Tombstones:
    """By room number. Each is kept for `seconds`, and answers one claim."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended: OrderedDict[int, Ended] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def put(self, room: int, prompt_digest: bytes, status: int, reason: str, now: float) -> None:
        """A room has ended."""
        ended = self._ended
        ended.pop(room, None)
        while ended and (len(ended) >= MOST or next(iter(ended.values())).until <= now):
            ended.popitem(last=False)
        ended[room] = Ended(prompt_digest, status, reason, now + self._seconds)

    def take(self, room: int, prompt_digest: bytes, now: float) -> Ended | None:
        """What became of a room with this prompt, if it is known."""
        ended = self._ended.get(room)
        if ended is None or ended.prompt_digest != prompt_digest or ended.until <= now:
            return None
        return self._ended.pop(room)
