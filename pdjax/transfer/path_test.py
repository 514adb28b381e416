"""Memory for messages that test a data path: a region of its own, so that one that lands late harms nobody."""

from __future__ import annotations

import ctypes
import hashlib

import numpy as np

from pdjax.transfer.backend import TransferBackend

PATH_REGION = 0  # on both sides; the staging ring and the source slots have the numbers above
CELL = 64  # bytes of a message
_CELLS = 1024  # a message comes into the memory of one that was sent so many before


class PathTestCells:
    """Messages by number. A decode instance's are written by its peers (`receives`); a prefill instance's are what it
    writes."""

    def __init__(self, backend: TransferBackend, *, receives: bool) -> None:
        if receives:
            address = backend.allocate(PATH_REGION, _CELLS * CELL)
        else:
            self._memory = np.zeros(_CELLS * CELL, np.uint8)
            address = self._memory.ctypes.data
            backend.register(PATH_REGION, address, _CELLS * CELL)
        self._address = address

    def fill(self, number: int) -> int:
        """Write a message here. Returns its offset in the region, which is the same on the other side."""
        ctypes.memmove(self._address + _offset(number), _message(number), CELL)
        return _offset(number)

    def holds(self, number: int) -> bool:
        """Whether a message has come and is right."""
        return ctypes.string_at(self._address + _offset(number), CELL) == _message(number)


def _offset(number: int) -> int:
    return number % _CELLS * CELL


def _message(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=CELL).digest()
