"""pdjax's side in `bench/transfer.py`: pages are gathered into a staging slot, written into the peer's ring by a
transfer backend, and scattered into pages there, chunk by chunk, as instances do it; a zero-byte write gives a slot
back."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from bench.transfer_work import HEAD_DIM, HEADS, LAYERS, WORD, Work
from pdjax.kernels import gather_pages, native, scatter_pages
from pdjax.launch.cache_folder import cache_root
from pdjax.transfer.backend import BackendOptions, Notice, PeerLost, Write, WriteDone, WriteFailed
from pdjax.transfer.registry import create

_RING, _SOURCE = 1, 2  # regions; a source's slots come after the latter
_SLOTS = 4
_BOUND = 30.0


class Pdjax:
    """Options: the backend's name, ``mapped`` or not, ``busy`` for a decode loop beside the target, ``step=TOKENS``."""

    def __init__(self, work: Work, role: str, options: list[str]) -> None:
        started = time.monotonic()
        self._work, self._role = work, role
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._backend = create(options[0], self._events.put, BackendOptions(mapped="mapped" in options))
        self._began = time.monotonic() - started
        native.load(cache_root() / "native")
        self._page_bytes = LAYERS * work.heads * 2 * work.page * HEAD_DIM * WORD
        step_tokens = next(int(option[5:]) for option in options if option.startswith("step="))
        self._slot_pages = max(step_tokens // work.page, 1)
        self._slot_bytes = self._slot_pages * self._page_bytes
        ids = work.page_ids(role)
        self._chunks = [ids[first : first + self._slot_pages] for first in range(0, len(ids), self._slot_pages)]
        self._pool = _pool(work, HEADS if role == "source" else work.heads, seed=1 if role == "source" else 2)
        self._writes = 0
        self._make_slots()
        if role == "target" and "busy" in options:
            threading.Thread(target=_decode, daemon=True).start()

    def describe(self) -> dict[str, Any]:
        return {"description": self._backend.describe().hex()}

    def connect(self, peer: dict[str, Any]) -> None:
        """Includes the first usable transfer: a slot's bytes, and their notice."""
        started = time.monotonic()
        self._backend.connect("peer", bytes.fromhex(peer["description"]))
        if self._role == "source":
            self._write(_SOURCE, 0, self._slot_bytes, b"first")
            self._next(WriteDone)
        else:
            self._next(Notice)
        self.first_transfer_s = self._began + time.monotonic() - started
        self.path = self._backend.path("peer")

    def send(self) -> None:
        free, credits, under_way = [True] * _SLOTS, [True] * _SLOTS, {}
        for number, pages in enumerate(self._chunks):
            slot = number % _SLOTS
            while not (free[slot] and credits[slot]):
                self._take(free, credits, under_way)
            free[slot] = credits[slot] = False
            notice = bytes([number, slot])
            begin, nbytes = slot * self._slot_bytes, len(pages) * self._page_bytes
            with self._backend.mapped("peer", _RING, begin, nbytes) as address:
                if address is not None:
                    whole = {"heads": range(self._work.heads), "layers": range(LAYERS)}
                    native.gather_to(address, self._pool, np.array(pages, np.int32), **whole)
                    under_way[self._write(_SOURCE, 0, 0, notice)] = slot
                    continue
            self._gather(slot, pages)
            under_way[self._write(_SOURCE + slot, begin, nbytes, notice)] = slot
        while not (all(free) and all(credits)):
            self._take(free, credits, under_way)

    def receive(self) -> None:
        for _ in self._chunks:
            number, slot = self._next(Notice).payload
            pages = self._chunks[number]
            ids = np.zeros(self._slot_pages, np.int32)
            ids[: len(pages)] = pages
            self._pool = jax.block_until_ready(scatter_pages(self._pool, self._slots[slot], ids, len(pages)))
            self._write(_SOURCE, 0, 0, bytes([slot]))

    def digest(self, role: str) -> str:
        sent = np.array(self._pool)[:, self._work.page_ids(role), : self._work.heads]
        return xxhash.xxh3_64_hexdigest(sent.tobytes())

    def _make_slots(self) -> None:
        words = self._slot_bytes // WORD
        if self._role == "source":
            self._slots = [jnp.zeros(words, jnp.uint16) for _ in range(_SLOTS)]
            for slot, array in enumerate(self._slots):
                self._backend.register(_SOURCE + slot, array.unsafe_buffer_pointer(), self._slot_bytes)
            self._backend.allocate(_RING, 4096)
            return
        address = self._backend.allocate(_RING, _SLOTS * self._slot_bytes)
        memory = (ctypes.c_char * (_SLOTS * self._slot_bytes)).from_address(address)
        ring = np.ctypeslib.as_array(memory).view(np.uint16).reshape(_SLOTS, words)
        self._slots = [jax.device_put(ring[slot]) for slot in range(_SLOTS)]
        self._credits = np.zeros(4096, np.uint8)
        self._backend.register(_SOURCE, self._credits.ctypes.data, self._credits.nbytes)

    def _gather(self, slot: int, pages: list[int]) -> None:
        """Fill a source slot."""
        ids = np.zeros(self._slot_pages, np.int32)
        ids[: len(pages)] = pages
        staged = gather_pages(self._pool, ids, len(pages), self._slots[slot], heads=self._work.heads)
        self._slots[slot] = jax.block_until_ready(staged)

    def _write(self, region: int, peer_offset: int, nbytes: int, notice: bytes) -> int:
        self._writes += 1
        self._backend.write(
            Write(self._writes, "peer", region, 0, _RING, peer_offset, nbytes, notice, time.monotonic() + _BOUND)
        )
        return self._writes

    def _take(self, free: list[bool], credits: list[bool], under_way: dict[int, int]) -> None:
        match self._next(WriteDone | Notice):
            case WriteDone(id):
                free[under_way.pop(id)] = True
            case Notice(payload):
                credits[payload[0]] = True

    def _next(self, kind: Any) -> Any:
        while True:
            event = self._events.get(timeout=_BOUND)
            if isinstance(event, WriteFailed | PeerLost):
                raise RuntimeError(event.cause)
            if isinstance(event, kind):
                return event


def _pool(work: Work, heads: int, seed: int) -> jax.Array:
    shape = (LAYERS, work.pool_pages, heads, 2, work.page, HEAD_DIM)
    pattern = np.frombuffer(np.random.default_rng(seed).bytes((1 << 20) + 14), np.uint16)
    pool = jax.jit(lambda: jnp.zeros(shape, jnp.uint16))()
    return jax.block_until_ready(pool.at[:].set(jnp.asarray(np.resize(pattern, shape))))


def _decode() -> None:
    """Steps like a small model's: what runs is short, compiled, and called from Python without a pause."""
    weights = [jnp.ones((576, 576), jnp.float32) for _ in range(30)]

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    x = jnp.ones((8, 576), jnp.float32)
    while True:
        x = jax.block_until_ready(step(x))
