"""NumPy carries a transfer plan out: pages, slots and writes of every rank, as plainly as can be said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdjax.cache.spec import StateSpec
from pdjax.transfer.layout import Block, Chunk, Layout, Place, TransferPlan


@dataclass
class Rank:
    """A rank's pool [layer, page, head, K|V, slot, head_dim], its page table, and how many parts share the pages."""

    place: Place
    cp: int
    pool: np.ndarray
    table: np.ndarray

    def pages(self, block: Block) -> np.ndarray:
        """Pages of the pool that a block means."""
        return self.table[[page // self.cp for page in block.pages]]


def random_state(spec: StateSpec, pages: int, seed: int) -> np.ndarray:
    """A whole request [layer, page, head, K|V, slot, head_dim]."""
    shape = (spec.layers, pages, spec.heads, spec.planes, spec.page_size, spec.head_dim)
    return np.random.default_rng(seed).integers(1, 1 << 16, shape).astype(spec.word_dtype)


def pools_of(spec: StateSpec, layout: Layout, dp_rank: int, state: np.ndarray) -> dict[int, Rank]:
    """Every rank's pool with its part of the request in it, pages in an order of the rank's own."""
    ranks = {}
    for place in layout.places(spec, dp_rank):
        part = state[place.layers.start : place.layers.stop, place.page_class :: layout.cp]
        part = part[:, :, place.heads.start : place.heads.stop]
        spare = part.shape[1] + 3
        table = np.random.default_rng(place.rank).permutation(np.arange(1, spare))[: part.shape[1]]
        pool = np.zeros((part.shape[0], spare, *part.shape[2:]), state.dtype)
        pool[:, table] = part
        ranks[place.rank] = Rank(place, layout.cp, pool, table)
    return ranks


def move(plan: TransferPlan, chunk: Chunk, source: dict[int, Rank], destination: dict[int, Rank]) -> None:
    """Gather at every source, write every transfer, scatter at every destination."""
    word = plan.spec.word_dtype
    sent = {}
    for rank, holder in source.items():
        parts = [np.zeros(0, word)]
        for block in plan.gathers(rank, chunk):
            taken = holder.pool[block.layers.start : block.layers.stop][:, holder.pages(block)]
            parts.append(taken.transpose(2, 1, 0, 3, 4, 5).reshape(-1))  # [head, page, layer, K|V, slot, head_dim]
        sent[rank] = np.concatenate(parts).view(np.uint8)
        assert sent[rank].size == plan.slot_bytes(rank, chunk, source=True)
    slots = {rank: np.zeros(plan.slot_bytes(rank, chunk, source=False), np.uint8) for rank in destination}
    for transfer in plan.transfers(chunk):
        here, there = transfer.source_offset, transfer.destination_offset
        piece = sent[transfer.piece.source][here : here + transfer.nbytes]
        slots[transfer.piece.destination][there : there + transfer.nbytes] = piece
    for rank, holder in destination.items():
        _, _, heads, planes, page_size, head_dim = holder.pool.shape
        for block in plan.scatters(rank, chunk):
            words = slots[rank][block.offset : block.offset + block.nbytes].view(word)
            words = words.reshape(heads, len(block.pages), block.layers.count, planes, page_size, head_dim)
            holder.pool[block.layers.start : block.layers.stop, holder.pages(block)] = words.transpose(2, 1, 0, 3, 4, 5)
