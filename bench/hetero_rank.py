"""A rank for bench/hetero.py: a process with its part of a request's KV, a UCX backend and staging of its own.

It takes JSON lines and prints JSON lines. A source gathers and writes what it is told to, a destination scatters a
chunk when all its pieces have landed. Both also hold the same tokens in the layout that per-token slices need.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.hetero_tokens import Slices, TokenSource, TokenTarget
from pdjax.cache.spec import StateSpec
from pdjax.kernels import gather_pages, native, scatter_pages
from pdjax.launch.cache_folder import cache_root
from pdjax.net import mpi
from pdjax.transfer.backend import BackendOptions, Notice, Write, WriteFailed
from pdjax.transfer.layout import Chunk, Layout, Place, TransferPlan, plan
from pdjax.transfer.ucx.backend import UcxBackend

TOKENS, CHUNK_PAGES = 2048, 32
SPEC = StateSpec("kv", layers=32, heads=8, head_dim=128, page_size=16, dtype="bfloat16")
PAGES = SPEC.pages(TOKENS)
RUN_BYTES = SPEC.run_words * SPEC.word_bytes
RING, FIRST_SLOT = 1, 10  # regions
PATIENCE = 60.0  # seconds


@dataclass(frozen=True)
class Route:
    """From one layout to another, as tensor parallelism of both sides."""

    source_tp: int
    destination_tp: int

    def plan(self) -> TransferPlan:
        """The transfer plan."""
        return plan(SPEC, Layout(tp=self.source_tp), Layout(tp=self.destination_tp))


def chunks() -> list[Chunk]:
    """The request, in the pieces that a prefill would compute it."""
    return [Chunk(first, min(CHUNK_PAGES, PAGES - first), TOKENS) for first in range(0, PAGES, CHUNK_PAGES)]


class Rank:
    """What both sides have: a pool [layer, page, head, K|V, slot, head_dim], a page table, a backend."""

    def __init__(self, tp: int, rank: int, path: str) -> None:
        self.rank = rank
        self.place: Place = Layout(tp=tp).places(SPEC, 0)[rank]
        self.heads = self.place.heads.count
        self.slot_bytes = CHUNK_PAGES * self.heads * SPEC.layers * RUN_BYTES
        self.events: queue.Queue[Any] = queue.Queue()
        self.backend = UcxBackend(self.events.put, BackendOptions(mapped=path == "mapped"))
        self.table = np.random.default_rng(rank).permutation(PAGES).astype(np.int32) + 1
        # Numbers that say where they belong: the layer, the page of the request and the head.
        numbers = np.arange(SPEC.layers * PAGES * SPEC.heads, dtype=np.uint16).reshape(SPEC.layers, PAGES, SPEC.heads)
        numbers = numbers[:, :, self.place.heads.start : self.place.heads.stop, None, None, None]
        shape = (SPEC.layers, PAGES + 1, self.heads, 2, SPEC.page_size, SPEC.head_dim)
        self.numbers = numbers
        self.pool = jnp.zeros(shape, SPEC.word_dtype)
        self.tokens_nbytes = SPEC.layers * 2 * TOKENS * self.heads * SPEC.head_dim * SPEC.word_bytes

    def ids(self, pages: range) -> np.ndarray:
        """Pages of the pool, filled up to a chunk's most."""
        ids = np.zeros(CHUNK_PAGES, np.int32)
        ids[: len(pages)] = self.table[list(pages)]
        return ids


