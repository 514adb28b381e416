"""A prefill process's part of sending: its ranks' staging, and the backend that moves what is in it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
import numpy as np

from pdjax.disagg import orders
from pdjax.disagg.orders import ChunkSent, ClosePath, OpenPath, PathLost, SendChunk, TestPath
from pdjax.disagg.part import Part
from pdjax.disagg.pieces import Tally, plan_of_chunk
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.topology import Rank, in_order
from pdjax.kernels import native
from pdjax.transfer.backend import PeerLost, TransferError, Write, WriteDone, WriteFailed
from pdjax.transfer.checksum import xxh3
from pdjax.transfer.layout import Block, Chunk, Layout, Span, Transfer, TransferPlan, block_layers
from pdjax.transfer.path_test import CELL, PATH_REGION, PathTestCells
from pdjax.transfer.slot_memory import Device, SlotMemory
from pdjax.transfer.staging import SourceStaging, local_pages, local_shards, pages_of


@dataclass(frozen=True)
class _Peer:
    """A decode instance: its ranks by number, the size of their slots and the backend's names of their processes."""

    layout: Layout
    ranks: list[Rank]
    slot_bytes: list[int]
    names: list[str]

    @property
    def processes(self) -> list[str]:
        """The names, once each."""
        return list(dict.fromkeys(self.names))

    def offset(self, order: SendChunk, transfer: Transfer) -> int:
        """Where a piece of a chunk begins in its destination's region, in bytes."""
        return order.chunk.slot * self.slot_bytes[transfer.piece.destination] + transfer.destination_offset


