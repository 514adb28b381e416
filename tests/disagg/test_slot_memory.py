"""Devices with memory of their own, as GPUs are: the network reads and writes it, or copies of it in the host's."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from small_engine import PAGE, SmallEngine

from pdjax.transfer.slot_memory import SlotMemory

COPIED, DIRECT, SHARED = SlotMemory.COPIED, SlotMemory.DIRECT, SlotMemory.SHARED
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 8 * PAGE - 1, 8 * PAGE + 1, 90]


def text(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


@pytest.mark.parametrize("memories", [(COPIED, SHARED), (SHARED, COPIED), (DIRECT, COPIED), (DIRECT, DIRECT)])
def test_a_pair_answers_the_same_wherever_its_slots_are(models, memories: tuple[SlotMemory, SlotMemory]) -> None:
    sides = list(memories)  # in the order that a pair is made
    with mock.patch("pdjax.transfer.staging.memory_of", lambda *_: sides.pop(0)):
        pair = models.pair()
    small = SmallEngine(models.prefill)
    for side in (pair, small):
        for length in LENGTHS:
            side.send(f"first {length}", text(length, length), 9)
        side.run()
        for length in LENGTHS:
            more = [*text(length, length), *side.ids(f"first {length}"), *text(1000 + length, 5)]
            side.send(f"second {length}", more, 9)
        side.run()
    for length in LENGTHS:
        for turn in ("first", "second"):
            assert pair.ids(f"{turn} {length}") == small.ids(f"{turn} {length}")
