"""Counting what several ranks and processes do for one chunk: the room protocol knows whole chunks only."""

from __future__ import annotations

import functools
import math

import msgspec

from pdjax.cache.spec import StateSpec
from pdjax.disagg.protocol.messages import ChunkNotice, PieceNotice
from pdjax.transfer.layout import Chunk, Layout, LayoutError
from pdjax.transfer.layout.plan import Transfer, TransferPlan, plan

_OPEN_TESTS = 1024


def plan_of_chunk(spec: StateSpec, prefill: Layout, decode: Layout, chunk: ChunkNotice) -> TransferPlan:
    """How a chunk moves between the dp ranks that its room has on both sides. Among ranks with copies of it, each room
    has another one send.

    Raises:
        LayoutError: it can't be moved between such layouts, or there is no such dp rank.
    """
    # No more of a room's number matters than this: so the few plans of a pair are each worked out once.
    turn = chunk.room // prefill.dp % prefill.tp if prefill.dp > 0 and prefill.tp > 0 else 0
    return _plan(spec, prefill, decode, chunk.source_dp_rank, chunk.destination_dp_rank, turn)


@functools.lru_cache(maxsize=1024)  # asked for with every piece
def _plan(
    spec: StateSpec, prefill: Layout, decode: Layout, source_dp_rank: int, destination_dp_rank: int, turn: int
) -> TransferPlan:
    for side in (prefill, decode):
        side.check(spec)
    return plan(
        spec, prefill, decode, source_dp_rank=source_dp_rank, destination_dp_rank=destination_dp_rank, turn=turn
    )


class PieceError(Exception):
    """A piece that belongs to no chunk; the sentence says why."""


class Over(msgspec.Struct, frozen=True, gc=False):
    """All parts of something have ended; `error` is that of the first that failed."""

    error: str | None


class Tally:
    """Things in several parts, by number: each is over when its last part has ended.

    Args:
        most: how many may be open; the oldest of more is forgotten.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._open: dict[int, tuple[int, str | None]] = {}  # parts that have not ended, and the first error

    def begin(self, id: int, parts: int) -> None:
        """Something of so many parts, 1 or more."""
        self._open[id] = parts, None
        if len(self._open) > self._most:
            del self._open[next(iter(self._open))]

    def __contains__(self, id: int) -> bool:
        """Whether it is not over."""
        return id in self._open

    def ended(self, id: int, error: str | None = None) -> Over | None:
        """One of its parts has ended. Returns what has become of it if that was the last."""
        left, first = self._open[id]
        error = first or error
        if left > 1:
            self._open[id] = left - 1, error
            return None
        del self._open[id]
        return Over(error)


class TestBook:
    """Which test messages have come to an instance's processes, one from each of the sender's to each of its own.

    Args:
        receivers: processes of this instance.
    """

    __test__ = False  # for pytest, which would take it for tests

    def __init__(self, receivers: int) -> None:
        self._receivers = receivers
        self._tally = Tally(_OPEN_TESTS)  # whoever waited for an older one has given up

    def came(self, number: int, senders: int, *, intact: bool) -> bool | None:
        """One of `senders` has sent its message. Returns whether all were right, if this was the last of the number."""
        if number not in self._tally:
            self._tally.begin(number, senders * self._receivers)
        over = self._tally.ended(number, None if intact else "damaged")
        return None if over is None else over.error is None


class Arrival:
    """A chunk whose pieces land, the first of which has come with this notice.

    Attributes:
        layout: of the sender.
        posted_at: when the first of its pieces was sent, by the sender's clock.
        missing: pieces, by number.
    """

    def __init__(self, notice: PieceNotice, plan: TransferPlan) -> None:
        self.chunk = chunk = notice.chunk
        self.prompt_tokens = notice.prompt_tokens
        self.layout = notice.layout
        self.posted_at = notice.posted_at
        self.damaged = False
        self.plan = plan
        transfers = plan.transfers(Chunk(chunk.first_page, chunk.pages, notice.prompt_tokens))
        self.missing: dict[int, Transfer] = dict(enumerate(transfers))


class LandingBook:
    """Which pieces of which chunks have landed in a decode instance's rings.

    Args:
        layout: of this instance.
    """

    def __init__(self, spec: StateSpec, layout: Layout) -> None:
        self._spec = spec
        self._layout = layout
        self._open: dict[int, dict[tuple[int, int], Arrival]] = {}  # by slot, then by generation and chunk

    def landed(self, notice: PieceNotice, *, intact: bool) -> Arrival | None:
        """A piece has landed, as it was sent or not. Returns the chunk if it was the last of it.

        A damaged chunk is complete, too, only when all of it has landed: then nothing is on its way to the slot, and it
        can be sent again.

        Raises:
            PieceError: no chunk has such a piece, or it has come twice.
        """
        chunk = notice.chunk
        arrivals = self._open.setdefault(chunk.slot, {})
        key = chunk.generation, chunk.chunk
        arrival = arrivals.get(key) or self._expect(notice)
        if not _is_missing(arrival, notice):
            raise PieceError(
                f"piece {notice.piece} of chunk {chunk.chunk} of room {chunk.room}, {notice.nbytes} bytes at "
                f"{notice.offset} of rank {notice.rank}'s slot, is none that is missing"
            )
        arrivals[key] = arrival
        del arrival.missing[notice.piece]
        arrival.damaged |= not intact
        arrival.posted_at = min(arrival.posted_at, notice.posted_at)
        if arrival.missing:
            return None
        del arrivals[key]
        return arrival

    def forget(self, slot: int) -> None:
        """A slot is given back: what has landed in it is of no use."""
        self._open.pop(slot, None)

    def _expect(self, notice: PieceNotice) -> Arrival:
        try:
            return Arrival(notice, plan_of_chunk(self._spec, notice.layout, self._layout, notice.chunk))
        except LayoutError as error:
            raise PieceError(f"a piece of a layout that cannot be: {error}") from error


def _is_missing(arrival: Arrival, notice: PieceNotice) -> bool:
    transfer = arrival.missing.get(notice.piece)
    if transfer is None:
        return False
    whole = (arrival.chunk, arrival.prompt_tokens, arrival.layout)
    place = (transfer.piece.destination, transfer.destination_offset, transfer.nbytes)
    told = (notice.rank, notice.offset, notice.nbytes)
    return (notice.chunk, notice.prompt_tokens, notice.layout) == whole and told == place
