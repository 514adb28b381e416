"""Memory for messages that test a data path: a region of its own, so that one that lands late harms nobody."""

from __future__ import annotations

import ctypes
import hashlib

import numpy as np

from pdjax.transfer.backend import TransferBackend

PATH_REGION = 0  # on both sides; the staging ring and the source slots have the numbers above
CELL = 64  # bytes of a message
_CELLS = 1024  # of a sender; a message comes into the memory of one that was sent so many before
_SENDERS = 16  # with cells of their own; further ones share them, message by message
_NBYTES = _SENDERS * _CELLS * CELL


class PathTestCells:
    """Messages by number and sender. A decode process's are written by its peers' processes (`receives`); a prefill
    process's are what it writes."""

    def __init__(self, backend: TransferBackend, *, receives: bool) -> None:
        if receives:
            address = backend.allocate(PATH_REGION, _NBYTES)
        else:
            self._memory = np.zeros(_NBYTES, np.uint8)
            address = self._memory.ctypes.data
            backend.register(PATH_REGION, address, _NBYTES)
        self._address = address

    def fill(self, number: int, sender: int) -> int:
        """Write a message here. Returns its offset in the region, which is the same on the other side."""
        offset = _offset(number, sender)
        ctypes.memmove(self._address + offset, _message(number), CELL)
        return offset

    def holds(self, number: int, sender: int) -> bool:
        """Whether a message has come and is right."""
        return ctypes.string_at(self._address + _offset(number, sender), CELL) == _message(number)


def _offset(number: int, sender: int) -> int:
    return (sender % _SENDERS * _CELLS + number % _CELLS) * CELL


def _message(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=CELL).digest()
