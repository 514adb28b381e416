"""An instance is ready when each of its ranks has registered, and a room belongs to one of them."""

from __future__ import annotations

import pytest

from pdjax.disagg.protocol.topology import Rank, Topology, follow_bootstrap_room, incomplete, with_rank


def test_registering_twice_does_no_harm_and_replaces_what_was_said_before() -> None:
    ranks = with_rank(with_rank([], Rank(b"old")), Rank(b"new"))
    assert [rank.transfer for rank in ranks] == [b"new"]
    assert incomplete(Topology(), ranks) is None


def test_who_is_not_complete_says_which_ranks_are_missing() -> None:
    ranks = with_rank(with_rank([], Rank(b"a", tp=0)), Rank(b"b", tp=0))
    sentence = incomplete(Topology(tp=2, dp=2), ranks)
    assert sentence is not None and "3 of 4 ranks have not registered" in sentence and "dp 0 cp 0 pp 0 tp 1" in sentence


def test_ranks_outside_of_the_topology_do_not_count() -> None:
    sentence = incomplete(Topology(tp=2), [Rank(b"a"), Rank(b"b", tp=5)])
    assert sentence is not None and "tp 5" in sentence
    assert "no ranks" in (incomplete(Topology(tp=0), []) or "")


def test_a_room_follows_its_number_and_a_forced_rank_that_disagrees_is_refused_with_the_reason() -> None:
    assert [follow_bootstrap_room(room, Topology(dp=4)) for room in (0, 1, 7)] == [0, 1, 3]
    assert follow_bootstrap_room(7, Topology(dp=4), forced=3) == 3
    with pytest.raises(ValueError, match="belongs to dp rank 3 of 4"):
        follow_bootstrap_room(7, Topology(dp=4), forced=1)
