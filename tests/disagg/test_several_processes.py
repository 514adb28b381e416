"""A decode instance of two processes, whose second one is as slow as the test wants."""

from __future__ import annotations

import numpy as np
import pytest
from close_pair import SLOTS
from small_engine import SmallEngine

from pdjax.disagg import orders
from pdjax.engine.orders import Order, RoleOrder, RoleReport


class SlowProcess:
    """A journal that keeps what the second process is told to copy out of slots. It has no rank of its own."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def ordered(self, order: Order) -> None:
        if isinstance(order, RoleOrder):
            told = orders.decode_order(order.body)
            if isinstance(told, orders.ScatterChunk):
                self.slots.append(told.chunk.slot)
            elif isinstance(told, orders.ZeroPages):
                self.slots.append(told.slot)

    def picked(self, token_ids: list[int]) -> None:
        return None

    def copy_one(self) -> RoleReport:
        return RoleReport(orders.encode(orders.SlotEmptied(self.slots.pop(0))))


@pytest.fixture
def slow(models, monkeypatch: pytest.MonkeyPatch) -> SlowProcess:
    process = SlowProcess()
    monkeypatch.setattr(models.decode.runner, "journal", process)
    return process


def test_a_slot_takes_another_chunk_only_when_every_process_has_copied_out_the_last(models, slow) -> None:
    pair = models.pair(decode_processes=2)
    ids = np.random.default_rng(11).integers(0, 256, 90).tolist()
    pair.send("r", ids)
    for chunks in range(SLOTS, 7):
        for _ in range(200):
            pair.turn()
        assert pair.stats()["received_chunks_total"] == min(chunks, 6)
        pair.decode.inbox.put(slow.copy_one())
    while slow.slots:
        pair.decode.inbox.put(slow.copy_one())
    pair.run()
    small = SmallEngine(models.prefill, prefix_cache=False)
    small.send("r", ids, 8)
    small.run()
    assert pair.ids("r") == small.ids("r")


def test_an_aborted_room_gives_its_slot_back_only_when_every_process_is_done_with_it(models, slow) -> None:
    pair = models.pair(decode_processes=2)
    pair.send("r", list(range(12)), 50)
    while not slow.slots:
        pair.turn()
    pair.abort("r")
    for _ in range(50):
        pair.turn()
    assert pair.stats()["staging_slots_free"] == SLOTS - 1
    pair.decode.inbox.put(slow.copy_one())
    pair.run()
