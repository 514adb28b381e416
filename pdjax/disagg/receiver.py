"""A decode process's part of receiving: its ranks' rings, and the backend whose peers write into them."""

from __future__ import annotations

import jax

from pdjax.disagg import orders
from pdjax.disagg.orders import Drain, Dry, NoticeRefused, PathTested, PieceLanded, ScatterChunk, SlotEmptied, ZeroPages
from pdjax.disagg.part import Part
from pdjax.disagg.pieces import plan_of_chunk
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.topology import region_of
from pdjax.transfer.backend import Drained, Notice, TransferError
from pdjax.transfer.layout import Block, Chunk, Span, block_layers
from pdjax.transfer.path_test import PathTestCells
from pdjax.transfer.slot_memory import Device
from pdjax.transfer.staging import LandingRing, local_shards, pages_of, with_new_shards


class Receiver:
    """See `pdjax.disagg.orders`. `carry_out` belongs to the device thread; `on_event` to one thread, any."""

    def __init__(self, part: Part) -> None:
        self.backend = part.backend
        self._test_cells = PathTestCells(part.backend, receives=True)
        self._runner = part.runner
        self._layout = part.layout
        self._state = part.state
        self._verify = part.verify
        shards = local_shards(part.runner.pool)
        self._rank_of = {device: rank for rank, device in part.devices.items()}
        self._rings = {
            rank: LandingRing(shards[device], region=region_of(rank), **part.staging)
            for rank, device in part.devices.items()
        }

    def warm_up(self) -> None:
        """Compile the scatters, by writing what is in a slot to page 0: zeros, or what a peer has written already."""

        def scatter(device: Device, shard: jax.Array) -> jax.Array:
            rank = self._rank_of[device]
            for layers in block_layers(self._state, self._layout.place(self._state, rank)):
                shard = self._rings[rank].scatter(0, shard, [(Block(0, 0, Span(0, layers), range(1)), [0])])
            return shard

        self._runner.pool = with_new_shards(self._runner.pool, scatter)

    def check_integrity(self) -> None:
        """Raise RuntimeError if a ring is not where peers write."""
        for ring in self._rings.values():
            ring.check_integrity()

    def carry_out(self, order: orders.Order) -> SlotEmptied | Dry | None:
        """Do as the leader says. Returns what is to be reported at once; the rest comes by `on_event`."""
        match order:
            case ScatterChunk():
                self._scatter(order)
                return SlotEmptied(order.chunk.slot)
            case ZeroPages():
                self._zero(order)
                return SlotEmptied(order.slot)
            case Drain(id, cut_off):
                try:
                    self.backend.cut_off(cut_off)
                except TransferError as error:
                    return Dry(id, str(error))
                self.backend.drain(id)
                return None
            case _:
                raise TypeError(f"a decode process was told {type(order).__name__}")

    def on_event(self, event: object) -> orders.Report | None:
        """Something has happened in the backend. Returns what is to be reported of it."""
        match event:
            case Drained(id):
                return Dry(id)
            case Notice(payload):
                return self._verified(payload)
        return None

    def _verified(self, payload: bytes) -> PieceLanded | PathTested | NoticeRefused:
        try:
            notice = messages.decode_notice(payload)
        except messages.ProtocolError as error:
            return NoticeRefused(str(error))
        if isinstance(notice, messages.PathNotice):
            intact = not self._verify or self._test_cells.holds(notice.number, notice.sender)
            return PathTested(notice.number, notice.senders, intact)
        ring = self._rings.get(notice.rank)
        if ring is None:
            return NoticeRefused(f"a notice for rank {notice.rank} has come to a process that does not have it")
        if not self._verify:
            return PieceLanded(notice, True)
        if notice.checksum is None:
            return PieceLanded(notice, False)
        algorithm, sent = notice.checksum
        return PieceLanded(notice, ring.checksum(algorithm, notice.chunk.slot, notice.offset, notice.nbytes) == sent)

    def _zero(self, order: ZeroPages) -> None:
        holders = {place.rank for place in self._layout.places(self._state, order.dp_rank)}

        def zero(device: Device, shard: jax.Array) -> jax.Array:
            rank = self._rank_of[device]
            return self._rings[rank].zero(order.slot, shard, order.page_ids) if rank in holders else shard

        self._runner.pool = with_new_shards(self._runner.pool, zero)

    def _scatter(self, order: ScatterChunk) -> None:
        chunk = Chunk(order.chunk.first_page, order.chunk.pages, order.prompt_tokens)
        pieces = plan_of_chunk(self._state, order.layout, self._layout, order.chunk)

        def scatter(device: Device, shard: jax.Array) -> jax.Array:
            rank = self._rank_of[device]
            parts = pages_of(pieces.scatters(rank, chunk), order.page_ids, first=chunk.first_page, cp=self._layout.cp)
            return self._rings[rank].scatter(order.chunk.slot, shard, parts)

        self._runner.pool = with_new_shards(self._runner.pool, scatter)
