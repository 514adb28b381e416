"""A chunk goes through staging unchanged, from any ranks to any, and staging stays where the backend knows it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from pdjax.transfer.slot_memory import SlotMemory
from pdjax.transfer.staging import LandingRing, Slots
from tests.transfer import moved_chunks

PAIRS = ["12", "21", "24", "42", "41", "14", "22"]  # devices of the prefill and of the decode side


@pytest.mark.parametrize(
    "memories", list(itertools.product(SlotMemory, SlotMemory)), ids=lambda pair: "-".join(m.name for m in pair)
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_arrive_bit_for_bit_and_others_are_untouched(dtype: str, memories: tuple[SlotMemory, SlotMemory]) -> None:
    """Wherever either side's slots are."""
    sides = list(memories)
    with mock.patch("pdjax.transfer.staging.memory_of", lambda *_: sides.pop(0)):
        source, destination = moved_chunks.check(1, 1, dtype)
    for side, memory in zip((source, destination), memories, strict=True):
        assert bool(side.memory.of_devices) == (memory is SlotMemory.DIRECT)
    for staging in (*source.staging, *destination.rings):
        staging.check_integrity()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_they_do_between_any_numbers_of_devices(dtype: str) -> None:
    command = [sys.executable, "-m", "tests.transfer.moved_chunks", dtype, *PAIRS]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert not done.returncode, done.stderr


def test_slots_are_handed_out_once() -> None:
    slots = Slots(2)
    assert {slots.take(), slots.take()} == {0, 1} and slots.take() is None
    slots.free(1)
    assert slots.take() == 1
    with pytest.raises(AssertionError, match="not in use"):
        slots.free(2)


def test_ranges_that_a_peer_makes_up_are_no_memory() -> None:
    shard = jax.device_put(np.zeros((1, 3, 1, 2, 4, 8), np.float32), jax.devices()[0])
    memory: Any = moved_chunks.Memory()
    ring = LandingRing(shard, slots=2, slot_pages=1, backend=memory, region=1)
    assert ring.checksum("xxh3", 1, 0, ring.slot_bytes) is not None
    for made_up in [(2, 0, 8), (-1, 0, 8), (0, 8, ring.slot_bytes), (0, -8, 16), (0, 0, 0), (0, 2, 4), (0, 0, 5)]:
        assert ring.checksum("xxh3", *made_up) is None
