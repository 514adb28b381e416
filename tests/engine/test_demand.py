"""The policy by which a decode instance lets requests into its pool, over modelled requests: one token a page."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.engine.demand import ENOUGH, WINDOW, Demand, OutputLengths, fits


@dataclass(eq=False)
class Item:
    """A request: it may generate `most` tokens and will generate `length`; its prompt takes `moves` steps to come."""

    prompt: int
    most: int
    length: int
    moves: int
    number: int = 0
    generated: int = 1
    held: int = 0

    @property
    def strength(self) -> tuple[int, int]:
        return (self.generated, -self.number)


class Play:
    """`whole`: each request counts with all that it may generate, as if nothing was known of those before."""

    def __init__(self, pool: int, items: Sequence[Item], *, whole: bool = False) -> None:
        self.pool, self.whole = pool, whole
        self.lengths = OutputLengths()
        self.queue = deque(items)
        for number, item in enumerate(items):
            item.number = number
        self.moving: list[Item] = []
        self.running: list[Item] = []
        self.out: list[Item] = []
        self.retractions = 0
        self.steps = 0
        self.row_steps = 0

    @property
    def free(self) -> int:
        return self.pool - sum(item.held for item in [*self.moving, *self.running])

    def demand(self, item: Item, held: int) -> Demand:
        total = item.prompt + item.most
        outputs = item.most if self.whole else self.lengths.expected(item.generated, item.most)
        return Demand(held, frozenset(), min(max(item.prompt + outputs, held), total), total)

    def fits(self, running: list[Item], moving: list[Item]) -> bool:
        running_, moving_ = ([self.demand(item, item.held or self.needed(item)) for item in items]
                             for items in (running, moving))  # fmt: skip
        return fits(self.pool, running=running_, moving=moving_)

    def needed(self, item: Item) -> int:
        return min(item.prompt + item.generated + 1, item.prompt + item.most)

    def step(self) -> None:
        self.steps += 1
        self.row_steps += len(self.running)
        for item in list(self.running):
            item.generated += 1
            if item.generated > item.length:
                self.running.remove(item)
                self.lengths.add(item.length)
        for item in list(self.moving):
            item.moves -= 1
            if item.moves <= 0:
                self.moving.remove(item)
                self.running.append(item)
        while short := [item for item in self.running if item.held < self.needed(item)]:
            item = max(short, key=lambda item: item.strength)
            if self.free >= self.needed(item) - item.held:
                item.held = self.needed(item)
            else:
                weakest = min(self.running, key=lambda item: item.strength)
                assert len(self.running) > 1, "the strongest has to wait for what is being moved"
                self.running.remove(weakest)
                weakest.held = 0
                self.out.append(weakest)
                self.retractions += 1
        for item in sorted(self.out, key=lambda item: item.strength, reverse=True):
            if not self.fits([*self.running, item], self.moving) or self.free < self.needed(item) + len(self.running):
                break
            self.out.remove(item)
            self.running.append(item)
            item.held = self.needed(item)
        while self.queue and not self.out and self.fits(self.running, [*self.moving, self.queue[0]]):
            item = self.queue.popleft()
            item.held = self.needed(item)
            assert self.free >= 0, "what fits has its pages"
            self.moving.append(item)
        # The guarantee, by itself: with all others put out, the largest has room for all that it may need.
        pinned = sum(item.held for item in self.moving)
        assert all(item.prompt + item.most + pinned <= self.pool for item in self.running)

    def run(self, bound: int) -> None:
        while self.queue or self.moving or self.running or self.out:
            self.step()
            assert self.steps < bound, f"{len(self.running)} run, {len(self.moving)} move, {len(self.out)} are out"


def item(pool: int) -> st.SearchStrategy[Item]:
    sizes = st.tuples(st.integers(1, pool // 2), st.integers(1, pool // 2), st.floats(0, 1), st.integers(0, 30))
    return sizes.map(lambda s: Item(s[0], s[1], max(1, int(s[1] * s[2])), s[3]))


@settings(max_examples=200, deadline=None)
@given(items=st.lists(item(40), min_size=1, max_size=40), lengths=st.lists(st.integers(1, 20), max_size=20))
def test_every_request_ends_and_the_largest_never_waits(items: list[Item], lengths: list[int]) -> None:
    play = Play(40, items)
    for length in lengths:
        play.lengths.add(length)
    play.run(bound=sum(item.length + item.moves + 5 for item in items) * 2 + 50)


def test_pages_that_several_use_count_once() -> None:
    prompt = frozenset(range(10))
    each = Demand(held=11, shared=prompt, expected=12, most=14)
    assert fits(16, running=[each, each], moving=[each])  # 10 shared, 2 of its own for each
    assert not fits(15, running=[each, each], moving=[each])
    apart = Demand(held=11, shared=frozenset(range(10, 20)), expected=12, most=14)
    assert not fits(24, running=[each], moving=[apart]) and fits(25, running=[each], moving=[apart])


def test_many_more_decode_together_than_if_all_was_reserved() -> None:
    """As of users who allow 512 tokens and mostly want few: and hardly any of them has to leave."""
    played = {}
    for whole in (True, False):
        draw = random.Random(7)
        items = []
        for _ in range(600):
            length = min(512, max(1, int(draw.lognormvariate(3.6, 0.8))))
            items.append(Item(draw.randint(10, 200), 512, length, draw.randint(1, 5)))
        play = Play(4096, items, whole=whole)
        play.run(bound=100_000)
        played[whole] = play
    assert played[True].retractions == 0
    assert played[False].steps < 0.6 * played[True].steps
    assert played[False].row_steps / played[False].steps > 2 * played[True].row_steps / played[True].steps
    assert played[False].retractions < 30


@given(
    lengths=st.lists(st.integers(1, 100), max_size=WINDOW + 50), generated=st.integers(0, 120), most=st.integers(1, 90)
)
def test_a_guess_is_a_length_that_was_seen_or_all_that_is_allowed(
    lengths: list[int], generated: int, most: int
) -> None:
    known = OutputLengths()
    for length in lengths:
        known.add(length)
    longer = [length for length in lengths[-WINDOW:] if length > generated]
    guess = known.expected(generated, most)
    assert guess == most or (len(longer) >= ENOUGH and guess in longer and guess < most)
    assert guess == most or sum(length <= guess for length in longer) >= 0.75 * len(longer)
