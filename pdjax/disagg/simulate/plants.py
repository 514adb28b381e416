"""Bugs planted into the machines on purpose, to show that the simulator finds such bugs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec

from pdjax.disagg.pieces import Arrival, LandingBook
from pdjax.disagg.protocol import actions, messages
from pdjax.disagg.protocol.decode_room import DecodeRoom, Reserved
from pdjax.disagg.protocol.prefill_room import PrefillRoom
from pdjax.disagg.protocol.states import BOOTSTRAPPING, SUCCESS, TRANSFERRING
from pdjax.disagg.protocol.timers import Timers
from pdjax.disagg.protocol.tombstones import Tombstones


@contextlib.contextmanager
def release_before_the_ack() -> Iterator[None]:
    """A room that fails gives its slots back at once, though the prefill side may still write to them."""

    def fail(room: DecodeRoom, status: int, reason: str, now: float) -> list[actions.Action]:
        failed = _FAIL(room, status, reason, now)
        return [*failed, *room.drained()] if failed else failed

    with mock.patch.object(DecodeRoom, "_fail", fail):
        yield


@contextlib.contextmanager
def success_on_a_missing_chunk() -> Iterator[None]:
    """The decode side counts the chunk that it waits for as one that has come."""

    def complete(room: DecodeRoom, now: float) -> list[actions.Action]:
        handoff = room._handoff
        if handoff is None or room.link is None or room.state is not TRANSFERRING:
            return []
        if room._scattered < handoff.chunks - 1:
            return []
        room.advance(SUCCESS)
        room._close_when_dry()
        return [actions.StartDecode(handoff), actions.Send(room.link, messages.Complete(room.room, room._claimed()))]

    with mock.patch.object(DecodeRoom, "_complete", complete):
        yield


@contextlib.contextmanager
def forgotten_timer() -> Iterator[None]:
    """Rooms that wait for the other half to show up are not watched."""

    def watch(timers: Timers[Any], room: Any) -> None:
        if getattr(room, "state", None) is not BOOTSTRAPPING:
            _WATCH(timers, room)

    with mock.patch.object(Timers, "watch", watch):
        yield


@contextlib.contextmanager
def double_claim() -> Iterator[None]:
    """A later claim of a room takes the place of the first."""

    def receive(room: PrefillRoom, link: str, message: messages.RoomMessage, now: float) -> list[actions.Action]:
        if isinstance(message, messages.Claim) and room.generation is not None and not room.ended:
            room.link, room.generation = link, message.generation
            return []
        return _RECEIVE(room, link, message, now)

    with mock.patch.object(PrefillRoom, "received", receive):
        yield


@contextlib.contextmanager
def credit_counted_twice() -> Iterator[None]:
    """A slot whose chunk is sent again is given back for each time that it landed."""

    def damaged(room: DecodeRoom, notice: messages.ChunkNotice, now: float) -> list[actions.Action]:
        again = _DAMAGED(room, notice, now)
        kept = notice.chunk in room._granted
        return [actions.FreeSlot(notice.slot), *again] if kept else again

    with mock.patch.object(DecodeRoom, "damaged", damaged):
        yield


@contextlib.contextmanager
def forgotten_tombstones() -> Iterator[None]:
    """A claim of a room that has ended before waits for its request."""
    with mock.patch.object(Tombstones, "take", lambda *_: None):
        yield


@contextlib.contextmanager
def claim_without_a_page_that_is_lacking() -> Iterator[None]:
    """A request that shares some pages asks for one fewer than it lacks."""

    def reserved(room: DecodeRoom, told: Reserved, now: float) -> list[actions.Action]:
        if 0 < told.first_page < told.pages:
            told = msgspec.structs.replace(told, first_page=told.first_page + 1)
        return _RESERVED(room, told, now)

    with mock.patch.object(DecodeRoom, "reserved", reserved):
        yield


@contextlib.contextmanager
def success_on_a_missing_rank() -> Iterator[None]:
    """A chunk counts as landed when one of its pieces has yet to come."""

    def landed(book: LandingBook, notice: messages.PieceNotice, *, intact: bool) -> Arrival | None:
        key = notice.chunk.generation, notice.chunk.chunk
        arrival = _LANDED(book, notice, intact=intact) or book._open[notice.chunk.slot].get(key)
        return arrival if arrival is not None and len(arrival.missing) <= 1 else None

    with mock.patch.object(LandingBook, "landed", landed):
        yield


@contextlib.contextmanager
def workers_that_end_with_their_leader() -> Iterator[None]:
    """An instance is taken for gone as soon as its leader is."""
    with mock.patch.object(messages.Registration, "processes", 1):
        yield


@contextlib.contextmanager
def drained_without_being_cut_off() -> Iterator[None]:
    """A peer whose host is out of reach is taken for gone."""
    with mock.patch.object(DecodeRoom, "peer_gone", lambda room, cut_off=(): _PEER_GONE(room)):
        yield


_LANDED = LandingBook.landed
_PEER_GONE = DecodeRoom.peer_gone
_RESERVED = DecodeRoom.reserved
_FAIL, _DAMAGED, _RECEIVE = DecodeRoom._fail, DecodeRoom.damaged, PrefillRoom.received
_WATCH = Timers.watch

PLANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    plant.__name__: plant
    for plant in (
        release_before_the_ack,
        success_on_a_missing_chunk,
        forgotten_timer,
        double_claim,
        credit_counted_twice,
        forgotten_tombstones,
        claim_without_a_page_that_is_lacking,
        success_on_a_missing_rank,
        workers_that_end_with_their_leader,
        drained_without_being_cut_off,
    )
}
