"""What the leader of an instance has each of its processes do for a transfer, and what they report of it.

Orders travel with the engine's own, so that each has its place among the steps. The leader's process does the same as
the others, and reports to its own role.
"""

from __future__ import annotations

import msgspec

from pdjax.disagg.protocol.messages import ChunkNotice, PieceNotice
from pdjax.disagg.protocol.topology import Rank
from pdjax.transfer.layout import Layout


class OpenPath(msgspec.Struct, frozen=True, tag_field="type", tag="open"):
    """Prefill: connect to the ranks of a decode instance, whose slots take chunks of up to so many pages."""

    link: str
    layout: Layout
    chunk_pages: int
    ranks: list[Rank]


class ClosePath(msgspec.Struct, frozen=True, tag_field="type", tag="close"):
    """Prefill: disconnect; writes that are open end in failure."""

    link: str


class SendChunk(msgspec.Struct, frozen=True, tag_field="type", tag="send"):
    """Prefill: gather what this process's ranks have of a chunk into staging slot `slot`, and send it over a link.

    `page_ids` are the pages of the pool that have some of the chunk. Ends in one `ChunkSent`, in `seconds` or little
    more.
    """

    id: int
    link: str
    slot: int
    chunk: ChunkNotice
    prompt_tokens: int
    page_ids: list[int]
    seconds: float


class TestPath(msgspec.Struct, frozen=True, tag_field="type", tag="test"):
    """Prefill: send the test message of this number to every process of a decode instance. It comes from `senders`
    processes in all. Ends as a chunk does."""

    __test__ = False  # for pytest, which would take it for tests

    id: int
    link: str
    number: int
    senders: int
    seconds: float


class ScatterChunk(msgspec.Struct, frozen=True, tag_field="type", tag="scatter"):
    """Decode: copy what has landed for this process's ranks out of the chunk's slot into the pool, of which `page_ids`
    are the pages that have some of the chunk."""

    layout: Layout  # of the prefill side
    chunk: ChunkNotice
    prompt_tokens: int
    page_ids: list[int]


class ZeroPages(msgspec.Struct, frozen=True, tag_field="type", tag="zero"):
    """Decode: fill pages of a dp rank's pool with zeros, by way of a slot."""

    slot: int
    dp_rank: int
    page_ids: list[int]


class Drain(msgspec.Struct, frozen=True, tag_field="type", tag="drain"):
    """Decode: cut off the processes so described, if any, then run the backend dry. Ends in one `Dry`."""

    id: int
    cut_off: list[bytes] = []


class ChunkSent(msgspec.Struct, frozen=True, tag_field="type", tag="sent"):
    """Nothing of this process's part of a chunk is on its way any more; `error` says what has failed."""

    id: int
    error: str | None


class PathLost(msgspec.Struct, frozen=True, tag_field="type", tag="path_lost"):
    """This process can't reach a process of the decode instance."""

    link: str
    cause: str


class PieceLanded(msgspec.Struct, frozen=True, tag_field="type", tag="landed"):
    """A piece has landed with this process; `intact`: as it was sent."""

    notice: PieceNotice
    intact: bool


class PathTested(msgspec.Struct, frozen=True, tag_field="type", tag="tested"):
    """One of the test messages of a number has come to this process; `intact`: as it was sent."""

    number: int
    senders: int
    intact: bool


class NoticeRefused(msgspec.Struct, frozen=True, tag_field="type", tag="refused"):
    """A notice was dropped; the sentence says why."""

    reason: str


class SlotEmptied(msgspec.Struct, frozen=True, tag_field="type", tag="emptied"):
    """Decode: this process has carried out the `ScatterChunk` or `ZeroPages` of a slot."""

    slot: int


class Dry(msgspec.Struct, frozen=True, tag_field="type", tag="dry"):
    """A `Drain` is done, or `error` says why it can't be."""

    id: int
    error: str | None = None


Order = OpenPath | ClosePath | SendChunk | TestPath | ScatterChunk | ZeroPages | Drain
Report = ChunkSent | PathLost | PieceLanded | PathTested | NoticeRefused | SlotEmptied | Dry

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    """MessagePack; the same message makes the same bytes."""
    return _encoder.encode(message)


def decode_order(body: bytes) -> Order:
    """Raises msgspec.DecodeError."""
    return _orders.decode(body)


def decode_report(body: bytes) -> Report:
    """Raises msgspec.DecodeError."""
    return _reports.decode(body)
