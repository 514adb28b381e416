"""One side of a tested data path: a backend with a ring and a source, and what is measured on it."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from pdjax.config import Config
from pdjax.launch.data_plane import start_backend
from pdjax.transfer.backend import Notice, PeerLost, Write, WriteDone, WriteFailed
from pdjax.transfer.checksum import xxh3
from pdjax.transfer.rings import make_ring
from pdjax.transfer.slot_memory import Device, SlotMemory, memory_of

SLOT, SLOTS = 8 << 20, 4  # bytes of a piece at most, and pieces under way at a time
_RING, _SOURCE = 1, 2  # regions
_PINGS = 200
_BOUND = 30.0  # seconds for each series
_SMALL = 64


class PathFailed(Exception):
    """A write has failed, or its bytes are not what was sent; the sentence says which."""


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """Comes with a piece of a series. The last of a series has been checksummed, so that it can be verified."""

    slot: int
    nbytes: int
    checksum: int | None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """To be answered with a pong."""

    number: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer."""

    number: int


_decoder = msgspec.msgpack.Decoder(Piece | Ping | Pong)


@dataclass(frozen=True)
class Measured:
    """A series: bytes of a piece, bytes a second over all of it, and whether its bytes were compared."""

    nbytes: int
    rate: float
    verified: bool


class PathSide:
    """Bytes are moved out of a device's memory and into it.

    Args:
        post: called on the backend's thread.

    Attributes:
        summary: what moves the bytes, and where they are.
        peer: whom pings are answered to.
    """

    def __init__(self, config: Config, post: Callable[[object], None], device: Device) -> None:
        self.backend, self.summary = start_backend(config, post, [device])
        self.peer = "peer"
        self.moves = config.transfer.backend != "fake"
        self._writes = 0
        memory = memory_of(device, self.backend)
        self._ring = make_ring(memory, device, (SLOTS, SLOT), np.dtype(np.uint8), self.backend, _RING)
        self._bytes = np.frombuffer(np.random.default_rng(1).bytes(SLOTS * SLOT), np.uint8).copy()
        if memory is SlotMemory.DIRECT:
            with jax.default_device(device):
                self._source = jax.block_until_ready(jnp.array(self._bytes))
            self.backend.register_device_memory(_SOURCE, self._source.unsafe_buffer_pointer(), SLOTS * SLOT)
        else:
            self.backend.register(_SOURCE, self._bytes.ctypes.data, SLOTS * SLOT)

    def close(self) -> None:
        """Release the backend."""
        self.backend.close()

    def ping(self, peer: str, inbox: queue.SimpleQueue[object]) -> float:
        """Seconds from a small write to the notice of its answer, in the median. Raises `PathFailed`."""
        took = []
        for number in range(_PINGS):
            began = time.monotonic()
            self._write(peer, 0, _SMALL, Ping(number))
            while True:
                event = self._next(inbox, began + _BOUND, "a small write was not answered")
                if isinstance(event, Notice) and _decoder.decode(event.payload) == Pong(number):
                    break
            took.append(time.monotonic() - began)
        return statistics.median(took)

    def answer(self, event: object) -> None:
        """Answer a ping."""
        if isinstance(event, Notice):
            asked = _decoder.decode(event.payload)
            if isinstance(asked, Ping):
                self._write(self.peer, 0, _SMALL, Pong(asked.number))

    def send(self, peer: str, nbytes: int, count: int, inbox: queue.SimpleQueue[object]) -> Measured:
        """Write a series, `SLOTS` pieces under way at a time. Raises `PathFailed`."""
        nbytes = min(nbytes, SLOT)
        began = time.monotonic()
        under_way = 0
        for number in range(count):
            while under_way >= SLOTS:
                under_way -= self._has_ended(inbox, began)
            last = xxh3(self._bytes.ctypes.data + number % SLOTS * SLOT, nbytes) if number == count - 1 else None
            self._write(peer, number % SLOTS, nbytes, Piece(number % SLOTS, nbytes, last))
            under_way += 1
        while under_way:
            under_way -= self._has_ended(inbox, began)
        return Measured(nbytes, count * nbytes / (time.monotonic() - began), verified=False)

    def receive(self, nbytes: int, count: int, inbox: queue.SimpleQueue[object]) -> Measured:
        """Take a series in that has just been asked for, and verify its last piece. Raises `PathFailed`."""
        nbytes = min(nbytes, SLOT)
        began, came = time.monotonic(), 0
        while came < count:
            event = self._next(inbox, began + _BOUND, f"{came} of {count} pieces of {nbytes} bytes came")
            if not isinstance(event, Notice) or not isinstance(piece := _decoder.decode(event.payload), Piece):
                continue
            came += 1
            if piece.checksum is None or not self.moves:
                continue
            if self._ring.checksum("xxh3", piece.slot, 0, nbytes) != piece.checksum:
                raise PathFailed(f"a piece of {nbytes} bytes arrived damaged: this path cannot be used")
        return Measured(nbytes, count * nbytes / (time.monotonic() - began), verified=self.moves)

    def _write(self, peer: str, slot: int, nbytes: int, notice: Piece | Ping | Pong) -> None:
        self._writes += 1
        self.backend.write(
            Write(
                id=self._writes,
                peer=peer,
                region=_SOURCE,
                offset=slot * SLOT,
                peer_region=_RING,
                peer_offset=slot * SLOT,
                nbytes=nbytes,
                notice=msgspec.msgpack.encode(notice),
                deadline=time.monotonic() + _BOUND,
            )
        )

    def _has_ended(self, inbox: queue.SimpleQueue[object], began: float) -> bool:
        return isinstance(self._next(inbox, began + _BOUND, "a write has not ended"), WriteDone)

    def _next(self, inbox: queue.SimpleQueue[object], until: float, failing: str) -> object:
        try:
            event = inbox.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            raise PathFailed(f"{failing} within {_BOUND:g} s: is this network interface the right one?") from None
        if isinstance(event, WriteFailed | PeerLost):
            raise PathFailed(f"a write has failed: {event.cause}")
        return event