class Source(Rank):
    """A pool with a request in it, and a staging slot a chunk."""

    def __init__(self, tp: int, rank: int, path: str) -> None:
        super().__init__(tp, rank, path)
        self.pool = self.pool.at[:, self.table].set(self.numbers)
        self.slots = [jnp.zeros(self.slot_bytes // SPEC.word_bytes, SPEC.word_dtype) for _ in chunks()]
        self.addresses = [slot.unsafe_buffer_pointer() for slot in self.slots]
        for index, address in enumerate(self.addresses):
            self.backend.register(FIRST_SLOT + index, address, self.slot_bytes)
        self.tokens = TokenSource(self.tokens_nbytes)
        self._gather(0, chunks()[0].pages, range(chunks()[0].pages), 0)

    def send(self, route: Route) -> None:
        """Gather each chunk and write its pieces; returns when all have left."""
        whole = route.plan()
        for index, chunk in enumerate(chunks()):
            for block in whole.gathers(self.rank, chunk):
                self._gather(index, len(block.pages), block.pages, block.offset)
            for transfer in whole.transfers(chunk):
                if transfer.piece.source == self.rank:
                    self._write(route, index, transfer.piece.destination, transfer)
        self._wait(sum(piece.source == self.rank for piece in whole.pieces) * len(chunks()))

    def send_tokens(self, route: Route) -> None:
        """Write every token's heads by themselves, then one notice a destination."""
        head_bytes = SPEC.head_dim * SPEC.word_bytes
        for piece in route.plan().pieces:
            if piece.source != self.rank:
                continue
            theirs = Layout(tp=route.destination_tp).places(SPEC, 0)[piece.destination]
            slices = Slices(
                rows=SPEC.layers * 2 * TOKENS,
                nbytes=piece.heads.count * head_bytes,
                source_offset=(piece.heads.start - self.place.heads.start) * head_bytes,
                source_stride=self.place.heads.count * head_bytes,
                target_offset=(piece.heads.start - theirs.heads.start) * head_bytes,
                target_stride=theirs.heads.count * head_bytes,
            )
            notice = {"mode": "tokens", "route": [route.source_tp, route.destination_tp], "chunk": 0}
            self.tokens.send(f"{route.destination_tp}.{piece.destination}", slices, json.dumps(notice).encode())

    def _gather(self, index: int, count: int, pages: range, offset: int) -> None:
        slot = gather_pages(self.pool, self.ids(pages), count, self.slots[index], first_run=offset // RUN_BYTES)
        self.slots[index] = jax.block_until_ready(slot)
        if slot.unsafe_buffer_pointer() != self.addresses[index]:
            raise RuntimeError("a staging slot has moved")

    def _write(self, route: Route, index: int, destination: int, transfer: Any) -> None:
        peer = f"{route.destination_tp}.{destination}"
        places = Layout(tp=route.destination_tp).places(SPEC, 0)
        slot_bytes = CHUNK_PAGES * places[destination].heads.count * SPEC.layers * RUN_BYTES
        notice = {"mode": "staging", "route": [route.source_tp, route.destination_tp], "chunk": index}
        self.backend.write(
            Write(
                id=index,
                peer=peer,
                region=FIRST_SLOT + index,
                offset=transfer.source_offset,
                peer_region=RING,
                peer_offset=index * slot_bytes + transfer.destination_offset,
                nbytes=transfer.nbytes,
                notice=json.dumps(notice).encode(),
                deadline=time.monotonic() + PATIENCE,
            )
        )

    def _wait(self, writes: int) -> None:
        for _ in range(writes):
            event = self.events.get(timeout=PATIENCE)
            if isinstance(event, WriteFailed):
                raise RuntimeError(event.cause)


class Destination(Rank):
    """An empty pool, and a ring with a slot a chunk."""

    def __init__(self, tp: int, rank: int, path: str) -> None:
        super().__init__(tp, rank, path)
        address = self.backend.allocate(RING, len(chunks()) * self.slot_bytes)
        memory = (ctypes.c_char * (len(chunks()) * self.slot_bytes)).from_address(address)
        words = np.ctypeslib.as_array(memory).view(SPEC.word_dtype).reshape(len(chunks()), -1)
        self.slots = [jax.device_put(each) for each in words]
        if any(slot.unsafe_buffer_pointer() != each.ctypes.data for slot, each in zip(self.slots, words)):
            raise RuntimeError("the ring cannot be read in place")
        self.tokens = TokenTarget(self.tokens_nbytes, lambda payload: self.events.put(Notice(payload)))
        self._scatter(0, chunks()[0].pages, range(chunks()[0].pages), 0)
        self.landed: dict[tuple[str, tuple[int, int], int], int] = {}

    def receive(self, notice: dict[str, Any]) -> bool:
        """Count what has landed, scatter a chunk that is whole. Returns whether the request is here."""
        route = Route(*notice["route"])
        whole = route.plan()
        key = (notice["mode"], (route.source_tp, route.destination_tp), notice["chunk"])
        self.landed[key] = self.landed.get(key, 0) + 1
        chunk = chunks()[notice["chunk"]]
        if self.landed[key] < len(whole.sources(self.rank, chunk)):
            return False
        if notice["mode"] == "tokens":
            self.landed.clear()
            return True
        for block in whole.scatters(self.rank, chunk):
            self._scatter(notice["chunk"], len(block.pages), block.pages, block.offset)
        self.landed[key] = -1
        if list(self.landed.values()).count(-1) < len(chunks()):
            return False
        self.landed.clear()
        return True

    def _scatter(self, index: int, count: int, pages: range, offset: int) -> None:
        pool = scatter_pages(self.pool, self.slots[index], self.ids(pages), count, first_run=offset // RUN_BYTES)
        self.pool = jax.block_until_ready(pool)

    def check(self) -> bool:
        """Whether every word is where it belongs; empties the pool for the next time."""
        here = np.asarray(self.pool[:, self.table])
        right = bool((here == self.numbers).all())
        self.pool = self.pool * 0
        return right


def say(**line: Any) -> None:
    """One JSON line, with the processor time that this process has used in all."""
    print(json.dumps({"cpu": time.process_time()} | line), flush=True)


def main() -> None:
    """Serve commands until the input ends."""
    parser = argparse.ArgumentParser(description="A rank of bench/hetero.py.")
    parser.add_argument("side", choices=["source", "destination"])
    parser.add_argument("tp", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("path", choices=["put", "mapped"])
    options = parser.parse_args()
    native.load(cache_root() / "native")
    made = (Source if options.side == "source" else Destination)(options.tp, options.rank, options.path)
    described = {"description": made.backend.describe().hex()}
    say(**described, **({"tokens": made.tokens.description} if isinstance(made, Destination) else {}))
    commands: queue.Queue[Any] = made.events if isinstance(made, Destination) else queue.Queue()

    def read() -> None:
        for text in sys.stdin:
            commands.put(json.loads(text))
        commands.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (command := commands.get()) is not None:
        if isinstance(command, Notice):
            assert isinstance(made, Destination)
            if made.receive(json.loads(command.payload)):
                say(event="here")
            continue
        match command, made:
            case {"op": "connect", "peers": peers}, Source():
                for name, peer in peers.items():
                    made.backend.connect(name, bytes.fromhex(peer["description"]))
                    made.tokens.connect(name, peer["tokens"], mapped=options.path == "mapped")
                say(event="connected", path=made.backend.path(next(iter(peers))))
            case {"op": "send", "mode": mode, "route": route}, Source():
                (made.send if mode == "staging" else made.send_tokens)(Route(*route))
                say(event="sent")
            case {"op": "check"}, Destination():
                say(event="checked", right=made.check())
    made.backend.close()
    mpi.shutdown(0)


if __name__ == "__main__":
    main()
