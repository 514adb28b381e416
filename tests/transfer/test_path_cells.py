"""Test messages: each sender's has its place, and what is there says whether it is the one that was sent."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pdjax.transfer.path_test import CELL, PathTestCells


class OneHost:
    """Memory of both sides, without a network."""

    def __init__(self) -> None:
        self.regions: list[np.ndarray] = []
        self.source = 0

    def allocate(self, region: int, nbytes: int) -> int:
        self.regions.append(np.zeros(nbytes, np.uint8))
        return self.regions[-1].ctypes.data

    def register(self, region: int, address: int, nbytes: int) -> None:
        self.source = address


def test_a_message_of_one_process_is_not_taken_for_anothers() -> None:
    host: Any = OneHost()
    sender, receiver = PathTestCells(host, receives=False), PathTestCells(host, receives=True)
    offset = sender.fill(5, 2)
    ctypes.memmove(host.regions[0].ctypes.data + offset, host.source + offset, CELL)
    assert receiver.holds(5, 2)
    assert not receiver.holds(5, 0) and not receiver.holds(6, 2)
    host.regions[0][offset + 1] ^= 1
    assert not receiver.holds(5, 2)
