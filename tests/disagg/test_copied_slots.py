"""Devices whose memory the network does not reach, as GPUs are: what is sent and what lands is copied through the
host's."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from small_engine import PAGE, SmallEngine

LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 8 * PAGE - 1, 8 * PAGE + 1, 90]


def text(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


@pytest.mark.parametrize("apart", [("prefill",), ("decode",), ("prefill", "decode")])
def test_a_pair_answers_the_same_whichever_side_has_memory_of_its_own(models, apart: tuple[str, ...]) -> None:
    def shares_memory(device: object) -> bool:
        side = "prefill" if sides.pop(0) else "decode"
        return side not in apart

    sides = [True, False]  # in the order that a pair is made
    with mock.patch("pdjax.transfer.staging.shares_memory", shares_memory):
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
