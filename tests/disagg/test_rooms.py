"""The two room machines against each other, over a network that delays, loses and reorders what may be reordered."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.disagg.protocol import actions, messages
from pdjax.disagg.protocol.decode_room import DecodeRoom, Reserved
from pdjax.disagg.protocol.prefill_room import PrefillRoom, PromptDone, Timeouts
from pdjax.disagg.protocol.states import LEGAL, RoomState

TIMEOUTS = Timeouts(bootstrap=30, waiting=300, transfer=30)
PAGE_BYTES = 64
ROOM = 0  # as good a number as any


@dataclass
class World:
    """One room on both sides, one link with a FIFO each way, one data path with a FIFO, all driven by a seed.

    `slots` is the ring of the decode side; of its pages, as many as `filled` hold the prompt's beginning already.
    """

    seed: int
    prompt_pages: int
    chunk_pages: int
    slots: int = 2
    filled: int = 0
    damage: float = 0.0  # how likely a chunk is to arrive damaged
    now: float = 0.0
    prefill: PrefillRoom = field(init=False)
    decode: DecodeRoom = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.prefill = PrefillRoom(ROOM, TIMEOUTS)
        self.decode = DecodeRoom(ROOM, TIMEOUTS, PAGE_BYTES)
        self.to_prefill: deque = deque()
        self.to_decode: deque = deque()
        self.writes: deque = deque()  # on their way: (chunk, notice)
        self.unreported: deque = deque()  # landed, but the source has not heard of it yet
        self.compute: deque = deque()  # chunks still to compute
        self.computing = False
        self.planned = 0
        self.free = set(range(self.slots))
        self.wanted: deque = deque()
        self.link = True
        self.ended = {"prefill": [], "decode": []}
        self.closed = set()
        self.damaged = 0
        self.filled = min(self.filled, self.prompt_pages)
        self.pages = ["filled"] * self.filled + [""] * (self.prompt_pages - self.filled)

    def do_prefill(self, asked: list[actions.Action]) -> None:
        for action in asked:
            assert "prefill" not in self.closed, f"{action} of a closed room"
            match action:
                case actions.Send(message=message):
                    assert self.link
                    self.to_decode.append(message)
                case actions.StartPrefill():
                    firsts = range(self.prefill.first_page, self.prompt_pages, self.chunk_pages)
                    self.computing = True
                    self.compute.extend((f, min(self.chunk_pages, self.prompt_pages - f)) for f in firsts)
                case actions.Transfer(chunk, slot, _, first, pages):
                    self.prefill.write_started()
                    notice = messages.ChunkNotice(
                        ROOM, self.prefill.generation or 0, chunk, slot, first, pages, pages * PAGE_BYTES
                    )
                    assert slot not in self.free, "a write into a slot that is free"
                    self.writes.append((chunk, notice))
                case actions.Succeed():
                    self.ended["prefill"].append("success")
                case actions.Fail(status, reason):
                    assert status and reason
                    self.ended["prefill"].append(reason)
        if self.prefill.closed:
            assert not self.unreported and not self.writes, "closed with a write on its way"
            self.closed.add("prefill")

    def do_decode(self, asked: list[actions.Action]) -> None:
        for action in asked:
            assert "decode" not in self.closed, f"{action} of a closed room"
            match action:
                case actions.Send(message=message):
                    assert self.link
                    self.to_prefill.append(message)
                case actions.GrantSlot(chunk):
                    self.wanted.append(chunk)
                case actions.Scatter(_, first, pages):
                    for page in range(first, first + pages):
                        assert not self.pages[page], "a page was written twice"
                        self.pages[page] = "here"
                case actions.FreeSlot(slot):
                    assert slot not in self.free
                    assert all(notice.slot != slot for _, notice in self.writes), "freed while a write is on its way"
                    self.free.add(slot)
                case actions.Drain():
                    while self.writes:  # a dead writer's bytes land or are dropped, then the worker is dry
                        self.writes.popleft()
                    self.do_decode(self.decode.drained())
                case actions.StartDecode():
                    assert all(self.pages), "decoding from pages that never came"
                    self.ended["decode"].append("success")
                case actions.Fail(status, reason):
                    assert status and reason
                    self.ended["decode"].append(reason)
        if self.decode.closed:
            self.closed.add("decode")

    def moves(self) -> list:
        """Everything that can happen next."""
        possible = []
        if self.to_prefill:
            possible.append(self.hear_prefill)
        if self.to_decode:
            possible.append(self.hear_decode)
        if self.writes:
            possible.append(self._land)
        if self.unreported:
            possible.append(self._report)
        if self.computing and not self.prefill.state.final:
            possible.append(self._compute)
        if self.wanted and (self.free or self.decode.state.final):
            possible.append(self._grant)
        return possible

    def hear_prefill(self) -> None:
        self.do_prefill(self.prefill.received("link", self.to_prefill.popleft(), self.now))

    def hear_decode(self) -> None:
        self.do_decode(self.decode.received("link", self.to_decode.popleft(), self.now))

    def _land(self) -> None:
        chunk, notice = self.writes.popleft()
        self.unreported.append(chunk)
        if self.random.random() < self.damage:
            self.damaged += 1
            self.do_decode(self.decode.damaged(notice, self.now))
        else:
            self.do_decode(self.decode.landed(notice, self.now))

    def _report(self) -> None:
        self.unreported.popleft()
        self.do_prefill(self.prefill.write_ended(None, self.now))

    def _compute(self) -> None:
        if self.compute:
            first, pages = self.compute.popleft()
            self.do_prefill(self.prefill.chunk_planned(self.planned, first, pages))
            self.do_prefill(self.prefill.chunk_computed(self.planned))
            self.planned += 1
        if not self.compute:
            self.computing = False
            self.do_prefill(self.prefill.prompt_done(PromptDone(7, -0.5, 0.0, 0.1), self.now))

    def _grant(self) -> None:
        chunk = self.wanted.popleft()
        if not self.decode.state.final:
            slot = self.free.pop()
            self.do_decode(self.decode.slot_found(chunk, slot))

    def request(self, digest: bytes = b"d" * 8) -> None:
        self.do_prefill(self.prefill.requested(self.prompt_pages, digest, self.now))

    def claim(self, digest: bytes = b"d" * 8) -> None:
        pages = self.prompt_pages
        told = Reserved("link", 42, pages, digest, pages, first_page=self.filled)
        self.do_decode(self.decode.reserved(told, self.now))

    def cut(self) -> None:
        self.link = False
        self.to_prefill.clear()
        self.to_decode.clear()
        self.do_prefill(self.prefill.link_lost("cut"))
        for chunk, _ in self.writes:  # what was on its way to a gone peer fails
            self.unreported.append(chunk)
        self.do_decode(self.decode.link_lost("cut", self.now, gone=True))

    def run(self, disturb=None, at: int = -1) -> None:
        """Let things happen in random order until nothing can; `disturb` happens before step `at`."""
        step = 0
        while True:
            if step == at and disturb is not None:
                disturb()
            moves = self.moves()
            if not moves:
                break
            self.random.choice(moves)()
            step += 1

    def let_timers_fire(self) -> None:
        self.now += 10_000
        self.do_prefill(self.prefill.tick(self.now))
        self.do_decode(self.decode.tick(self.now))
        self.run()

    def check_ended(self) -> None:
        assert self.prefill.state.final and self.decode.state.final
        assert len(self.ended["prefill"]) == 1 and len(self.ended["decode"]) == 1
        assert self.free == set(range(self.slots)), "a slot was not given back"
        assert self.closed == {"prefill", "decode"}


WORLDS = st.builds(
    World, seed=st.integers(0, 1 << 32), prompt_pages=st.integers(1, 12), chunk_pages=st.integers(1, 5),
    slots=st.integers(1, 3), filled=st.integers(0, 14),
)  # fmt: skip


@given(world=WORLDS, request_first=st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_room_succeeds_on_both_sides_in_any_order_of_events(world: World, request_first: bool) -> None:
    first, second = (world.request, world.claim) if request_first else (world.claim, world.request)
    first()
    second()
    world.run()
    world.check_ended()
    assert world.ended == {"prefill": ["success"], "decode": ["success"]}


@given(
    world=WORLDS,
    at=st.integers(0, 60),
    side=st.sampled_from(["prefill", "decode", "link"]),
    request_comes=st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_a_room_that_is_disturbed_at_any_step_ends_on_both_sides_and_gives_back_its_slots(
    world: World, at: int, side: str, request_comes: bool
) -> None:
    disturb = {
        "prefill": lambda: world.do_prefill(world.prefill.cancel(499, "client left")),
        "decode": lambda: world.do_decode(world.decode.cancel(499, "client left", world.now)),
        "link": world.cut,
    }[side]
    world.claim()
    if request_comes:
        world.request()
    world.run(disturb, at)
    world.let_timers_fire()
    if not world.prefill.state.final or world.prefill.generation is None:
        return  # the claim never reached the prefill side: there is no room there
    world.check_ended()


@given(world=WORLDS)
@settings(max_examples=50, deadline=None)
def test_a_prompt_that_the_two_sides_read_differently_is_refused_with_the_reason(world: World) -> None:
    world.request(b"prefills")
    world.claim(b"decode's")
    world.run()
    world.check_ended()
    assert "different prompts" in world.ended["decode"][0]


@given(world=WORLDS, damage=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=200, deadline=None)
def test_a_damaged_chunk_is_sent_again_and_in_the_end_the_room_succeeds_or_says_why(
    world: World, damage: float
) -> None:
    world.damage = damage
    world.request()
    world.claim()
    world.run()
    world.check_ended()
    if world.ended["decode"] == ["success"]:
        assert world.ended["prefill"] == ["success"] and all(world.pages)
    else:
        assert "arrived damaged 3 times" in world.ended["decode"][0] and world.damaged >= 3
        assert world.ended["prefill"] == world.ended["decode"]


def test_a_second_claim_fails_alone() -> None:
    world = World(seed=1, prompt_pages=3, chunk_pages=2)
    world.request()
    world.claim()
    world.hear_prefill()
    rival = messages.Claim(ROOM, 99, 3, b"d" * 8)
    answers = world.prefill.received("rival", rival, 0.0)
    refusal, acknowledgement = (action.message for action in answers if isinstance(action, actions.Send))
    assert all(isinstance(action, actions.Send) and action.link == "rival" for action in answers)
    assert isinstance(refusal, messages.Abort) and "claimed already" in refusal.reason
    assert isinstance(acknowledgement, messages.AbortAck)
    world.run()
    assert world.ended == {"prefill": ["success"], "decode": ["success"]}


def test_a_room_that_nobody_claims_fails_within_its_bound_and_says_so() -> None:
    world = World(seed=1, prompt_pages=3, chunk_pages=2)
    world.request()
    world.now = TIMEOUTS.bootstrap - 1
    world.do_prefill(world.prefill.tick(world.now))
    assert not world.ended["prefill"]
    world.now = TIMEOUTS.bootstrap
    world.do_prefill(world.prefill.tick(world.now))
    assert "no decode instance claimed room 0" in world.ended["prefill"][0]


def first_write(world: World) -> messages.ChunkNotice:
    """The first chunk that is sent, on its way to whatever a test makes of it."""
    while not world.writes:
        world.random.choice(world.moves())()
    chunk, notice = world.writes.popleft()
    world.unreported.append(chunk)
    return notice


def test_a_notice_that_lies_about_its_pages_fails_the_room_and_writes_nothing() -> None:
    world = World(seed=1, prompt_pages=3, chunk_pages=3)
    world.request()
    world.claim()
    notice = first_write(world)
    lie = messages.ChunkNotice(ROOM, 42, notice.chunk, notice.slot, 2, 5, notice.nbytes)
    world.do_decode(world.decode.landed(lie, world.now))
    world.run()
    world.check_ended()
    assert not any(world.pages) and "speaks of" in world.ended["decode"][0]


@pytest.mark.parametrize("lie", [{"first_page": 1}, {"destination_dp_rank": 1}])
def test_a_chunk_for_a_page_that_was_not_asked_for_fails_the_room_and_writes_nothing(lie: dict[str, int]) -> None:
    world = World(seed=1, prompt_pages=4, chunk_pages=2, filled=2)
    world.request()
    world.claim()
    notice = first_write(world)
    world.do_decode(world.decode.landed(msgspec.structs.replace(notice, **lie), world.now))
    world.run()
    world.check_ended()
    assert world.pages == ["filled", "filled", "", ""] and "its pages are [2, 4)" in world.ended["decode"][0]


def test_ends_are_final_and_every_other_state_can_fail() -> None:
    for state, followers in LEGAL.items():
        assert (not followers) == state.final
        assert state.final or RoomState.FAILED in followers
