"""RingAllocator: slots of any size, cut out of one registered region in the order that chunks come.

Pure bookkeeping: offsets and counts of bytes, no memory. A slot never wraps around the region's end; what is left there
is skipped. Slots may be given back in any order, and their bytes are used again once all older slots are back too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

ALIGNMENT = 64  # bytes; what JAX needs to read a slot where it lies


class OversizedError(ValueError):
    """A slot that the region could not hold even when empty."""


@dataclass(frozen=True, order=True)
class Mark:
    """A place in the endless row of rounds through the region. Marks compare by age: the older is the lesser."""

    round: int
    offset: int  # bytes


@dataclass(frozen=True)
class RingSlot:
    """`id` is never used again, so that a late or a second `free` harms nobody."""

    id: int
    round: int
    offset: int  # bytes
    nbytes: int  # as asked for


class RingAllocator:
    """See the module's docstring.

    Args:
        nbytes: of the region; a multiple of `ALIGNMENT`.

    Raises:
        ValueError: not a positive multiple.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % ALIGNMENT:
            raise ValueError(f"a ring of {nbytes} bytes; expected a positive multiple of {ALIGNMENT}")
        self.nbytes = nbytes
        self._head = Mark(0, 0)  # where the next slot begins, unless it must skip to the next round
        self._slots: deque[RingSlot] = deque()  # oldest first; also those given back that an older one holds up
        self._returned: set[int] = set()  # ids among them
        self._next_id = 0

    @property
    def in_use(self) -> int:
        """How many slots are not given back."""
        return len(self._slots) - len(self._returned)

    @property
    def watermark(self) -> Mark:
        """Everything older than this is free: a slot that ends at (round, offset) may be written once the watermark has
        reached (round - 1, offset)."""
        return Mark(self._slots[0].round, self._slots[0].offset) if self._slots else self._head

    def allocate(self, nbytes: int) -> RingSlot | None:
        """The next slot, or None when it would run into one that is still in use: ask again after a `free`.

        Raises:
            OversizedError: more bytes than the region has: cut the chunk, or make the ring larger.
            ValueError: no bytes.
        """
        if nbytes <= 0:
            raise ValueError(f"a slot of {nbytes} bytes; expected 1 or more")
        if nbytes > self.nbytes:
            raise OversizedError(
                f"a slot of {nbytes} bytes does not fit into a ring of {self.nbytes}: cut the chunk, or make the ring "
                "larger"
            )
        start = self._head
        if start.offset + nbytes > self.nbytes:
            start = Mark(start.round + 1, 0)
        end = start.offset + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._slots and Mark(start.round - 1, end) > self.watermark:
            return None
        slot = RingSlot(self._next_id, start.round, start.offset, nbytes)
        self._next_id += 1
        self._head = Mark(start.round, end)
        self._slots.append(slot)
        return slot

    def free(self, id: int) -> bool:
        """Give a slot back. False, and nothing happens, for one that is not in use."""
        if id in self._returned or not any(slot.id == id for slot in self._slots):
            return False
        self._returned.add(id)
        while self._slots and self._slots[0].id in self._returned:
            self._returned.remove(self._slots.popleft().id)
        if not self._slots:
            self._head = Mark(self._head.round + 1, 0)  # empty: from its start it has the longest run there can be
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots lie within the region, in order, apart, and none that is back is leaked."""
        spans = [(slot.round * self.nbytes + slot.offset, slot.nbytes) for slot in self._slots]
        ends = [start + nbytes for start, nbytes in spans]
        sound = all(end <= start for end, (start, _) in zip(ends, spans[1:]))
        sound &= all(slot.offset >= 0 and slot.offset + slot.nbytes <= self.nbytes for slot in self._slots)
        sound &= not spans or max(ends) - spans[0][0] <= self.nbytes
        sound &= self._returned <= {slot.id for slot in self._slots}
        if not sound or (self._slots and self._slots[0].id in self._returned):
            raise AssertionError(f"the ring is inconsistent: slots {list(self._slots)}, returned {self._returned}")
