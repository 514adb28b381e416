"""A chunk is sent, and has landed, when all of its pieces are: of every rank, of every process, in any order."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from pdjax.cache.spec import StateSpec
from pdjax.disagg.pieces import LandingBook, PieceError, Tally, TestBook, plan_of_chunk
from pdjax.disagg.protocol.messages import ChunkNotice, PieceNotice, decode_notice, encode
from pdjax.transfer.backend import MAX_NOTICE
from pdjax.transfer.layout import Chunk, Layout

SPEC = StateSpec("kv", layers=4, heads=4, head_dim=8, page_size=4, dtype="bfloat16")
LAYOUTS = [
    Layout(tp=tp, dp=dp, cp=cp, pp=pp) for tp in (1, 2, 4, 8) for dp in (1, 2, 3) for cp in (1, 2) for pp in (1, 2)
]


def pieces_of(chunk: ChunkNotice, source: Layout, destination: Layout) -> list[PieceNotice]:
    whole = plan_of_chunk(SPEC, source, destination, chunk)
    transfers = whole.transfers(Chunk(chunk.first_page, chunk.pages, 50))
    return [
        PieceNotice(chunk, 50, source, number, t.piece.destination, t.destination_offset, t.nbytes, 9.0 - number, None)
        for number, t in enumerate(transfers)
    ]


def chunk_of(number: int, slot: int, room: int = 3) -> ChunkNotice:
    return ChunkNotice(room, 70 + room, number, slot, 5 * number, 5, 5 * SPEC.page_bytes)


@given(
    source=st.sampled_from(LAYOUTS), destination=st.sampled_from(LAYOUTS), seed=st.integers(0, 9), broken=st.booleans()
)
def test_a_chunk_is_told_once_and_only_when_all_of_it_is_there(
    source: Layout, destination: Layout, seed: int, broken: bool
) -> None:
    """Chunks of two rooms, pieces in any order; a damaged one is known when nothing more of it can come."""
    book = LandingBook(SPEC, destination)
    chunks = [chunk_of(number, slot=2 * room + number, room=room) for room in (0, 1) for number in (0, 1)]
    pieces = [piece for chunk in chunks for piece in pieces_of(chunk, source, destination)]
    random.Random(seed).shuffle(pieces)
    left = {id(chunk): sum(piece.chunk is chunk for piece in pieces) for chunk in chunks}
    told = []
    for number, piece in enumerate(pieces):
        assert len(encode(piece)) <= MAX_NOTICE
        received = decode_notice(encode(piece))
        assert isinstance(received, PieceNotice)
        arrival = book.landed(received, intact=not (broken and number == 0))
        left[id(piece.chunk)] -= 1
        assert (arrival is not None) == (left[id(piece.chunk)] == 0)
        if arrival is not None:
            assert arrival.chunk == piece.chunk and arrival.layout == source and arrival.posted_at <= 9.0
            assert arrival.damaged == (broken and piece.chunk == pieces[0].chunk)
            told.append(arrival.chunk)
    assert sorted(told, key=chunks.index) == chunks
    again = pieces_of(chunks[0], source, destination)  # sent once more, after it came damaged
    assert [book.landed(piece, intact=True) is not None for piece in again] == [*[False] * (len(again) - 1), True]


@pytest.mark.parametrize(
    "lie",
    [
        {"piece": 4}, {"rank": 1}, {"offset": 64}, {"nbytes": 128}, {"layout": Layout(tp=3)},
        {"chunk": msgspec.structs.replace(chunk_of(0, 1), pages=4)},
    ],
)  # fmt: skip
def test_a_piece_that_no_plan_has_is_refused_and_the_others_go_on(lie: dict) -> None:
    book = LandingBook(SPEC, Layout(tp=2))
    first, *others = pieces_of(chunk_of(0, 1), Layout(tp=4), Layout(tp=2))
    assert book.landed(others.pop(), intact=True) is None
    with pytest.raises(PieceError):
        book.landed(msgspec.structs.replace(first, **lie), intact=True)
    for piece in others:
        assert book.landed(piece, intact=True) is None
        with pytest.raises(PieceError, match="none that is missing"):
            book.landed(piece, intact=True)
    assert book.landed(first, intact=True) is not None


def test_what_landed_in_a_slot_that_was_given_back_counts_for_nobody() -> None:
    book = LandingBook(SPEC, Layout(tp=1))
    first, second = pieces_of(chunk_of(0, slot=1), Layout(tp=2), Layout(tp=1))
    assert book.landed(first, intact=True) is None
    book.forget(1)
    assert book.landed(second, intact=True) is None
    following = pieces_of(chunk_of(0, slot=1, room=4), Layout(tp=2), Layout(tp=1))
    assert [book.landed(piece, intact=True) is not None for piece in following] == [False, True]


def test_a_write_has_ended_when_all_of_its_parts_have_and_says_what_failed_first() -> None:
    tally = Tally()
    tally.begin(1, 3)
    tally.begin(2, 1)
    assert tally.ended(1, "the peer is gone") is None
    assert tally.ended(1) is None
    whole = tally.ended(2)
    assert whole is not None and whole.error is None
    over = tally.ended(1, "later")
    assert over is not None and over.error == "the peer is gone"


@given(
    senders=st.integers(1, 4), receivers=st.integers(1, 4), wrong=st.none() | st.integers(0, 15), seed=st.integers(0, 9)
)
def test_a_path_has_passed_when_every_process_has_heard_from_every_other_and_nothing_came_wrong(
    senders: int, receivers: int, wrong: int | None, seed: int
) -> None:
    """Messages of two tests, in any order."""
    book = TestBook(receivers)
    of_each = senders * receivers
    messages = [(number, at) for number in (7, 8) for at in range(of_each)]
    random.Random(seed).shuffle(messages)
    left = {7: of_each, 8: of_each}
    for number, at in messages:
        right = book.came(number, senders, intact=(number, at) != (7, wrong))
        left[number] -= 1
        assert (right is None) == (left[number] > 0)
        if right is not None:
            assert right == (number == 8 or wrong is None or wrong >= of_each)


def test_tests_that_never_end_are_forgotten() -> None:
    book = TestBook(2)
    for number in range(5000):
        assert book.came(number, 1, intact=True) is None
    assert book.came(4999, 1, intact=True) is True
    assert book.came(0, 1, intact=True) is None
