from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from small_engine import PAGE, POOL_PAGES, SmallEngine, TinyModel

from pdjax.engine import orders
from pdjax.engine.host_pages import BLOCK_PAGES, HostPages
from pdjax.engine.lockstep import Follower, Lead, OutOfStep
from pdjax.engine.orders import DropPages, Halt, OtherTokens, Report, RestorePages, SavePages
from pdjax.engine.plan import DecodeStep, History, PrefillStep
from pdjax.engine.runner import Runner
from pdjax.wire import SamplingParams

TIGHT = 25


class Wire:
    """Frames of a leader, for a follower that works when it is asked to."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.reports: list[Report] = []
        self.change: Callable[[bytes], bytes] = lambda body: body

    def receive(self, timeout: float | None) -> bytes | None:
        if not self.frames:
            assert timeout is not None, "the leader has not said that it halts"
            return None
        return self.change(self.frames.pop(0))

    def send(self, body: bytes) -> None:
        self.reports.append(orders.decode_report(body))


class Second:
    """A worker's runner, which the tests share: its steps are compiled once."""

    def __init__(self, tiny: TinyModel) -> None:
        self.runner = Runner(tiny.model, spec=tiny.spec, pages=POOL_PAGES, buckets=tiny.buckets, mesh=tiny.mesh)
        self.host = HostPages(self.runner)


@pytest.fixture(scope="module")
def second(tiny: TinyModel) -> Second:
    return Second(tiny)


class Pair:
    """A leader with an engine, and a follower with a runner of its own, in one process."""

    def __init__(self, tiny: TinyModel, second: Second, **more: Any) -> None:
        self.wire = Wire()
        self.lead = Lead(self.wire.frames.append)
        self.leader, self.worker, self.host = tiny.runner, second.runner, second.host
        self.told: list[bytes] = []
        self.follower = Follower(self.wire, self.worker, self.host, self.told.append, self.worker.check_integrity)
        self.small = SmallEngine(tiny, **more)
        nothing = np.zeros((tiny.spec.layers, BLOCK_PAGES, *self.leader.pool.shape[2:]), np.float32)
        for runner in (self.leader, self.worker):
            for start in range(0, TIGHT, BLOCK_PAGES):
                ids = np.arange(start, start + BLOCK_PAGES, dtype=np.int32)
                runner.pool = self.host._scatter(runner.pool, ids, nothing)
            for slot in range(tiny.rows):
                runner._write_slot_row(slot, History([0], []), SamplingParams())

    def __enter__(self) -> Pair:
        self.leader.journal = self.lead
        return self

    def __exit__(self, *_: object) -> None:
        self.leader.journal = None

    def follow(self) -> None:
        self.lead.ordered(Halt())
        self.follower.follow()

    def kinds(self) -> list[type]:
        return [type(orders.decode_order(orders.decode_frame(body).order)) for body in self.wire.frames]


def use(pair: Pair, tokens: int = 30) -> None:
    random = np.random.default_rng(3)
    for number in range(10):
        ids = random.integers(0, 256, random.integers(1, 40)).tolist()
        penalty = 1.5 if number % 3 == 0 else 0.0
        pair.small.send(str(number), ids, tokens + 2 * number, temperature=0.8, seed=number, frequency_penalty=penalty)


def test_a_worker_that_follows_has_the_leaders_pages_through_retractions_and_aborts(
    tiny: TinyModel, second: Second
) -> None:
    with Pair(tiny, second, pages=TIGHT) as pair:
        use(pair)
        while len(pair.small.role.retraction.out) < 2:
            pair.small.turn()
        pair.small.abort(pair.small.role.retraction.out[0].rid)
        pair.small.run()
        assert {PrefillStep, DecodeStep, SavePages, RestorePages, DropPages} <= set(pair.kinds())
        pair.follow()
        pair.worker.check_integrity()
        # Page 0 takes padding.
        np.testing.assert_array_equal(
            np.array(pair.worker.pool)[:, 1:TIGHT], np.array(pair.leader.pool)[:, 1:TIGHT], strict=True
        )
        assert not pair.host._saved, "what was saved was restored or dropped"