class Sender:
    """See `pdjax.disagg.orders`. `carry_out` belongs to the device thread; `on_event` to one thread, any."""

    def __init__(self, part: Part) -> None:
        self.backend = part.backend
        self._test_cells = PathTestCells(part.backend, receives=False)
        self._runner = part.runner
        self._layout = part.layout
        self._state = part.state
        self._devices = part.devices
        self._verify = part.verify
        shards = local_shards(part.runner.pool)
        self._staging = {
            rank: SourceStaging(shards[device], first_region=1 + rank * part.slots, **part.staging)
            for rank, device in part.devices.items()
        }
        self._peers: dict[str, _Peer] = {}
        self._tally = Tally()  # of pieces, by chunk
        self._chunk_of: dict[int, int] = {}  # by write
        self._writes = 0

    def warm_up(self) -> None:
        """Compile the gathers."""
        shards = local_shards(self._runner.pool)
        for rank, staging in self._staging.items():
            shard = shards[self._devices[rank]]
            for layers in block_layers(self._state, self._layout.place(self._state, rank)):
                staging.gather(0, shard, [(Block(0, 0, Span(0, layers), range(1)), [0])])
            staging.wait(0)

    def check_integrity(self) -> None:
        """Raise RuntimeError if staging is not where the backend reads it."""
        for staging in self._staging.values():
            staging.check_integrity()

    def carry_out(self, order: orders.Order) -> ChunkSent | PathLost | None:
        """Do as the leader says. Returns what is to be reported at once; the rest comes by `on_event`."""
        match order:
            case OpenPath():
                return self._open(order)
            case ClosePath(link):
                peer = self._peers.pop(link, None)
                for name in peer.processes if peer is not None else ():
                    self.backend.disconnect(name)
                return None
            case SendChunk() | TestPath():
                peer = self._peers.get(order.link)
                if peer is None:
                    return ChunkSent(order.id, f"the path of {order.link} is closed")
                return self._send(order, peer) if isinstance(order, SendChunk) else self._test_path(order, peer)
            case _:
                raise TypeError(f"a prefill process was told {type(order).__name__}")

    def on_event(self, event: object) -> ChunkSent | PathLost | None:
        """Something has happened in the backend. Returns what is to be reported of it."""
        match event:
            case PeerLost(peer, cause):
                return PathLost(peer.rpartition("#")[0], cause)
            case WriteDone(id):
                return self._ended(id, None)
            case WriteFailed(id, cause):
                return self._ended(id, cause)
        return None

    def path(self, link: str) -> str:
        """How bytes reach a peer, in words."""
        return ", ".join(dict.fromkeys(map(self.backend.path, self._peers[link].processes)))

    def _new_write(self, chunk: int) -> int:
        self._writes += 1
        self._chunk_of[self._writes] = chunk
        return self._writes

    def _ended(self, write: int, error: str | None) -> ChunkSent | None:
        chunk = self._chunk_of.pop(write)
        over = self._tally.ended(chunk, error)
        return ChunkSent(chunk, over.error) if over is not None else None

    def _open(self, order: OpenPath) -> PathLost | None:
        ranks = in_order(order.ranks)
        processes = {transfer: f"{order.link}#{number}" for number, transfer in
                     enumerate(dict.fromkeys(rank.transfer for rank in ranks))}  # fmt: skip
        names = [processes[rank.transfer] for rank in ranks]
        state, layout = self._state, order.layout
        pages = layout.slot_pages(order.chunk_pages)
        slot_bytes = [layout.place(state, rank).slot_bytes(state, pages) for rank in range(layout.ranks)]
        self._peers[order.link] = _Peer(layout, ranks, slot_bytes, names)
        try:
            for transfer, name in processes.items():
                self.backend.connect(name, transfer)
        except TransferError as error:
            return PathLost(order.link, str(error))
        return None

    def _test_path(self, order: TestPath, peer: _Peer) -> None:
        sender = min(self._staging)
        offset = self._test_cells.fill(order.number, sender)
        notice = messages.encode(messages.PathNotice(order.number, sender, order.senders))
        self._tally.begin(order.id, len(peer.processes))
        for name in peer.processes:
            self.backend.write(
                Write(
                    id=self._new_write(order.id),
                    peer=name,
                    region=PATH_REGION,
                    offset=offset,
                    peer_region=PATH_REGION,
                    peer_offset=offset,
                    nbytes=CELL,
                    notice=notice,
                    deadline=time.monotonic() + order.seconds,
                )
            )

    def _send(self, order: SendChunk, peer: _Peer) -> ChunkSent | None:
        chunk = Chunk(order.chunk.first_page, order.chunk.pages, order.prompt_tokens)
        pieces = plan_of_chunk(self._state, self._layout, peer.layout, order.chunk)
        mine = [
            (number, transfer)
            for number, transfer in enumerate(pieces.transfers(chunk))
            if transfer.piece.source in self._staging
        ]
        if not mine:
            return ChunkSent(order.id, None)
        self._tally.begin(order.id, len(mine))
        # Each piece by itself: two ranks of the peer may be reached in different ways.
        shards = local_shards(self._runner.pool)
        staged = [each for each in mine if not self._store(order, peer, pieces, chunk, shards, *each)]
        if staged:
            self._gather(order, pieces, chunk, shards)
        for number, transfer in staged:
            staging = self._staging[transfer.piece.source]
            offset, nbytes = transfer.source_offset, transfer.nbytes
            checksum = staging.checksum(order.slot, offset, nbytes) if self._verify else None
            self._write(order, peer, number, transfer, checksum, nbytes=nbytes)
        return None

    def _store(
        self,
        order: SendChunk,
        peer: _Peer,
        pieces: TransferPlan,
        chunk: Chunk,
        shards: dict[Device, jax.Array],
        number: int,
        transfer: Transfer,
    ) -> bool:
        """Gather a piece where it is to land, if that is mapped here, and tell the peer. Returns whether it is."""
        piece = transfer.piece
        if not native.is_loaded() or self._staging[piece.source].memory is not SlotMemory.SHARED:
            return False
        place, shard = pieces.source_places[piece.source], shards[self._devices[piece.source]]
        pages = pieces.pages(chunk, piece.page_class)
        page_ids = local_pages(pages, order.page_ids, first=chunk.first_page, cp=self._layout.cp)
        name, region = peer.names[piece.destination], peer.ranks[piece.destination].region
        with self.backend.mapped(name, region, peer.offset(order, transfer), transfer.nbytes) as address:
            if address is None:
                return False
            native.gather_to(
                address,
                shard,
                np.array(page_ids, np.int32),
                heads=range(piece.heads.start - place.heads.start, piece.heads.stop - place.heads.start),
                layers=range(piece.layers.start - place.layers.start, piece.layers.stop - place.layers.start),
            )
            checksum: messages.Checksum | None = None
            if self._verify:
                checksum = "xxh3", xxh3(address, transfer.nbytes)
        self._write(order, peer, number, transfer, checksum, nbytes=0)
        return True

    def _gather(self, order: SendChunk, pieces: TransferPlan, chunk: Chunk, shards: dict[Device, jax.Array]) -> None:
        """Fill the slot of each of this process's ranks that has a part of the chunk."""
        for rank, staging in self._staging.items():
            parts = pages_of(pieces.gathers(rank, chunk), order.page_ids, first=chunk.first_page, cp=self._layout.cp)
            staging.gather(order.slot, shards[self._devices[rank]], parts)
        for staging in self._staging.values():
            staging.wait(order.slot)

    def _write(
        self,
        order: SendChunk,
        peer: _Peer,
        number: int,
        transfer: Transfer,
        checksum: messages.Checksum | None,
        *,
        nbytes: int,
    ) -> None:
        """Send a piece, or with no bytes only the word that it is there."""
        staging, rank = self._staging[transfer.piece.source], transfer.piece.destination
        notice = messages.PieceNotice(
            chunk=order.chunk,
            prompt_tokens=order.prompt_tokens,
            layout=self._layout,
            piece=number,
            rank=rank,
            offset=transfer.destination_offset,
            nbytes=transfer.nbytes,
            posted_at=time.time(),
            checksum=checksum,
        )
        self.backend.write(
            Write(
                id=self._new_write(order.id),
                peer=peer.names[rank],
                region=staging.region(order.slot),
                offset=transfer.source_offset,
                peer_region=peer.ranks[rank].region,
                peer_offset=peer.offset(order, transfer),
                nbytes=nbytes,
                notice=messages.encode(notice),
                deadline=time.monotonic() + order.seconds,
            )
        )
