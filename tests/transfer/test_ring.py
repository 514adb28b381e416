"""A ring's slots never overlap, never leak, and come back in whatever order transfers end."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdjax.transfer.ring import ALIGNMENT, Mark, OversizedError, RingAllocator, RingSlot

LINE = ALIGNMENT
SIZE = 10 * LINE


class RingMachine(RuleBasedStateMachine):
    """A ring beside a model: the bytes of the region, and who holds each."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = RingAllocator(SIZE)
        self.held: dict[int, RingSlot] = {}
        self.owner: list[int | None] = [None] * SIZE

    @rule(nbytes=st.integers(1, SIZE))
    def allocate(self, nbytes: int) -> None:
        slot = self.ring.allocate(nbytes)
        if slot is None:
            assert self.held, "an empty ring takes whatever fits"
            return
        assert slot.nbytes == nbytes and slot.offset % ALIGNMENT == 0 and slot.offset + nbytes <= SIZE
        assert not any(self.owner[slot.offset : slot.offset + nbytes]), "somebody's bytes"
        self.owner[slot.offset : slot.offset + nbytes] = [slot.id + 1] * nbytes
        self.held[slot.id] = slot

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            slot = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
            before = self.ring.watermark
            assert self.ring.free(slot.id)
            assert self.ring.watermark >= before
            self.owner[slot.offset : slot.offset + slot.nbytes] = [None] * slot.nbytes

    @rule(id=st.integers(-1, 200))
    def free_what_nobody_holds(self, id: int) -> None:
        if id not in self.held:
            before = self.ring.watermark
            assert not self.ring.free(id)
            assert self.ring.watermark == before

    @invariant()
    def nothing_is_lost(self) -> None:
        self.ring.check_integrity()
        assert self.ring.in_use == len(self.held)
        for slot in self.held.values():
            assert Mark(slot.round, slot.offset) >= self.ring.watermark
            assert Mark(slot.round - 1, slot.offset + slot.nbytes) <= self.ring.watermark, (
                "a writer would wait for ever"
            )

    def teardown(self) -> None:
        for id in list(self.held):
            assert self.ring.free(id)
        assert self.ring.allocate(SIZE) is not None, "all of it is free again"


TestAnyOrderOfSteps = RingMachine.TestCase
TestAnyOrderOfSteps.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def allocate(ring: RingAllocator, lines: int) -> RingSlot:
    slot = ring.allocate(lines * LINE)
    assert slot is not None
    return slot


def test_slots_follow_each_other_and_wrap_without_being_cut() -> None:
    ring = RingAllocator(SIZE)
    first, second = allocate(ring, 4), allocate(ring, 4)
    assert (first.offset, second.offset) == (0, 4 * LINE)
    ring.free(first.id)
    third = allocate(ring, 4)
    assert (third.offset, third.round) == (0, 1), "the two lines at the end are too few, and skipped"
    assert ring.allocate(LINE) is None, "it would begin where the second slot still is"
    ring.free(second.id)
    assert allocate(ring, 6).offset == 4 * LINE


def test_a_slot_that_comes_back_early_is_used_again_when_the_older_ones_are_back() -> None:
    ring = RingAllocator(SIZE)
    slots = [allocate(ring, 5), allocate(ring, 5)]
    assert ring.free(slots[1].id) and ring.in_use == 1
    assert ring.allocate(1) is None
    assert ring.free(slots[0].id) and ring.in_use == 0
    assert allocate(ring, 10).nbytes == SIZE


def test_the_watermark_says_how_far_a_writer_may_go() -> None:
    ring = RingAllocator(SIZE)
    slots = [allocate(ring, 5), allocate(ring, 5)]
    assert ring.watermark == Mark(0, 0)
    ring.free(slots[0].id)
    assert ring.watermark == Mark(0, 5 * LINE)
    assert allocate(ring, 5).round == 1
    ring.free(slots[1].id)
    assert ring.watermark == Mark(1, 0)


def test_what_never_fits_is_refused_at_once_in_words() -> None:
    ring = RingAllocator(SIZE)
    with pytest.raises(OversizedError, match=f"{SIZE + 1} bytes does not fit into a ring of {SIZE}"):
        ring.allocate(SIZE + 1)
    with pytest.raises(ValueError, match="a slot of 0 bytes"):
        ring.allocate(0)
    with pytest.raises(ValueError, match="a positive multiple of 64"):
        RingAllocator(100)


def test_a_second_free_and_one_of_an_older_life_harm_nobody() -> None:
    ring = RingAllocator(SIZE)
    old = allocate(ring, 10)
    assert ring.free(old.id) and not ring.free(old.id)
    young = allocate(ring, 10)
    assert young.id != old.id and not ring.free(old.id) and ring.in_use == 1