def flip_page(body: bytes) -> bytes:
    """One page of a decode step is another."""
    frame = orders.decode_frame(body)
    order = orders.decode_order(frame.order)
    if not isinstance(order, DecodeStep):
        return body
    order.rows[0].pages[0] ^= 1
    return orders.encode(msgspec.structs.replace(frame, order=msgspec.Raw(orders.encode(order))))


def test_a_worker_with_another_page_than_its_leader_does_nothing_and_the_page_is_named(
    tiny: TinyModel, second: Second
) -> None:
    with Pair(tiny, second) as pair:
        pair.small.send("only", [5] * (PAGE + 1), 6)
        pair.small.run()
        first = next(number for number, kind in enumerate(pair.kinds()) if kind is DecodeStep)
        right = orders.decode_order(orders.decode_frame(pair.wire.frames[first]).order)
        assert isinstance(right, DecodeStep)
        page = right.rows[0].pages[0]
        pair.wire.change = flip_page
        with pytest.raises(OutOfStep) as caught:
            pair.follow()
        assert pair.lead.explain(caught.value.report) == (  # type: ignore[arg-type]
            f"is out of step: it disagrees about order {first}: rows[0].pages[0] is {page ^ 1}, the leader's is {page}"
        )


def test_a_worker_that_has_missed_an_order_does_nothing_and_says_which(tiny: TinyModel, second: Second) -> None:
    with Pair(tiny, second) as pair:
        pair.small.send("only", [5] * 3, 6)
        pair.small.run()
        del pair.wire.frames[2]
        with pytest.raises(OutOfStep) as caught:
            pair.follow()
        assert pair.lead.explain(caught.value.report) == "is out of step: it was told order 3 and expected 2"  # type: ignore[arg-type]


def test_a_worker_that_picks_another_token_is_found_at_the_next_order(tiny: TinyModel, second: Second) -> None:
    with Pair(tiny, second) as pair:
        pair.small.send("only", [5] * 3, 12)
        pair.small.run()
        dispatch = pair.worker.dispatch

        def damaged(step):  # what bit errors in a worker's memory would do
            if isinstance(step, DecodeStep):
                noise = np.random.default_rng(0).standard_normal((2, BLOCK_PAGES, 4, 2, PAGE, 16)).astype(np.float32)
                pair.worker.pool = pair.host._scatter(pair.worker.pool, np.arange(BLOCK_PAGES, dtype=np.int32), noise)
            return dispatch(step)

        pair.worker.dispatch = damaged  # type: ignore[method-assign]
        try:
            with pytest.raises(OutOfStep) as caught:
                pair.follow()
        finally:
            pair.worker.dispatch = dispatch  # type: ignore[method-assign]
        assert isinstance(caught.value.report, OtherTokens)
        assert "it picked the tokens [" in pair.lead.explain(caught.value.report)


def test_in_a_quiet_moment_a_worker_tells_of_programs_that_it_had_to_compile(tiny: TinyModel, second: Second) -> None:
    with Pair(tiny, second) as pair:
        pair.small.send("only", [5] * 3, 2)
        pair.small.run()
        receive, waited = pair.wire.receive, []

        def quiet(timeout: float | None) -> bytes | None:
            if not pair.wire.frames and timeout is not None:
                pair.worker.compiles_after_warm_up = 3
                waited.append(timeout)
                pair.lead.ordered(Halt())
                return None
            return receive(timeout)

        pair.wire.receive = quiet  # type: ignore[method-assign]
        pair.follower.follow()
        assert waited and [report.count for report in pair.wire.reports] == [3]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("own", "leaders", "words"),
    [
        (SavePages(1, [4, 5]), SavePages(1, [4, 6]), "pages[1] is 5, the leader's is 6"),
        (SavePages(1, [4, 5]), SavePages(1, [4]), "pages is [4, 5], the leader's is [4]"),
        (SavePages(1, []), DropPages(1), "the order is {"),
    ],
)
def test_a_difference_is_named_by_its_place(own: SavePages, leaders: SavePages | DropPages, words: str) -> None:
    assert orders.difference(orders.encode(own), orders.encode(leaders)).startswith(words)
