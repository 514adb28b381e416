"""An instance is ready when each of its ranks has registered, and a room belongs to one of them."""

from __future__ import annotations

import pytest

from pdjax.disagg.protocol.topology import Rank, follow_bootstrap_room, in_order, incomplete, ranks_of, with_rank
from pdjax.transfer.layout import Layout


def test_registering_twice_does_no_harm_and_replaces_what_was_said_before() -> None:
    ranks = with_rank(with_rank([], Rank(b"old")), Rank(b"new"))
    assert [rank.transfer for rank in ranks] == [b"new"]
    assert incomplete(Layout(), ranks) is None


def test_who_is_not_complete_says_which_ranks_are_missing() -> None:
    ranks = with_rank(with_rank([], Rank(b"a", tp=0)), Rank(b"b", tp=0))
    sentence = incomplete(Layout(tp=2, dp=2), ranks)
    assert sentence is not None and "3 of 4 ranks have not registered" in sentence and "dp 0 cp 0 pp 0 tp 1" in sentence


def test_the_ranks_of_a_layout_are_all_there_and_each_finds_its_own_number() -> None:
    layout = Layout(pp=2, dp=2, cp=3, tp=2)
    ranks = ranks_of(layout, [bytes([number]) for number in range(layout.ranks)])
    assert incomplete(layout, ranks) is None
    assert [rank.transfer[0] for rank in in_order(ranks[::-1])] == list(range(layout.ranks))


def test_ranks_outside_of_the_layout_do_not_count() -> None:
    sentence = incomplete(Layout(tp=2), [Rank(b"a"), Rank(b"b", tp=5)])
    assert sentence is not None and "tp 5" in sentence
    assert "tp -1" in (incomplete(Layout(tp=2), [Rank(b"a"), Rank(b"b", tp=-1)]) or "")
    assert "no ranks" in (incomplete(Layout(tp=0), []) or "")


def test_a_room_follows_its_number_and_a_forced_rank_that_disagrees_is_refused_with_the_reason() -> None:
    assert [follow_bootstrap_room(room, Layout(dp=4)) for room in (0, 1, 7)] == [0, 1, 3]
    assert follow_bootstrap_room(7, Layout(dp=4), forced=3) == 3
    with pytest.raises(ValueError, match="belongs to dp rank 3 of 4"):
        follow_bootstrap_room(7, Layout(dp=4), forced=1)
