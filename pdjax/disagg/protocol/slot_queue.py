"""Who gets a decode instance's next free staging slot."""

from __future__ import annotations

from collections import Counter, deque

from pdjax.disagg.protocol.decode_room import DecodeRoom


class SlotQueue:
    """Chunks that wait for slots, the oldest first, and how many slots each peer has.

    Args:
        slots: of the ring.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: deque[tuple[DecodeRoom, int]] = deque()
        self._out: Counter[str] = Counter()  # by peer
        self._taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, room: DecodeRoom, chunk: int) -> None:
        """A chunk of a room needs a slot."""
        self._waiting.append((room, chunk))

    def turn(self, peers: int) -> int | None:
        """Whose turn it is, as a place in the queue, if a slot is free; None: nobody's. `peers`: linked instances.

        With several peers, the last free slot is for one that has none: a peer that hangs must not keep them all.
        """
        waiting = self._waiting
        while waiting and waiting[0][0].ended:
            waiting.popleft()
        if not waiting:
            return None
        if peers < 2 or self._taken + 1 < self._slots or self._slots == 1:
            return 0
        for place, (room, _) in enumerate(waiting):
            if not self._out[room.peer] and not room.ended:
                return place
        return None

    def take(self, place: int) -> tuple[DecodeRoom, int]:
        """The chunk at this place has its slot."""
        room, chunk = self._waiting[place]
        del self._waiting[place]
        self._out[room.peer] += 1
        self._taken += 1
        return room, chunk

    def give_back(self, room: DecodeRoom) -> None:
        """A slot of a room is free."""
        self._out[room.peer] -= 1
        self._taken -= 1
