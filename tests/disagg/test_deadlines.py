"""A request whose deadline passes is told what it waited for."""

from __future__ import annotations

import pytest
from close_pair import ClosePair

from pdjax.wire import Failed


def ends_late(pair: ClosePair, rid: str, *, tokens: int = 100, **send) -> dict[str, str]:
    """Its halves' last words, by role, after a while in which nothing more happens."""
    pair.send(rid, list(range(20)), tokens, deadline_s=50.0, **send)
    for _ in range(3):
        pair.turn()
    for side in (pair.prefill, pair.decode):
        now = side.engine.clock
        side.engine.clock = lambda now=now: now() + 51
    pair.turn()
    failed = {
        side.engine.role.name: message.message
        for side in (pair.prefill, pair.decode)
        for message in side.emitted
        if isinstance(message, Failed) and message.rid == rid and message.status == 504
    }
    pair.run()
    return failed


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_half_a_room_has_waited_for_the_other(models, side: str) -> None:
    told = ends_late(models.pair(), "r", sides=side[0])
    what = {"prefill": "its other half", "decode": "its prompt to be computed"}[side]
    assert f"within its deadline of 50 s: 0 of at most {1 if side == 'prefill' else 100} tokens" in told[side]
    assert told[side].endswith(f", and it waited for {what}")


def test_one_without_pages_has_waited_for_them(models) -> None:
    pair = models.pair(pages=30)
    pair.send("long", list(range(40)), 70)
    pair.turn()
    assert ends_late(pair, "r", tokens=60)["decode"].endswith(", and it waited for free pages")


def test_one_that_decodes_has_waited_for_nothing(models) -> None:
    pair = models.pair()
    pair.send("first", [1, 2], 200, deadline_s=40.0)
    while not pair.frames("first"):
        pair.turn()
    ends_late(pair, "r", sides="d")
    failed = pair.failure("first")
    assert failed is not None and failed.message.endswith("of at most 200 tokens were generated")
